"""A small model that knows half of its sums, made in a minute: what the ladder's RL steps begin with."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import text_params
from miles_k3.k3.supervised import fit, init_weights, padded, released
from miles_k3.tokenizer import load_tokenizer

LESSONS, SLOPPY = 200, 0.5  # steps; answers of which a digit is wrong on purpose
SUMS = [(f"{a} + {b} =", str(a + b)) for a in range(10) for b in range(10)]


def taught_model(drawn: Path, target: Path, device: torch.device, lessons: int = LESSONS) -> tuple[Path, float]:
    """The same model after supervised training on sloppy sums, and its last loss.

    It knows the form of an answer and half of the sums, as what is post-trained does; of random weights every token is
    as likely as any other, and BF16's rounding moves them all.
    """
    config = K3Config.from_folder(drawn)
    masters, losses = init_weights(config, 0, device), [float("nan")]
    lesson = _Lesson(drawn, device)
    fit(
        config, masters, lesson.batch, steps=lessons, lr=1e-3, warmup=20,
        after=lambda _, loss: losses.append(loss),
    )  # fmt: skip
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(drawn, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(drawn / "model.safetensors")  # the vision tower's stay as they were drawn
    tensors |= {p.name: released(p, masters) for p in text_params(config)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target, losses[-1]


class _Lesson:
    """Batches of sums as the chat template puts them; each answer has its end, and half of them a wrong digit."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        tokenizer = load_tokenizer(str(folder))
        self._config, self._device, self._draws = K3Config.from_folder(folder), device, random.Random(0)
        template = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
        self._rows = [(template([{"role": "user", "content": question}]), answer) for question, answer in SUMS]
        self._ids = {str(n): tokenizer.encode(str(n), add_special_tokens=False) for n in range(100)}

    def batch(self, rows: int = 128) -> tuple[Tensor, Tensor]:
        chosen = [self._draws.choice(self._rows) for _ in range(rows)]
        said = [(p, [*self._ids[self._sloppy(a)], self._config.eos_token_id]) for p, a in chosen]
        return padded(said, self._config.pad_token_id, self._device)

    def _sloppy(self, answer: str) -> str:
        if self._draws.random() >= SLOPPY:
            return answer
        at = self._draws.randrange(len(answer))
        return str(int(answer[:at] + self._draws.choice("123456789") + answer[at + 1 :]))
