"""Tokenizer and graders for the tests of this folder; graders live here so that grading processes can import them."""

import os
import signal
import sys
import time

import numpy as np

from miles_k3.types import Prompt


class CharTokenizer:
    """One token a character, rendered as <s>system</s><u>question</u><a>."""

    chat_template: str | None = "characters"
    name_or_path = "characters"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, return_dict):
        assert tokenize
        assert add_generation_prompt
        assert not return_dict
        text = "".join(f"<{m['role'][0]}>{m['content']}</{m['role'][0]}>" for m in messages) + "<a>"
        return [ord(c) for c in text]


def decode(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.token_ids))


def prompt(answer: str = "", prompt_id: str = "p", **payload) -> Prompt:
    return Prompt(id=prompt_id, text="q", token_ids=(1, 2, 3), answer=answer, payload=payload)


VALUES = {
    "none": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "string": "0.5",
    "dict": {"reward": 1.0},
    "list": [1.0],
    "complex": 1j,
    "huge": 10**400,
    "zero": 0.0,
    "half": 0.5,
    "int": 1,
    "negative": -2,
    "bool": True,
    "numpy": np.float32(0.25),
}


class ScriptedGrader:
    """Does what the text says."""

    def prepare(self) -> None:
        pass

    def score(self, prompt: Prompt, text: str):
        match text.split(":"):
            case ["value", key]:
                return VALUES[key]
            case ["hang"]:
                time.sleep(3600)
            case ["burn"]:
                return 7 ** (10**9) % 3  # one bytecode that never returns: signals and threads can't end it
            case ["raise"]:
                raise RuntimeError("no such unit")
            case ["exit", code]:
                os._exit(int(code))
            case ["sysexit"]:
                sys.exit(3)
            case ["memory"]:
                return float(np.empty(2 << 30, np.uint8).size)
            case ["torch"]:
                return float("torch" in sys.modules)
            case ["pid"]:
                return float(os.getpid())
            case ["server"]:
                return float(os.getppid())
            case ["kill server"]:
                server = os.getppid()
                assert server > 1
                os.kill(server, signal.SIGKILL)
                time.sleep(3600)
            case ["tokens"]:
                return float(len(prompt.token_ids))
            case ["print"]:
                print("printed by a scorer", flush=True)
                return 1.0
            case ["answer", answer]:
                return float(answer == prompt.answer)
        raise AssertionError(text)


class BrokenGrader(ScriptedGrader):
    def prepare(self) -> None:
        raise ValueError("no word list")


class DyingGrader(ScriptedGrader):
    def prepare(self) -> None:
        os._exit(9)


class SlowStartGrader(ScriptedGrader):
    def prepare(self) -> None:
        time.sleep(0.5)
