"""What an export answers beside base and adapter: logits of the fp32 oracle on a few prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_k3.adapters.content import AdapterSource, parts
from miles_k3.errors import ConfigError
from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.safetensors_io import Checkpoint
from miles_k3.tokenizer import load_tokenizer

ORACLE_NUMBERS = 10**9  # a larger model takes the oracle hours on a CPU; it is asked then only when a file is named
PROMPTS = (
    "What is 17 + 25?",
    "A train leaves at 9:40 and arrives at 11:05. How long does it take?",
    "Write a function that reverses a list.",
    "List the first five prime numbers.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitDifference:
    """Export against base + adapter, over every token of the prompts; `adapter_*`: base + adapter against the base.

    `max`, `mean`: of |Δ logit|; `kl`: mean KL(base + adapter || export) in nats; `same_top`: share of tokens whose
    likeliest next token is the same.
    """

    tokens: int
    max: float
    mean: float
    kl: float
    same_top: float
    adapter_max: float
    adapter_mean: float
    adapter_kl: float


class _Tensors(Mapping[str, Tensor]):
    """A checkpoint's or an adapter's tensors, read when the oracle asks for them."""

    def __init__(self, names: Sequence[str], read: Any) -> None:
        self._names, self._read = dict.fromkeys(names), lru_cache(maxsize=4)(read)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def compare_logits(
    config: K3Config, base: Path, adapter: AdapterSource, exported: Path, prompts: Path | None
) -> dict[str, Any]:
    """A LogitDifference as JSON, or why there is none under `left_out`. `prompts`: a file, a prompt a line."""
    texts = _texts(prompts)
    with Checkpoint(base) as before, Checkpoint(exported) as after:
        numbers = sum(p.num_params for p in before.table(config))
        if prompts is None and numbers > ORACLE_NUMBERS:
            return {
                "left_out": f"{numbers:,} parameters are much for the oracle; name prompts with --prompts to ask it"
            }
        tokens = [torch.tensor([ids]) for ids in _token_ids(exported, config, texts)]
        weights = [_Tensors(list(c.headers), _reader(c, config)) for c in (before, after)]
        pair = _Tensors(list(adapter.layout), _whole(adapter))
        models = [
            NaiveK3(config, weights[0]),
            NaiveK3(config, weights[0], pair, adapter.config.scaling),
            NaiveK3(config, weights[1]),
        ]
        with torch.no_grad():
            plain, wanted, found = (torch.cat([model(t)[0] for t in tokens]) for model in models)
    return asdict(_difference(plain, wanted, found))


def _difference(plain: Tensor, wanted: Tensor, found: Tensor) -> LogitDifference:
    """From logits [T, vocab] of base, base + adapter, and export."""
    apart, moved = (found - wanted).abs(), (wanted - plain).abs()
    return LogitDifference(
        tokens=len(wanted), max=float(apart.max()), mean=float(apart.mean()), kl=_kl(wanted, found),
        same_top=float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
        adapter_max=float(moved.max()), adapter_mean=float(moved.mean()), adapter_kl=_kl(wanted, plain),
    )  # fmt: skip


def _kl(p: Tensor, q: Tensor) -> float:
    """Mean over tokens of KL(p || q) of logits."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def _texts(prompts: Path | None) -> Sequence[str]:
    if prompts is None:
        return PROMPTS
    try:
        texts = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--prompts {prompts} can't be read ({e}); expected a text file, a prompt a line") from None
    if not texts:
        raise ConfigError(f"--prompts {prompts} holds no prompt; expected a text file, a prompt a line")
    return texts


def _token_ids(folder: Path, config: K3Config, texts: Sequence[str]) -> list[list[int]]:
    """The chat template's tokens of each text; without a tokenizer in the folder, numbers made from its characters."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return [[ord(c) % config.vocab_size for c in text] for text in texts]
    tokenizer = load_tokenizer(str(folder))
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        list(tokenizer.apply_chat_template(c, tokenize=True, add_generation_prompt=True, return_dict=False))
        for c in chats
    ]


def _reader(checkpoint: Checkpoint, config: K3Config) -> Any:
    table = {p.name: p for p in checkpoint.table(config)}
    return lambda name: checkpoint.read(table[name])


def _whole(adapter: AdapterSource) -> Any:
    def read(name: str) -> Tensor:
        t = adapter.layout[name]
        if t.kind == "dense":
            return adapter.read(name)
        return torch.stack([adapter.read(name, expert) for expert in parts(t)])

    return read
