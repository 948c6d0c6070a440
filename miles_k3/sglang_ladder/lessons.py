"""A small model that knows half of its sums, made in a minute, and adapters that answer them otherwise."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_k3.adapters.layout import adapter_layout
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import text_params
from miles_k3.k3.supervised import fit, fit_adapter, init_weights, padded, plain_weights, released
from miles_k3.tokenizer import load_tokenizer
from miles_k3.types import AdapterConfig

LESSONS, SLOPPY = 200, 0.5  # steps; answers of which a digit is wrong on purpose
SUMS = [(f"{a} + {b} =", str(a + b)) for a in range(10) for b in range(10)]


class Lesson:
    """Batches of sums as the chat template puts them; each answer has its end, and half of them a wrong digit.

    `say`: how a sum is said; `copies`: how often in a row, each time sloppily.
    """

    def __init__(
        self, folder: Path, device: torch.device, say: Callable[[str], str] = lambda answer: answer, copies: int = 1
    ) -> None:
        self._tokenizer = load_tokenizer(str(folder))
        self._config, self._device, self._draws = K3Config.from_folder(folder), device, random.Random(0)
        self._copies = copies
        template = partial(self._tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
        self.prompts: list[list[int]] = [template([{"role": "user", "content": question}]) for question, _ in SUMS]
        self._rows = [(prompt, say(answer)) for prompt, (_, answer) in zip(self.prompts, SUMS, strict=True)]
        self._ids: dict[str, list[int]] = {}

    def rows(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Prompts and what is said to them, as tokens."""
        chosen = [self._draws.choice(self._rows) for _ in range(count)]
        return [(p, [*(t for _ in range(self._copies) for t in self._said(a)), self._end]) for p, a in chosen]

    def batch(self, rows: int = 128) -> tuple[Tensor, Tensor]:
        return padded(self.rows(rows), self._config.pad_token_id, self._device)

    @property
    def _end(self) -> int:
        return self._config.eos_token_id

    def _said(self, answer: str) -> list[int]:
        said = self._sloppy(answer)
        if said not in self._ids:
            self._ids[said] = self._tokenizer.encode(said, add_special_tokens=False)
        return self._ids[said]

    def _sloppy(self, answer: str) -> str:
        if self._draws.random() >= SLOPPY:
            return answer
        at = self._draws.randrange(len(answer))
        return answer[:at] + self._draws.choice("123456789") + answer[at + 1 :]


def taught_model(
    drawn: Path, target: Path, device: torch.device, lessons: int = LESSONS, lesson: Lesson | None = None
) -> tuple[Path, float]:
    """The same model after supervised training on sloppy sums, and its last loss.

    It knows the form of an answer and half of the sums, as what is post-trained does; of random weights every token is
    as likely as any other, and BF16's rounding moves them all.
    """
    config = K3Config.from_folder(drawn)
    masters, losses = init_weights(config, 0, device), [float("nan")]
    fit(
        config, masters, (lesson or Lesson(drawn, device)).batch, steps=lessons, lr=1e-3, warmup=20,
        after=lambda _, loss: losses.append(loss),
    )  # fmt: skip
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(drawn, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(drawn / "model.safetensors")  # the vision tower's stay as they were drawn
    tensors |= {p.name: released(p, masters) for p in text_params(config)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target, losses[-1]


def taught_weights(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """A checkpoint's text tensors as `fit_adapter` and the oracle take them."""
    tensors = {name: t.to(device) for name, t in load_file(folder / "model.safetensors").items()}
    return plain_weights(K3Config.from_folder(folder), tensors)


def taught_adapter(
    config: K3Config, weights: Mapping[str, Tensor], lesson: Lesson, adapter: AdapterConfig, steps: int, lr: float
) -> tuple[dict[str, Tensor], float]:
    """A whole adapter of `adapter`'s form in BF16 on the host, trained over `weights`, and its last loss."""
    device = next(iter(weights.values())).device
    generator, losses = torch.Generator().manual_seed(0), [float("nan")]
    factors = {
        name: (torch.randn(t.shape, generator=generator) * t.shape[-1] ** -0.5 * (t.factor == "A")).to(device)
        for name, t in adapter_layout(config, adapter).items()
    }
    fit_adapter(
        config, weights, factors, lesson.batch, scaling=adapter.alpha / adapter.rank, steps=steps, lr=lr,
        after=lambda _, loss: losses.append(loss),
    )  # fmt: skip
    return {name: t.detach().to("cpu", torch.bfloat16) for name, t in factors.items()}, losses[-1]
