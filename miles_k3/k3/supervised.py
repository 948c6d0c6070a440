"""Supervised training of a small K3 from random weights, to be exported as a release is: BF16 with MXFP4 experts.

For models that a person can make in minutes; a forward of the oracle's, in fp32 over what the checkpoint will hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.ops.kda import kda_chunk
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.params import DType, Param, Part, expert_prefix, moe_prefix, text_params

FROZEN = ("A_log", "e_score_correction_bias")


class TrainableK3(NaiveK3):
    """The oracle with two parts made fast enough to train: the delta rule in chunks, all experts in one product."""

    @staticmethod
    def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        packed = Packed.from_lengths([q.shape[1]] * q.shape[0], q.device)
        streams = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
        out, _ = kda_chunk(streams[0], streams[1], streams[2], streams[3], streams[4], packed)
        return out.unflatten(0, q.shape[:2])

    def experts(self, z: Tensor, weights: Tensor, i: int) -> Tensor:
        w1, w3, w2 = (self.stacked(i, n) for n in ("w1", "w3", "w2"))
        hidden = self.situ(torch.einsum("btz,eiz->btei", z, w1), torch.einsum("btz,eiz->btei", z, w3))
        return torch.einsum("btei,ezi->btz", hidden * weights.unsqueeze(-1), w2)

    def stacked(self, layer: int, which: str) -> Tensor:
        """All experts' weights [E, out, in], with the adapter's part of each."""
        weights = torch.stack([self.expert_weight(layer, e, which) for e in range(self.config.num_experts)])
        name = f"{moe_prefix(layer)}experts.{which}"
        a = self.adapter.get(name + ".lora_A.weight")
        return weights if a is None else weights + self.scaling * self.adapter[name + ".lora_B.weight"] @ a


def init_weights(config: K3Config, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Trainable fp32 masters by checkpoint name (experts under `...wN.weight`), spread so that no part is idle."""
    gen = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for p in text_params(config):
        if p.is_scale:
            continue
        shape, leaf = p.logical_shape or p.shape, p.name.removesuffix("_packed").rsplit(".", 2)[-2:]
        out[p.name.removesuffix("_packed")] = _initial(config, leaf, shape, gen).to(device)
    return out


def _initial(c: K3Config, leaf: list[str], shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    def normal(std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=gen) * std + mean

    if leaf[-1] == "A_log":
        values = torch.zeros(shape)
        values[: c.kda_num_heads] = torch.rand(c.kda_num_heads, generator=gen) * 1.5
        return values
    if leaf[-1] == "dt_bias":
        return normal(1.0, -1.0)
    if leaf[-1] == "e_score_correction_bias":
        return normal(0.05)
    if leaf[0].endswith(("norm", "layernorm")):
        return normal(0.05, 1.0)
    if leaf[0].endswith("conv1d"):
        return normal(0.3)
    if leaf[0].endswith("res_proj"):
        return normal(0.05)
    if leaf[0] == "embed_tokens":
        return normal(0.5)
    gain = {"o_proj": 0.5, "down_proj": 0.5, "w2": 0.7, "routed_expert_up_proj": 0.5}.get(leaf[0], 1.0)
    return normal(gain * shape[-1] ** -0.5)


class StoredWeights:
    """What a checkpoint of the masters will hold, with a straight-through gradient: BF16, and MXFP4 for experts.

    All experts of the model are rounded together: one call a step instead of one per expert.
    """

    def __init__(self, config: K3Config, masters: Mapping[str, Tensor]) -> None:
        self.names = [
            p.name.removesuffix("_packed") for p in text_params(config) if p.part is Part.EXPERT and not p.is_scale
        ]
        self.dense = {p.name: p for p in text_params(config) if p.part is not Part.EXPERT}
        self.masters = masters

    def weights(self) -> dict[str, Tensor]:
        out = {name: _as_stored(p, self.masters[name]) for name, p in self.dense.items()}
        flat = torch.cat([self.masters[n].reshape(-1, 32) for n in self.names])
        with torch.no_grad():
            delta = mxfp4.dequantize(*mxfp4.quantize(flat)) - flat
        rounded = flat + delta
        at = 0
        for n in self.names:
            rows = self.masters[n].numel() // 32
            out[n] = rounded[at : at + rows].view_as(self.masters[n])
            at += rows
        return out


def _as_stored(p: Param, master: Tensor) -> Tensor:
    if p.dtype is not DType.BF16:
        return master
    with torch.no_grad():
        delta = master.bfloat16().float() - master
    return master + delta


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(prompt, answer) pairs as tokens [B, T], padded on the right, and the mask [B, T-1] of the answers' places."""
    width = max(len(p) + len(a) for p, a in rows)
    tokens = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width - 1)
    for b, (p, a) in enumerate(rows):
        tokens[b, : len(p) + len(a)] = torch.tensor(p + a)
        mask[b, len(p) - 1 : len(p) + len(a) - 1] = 1.0
    return tokens.to(device), mask.to(device)


def fit(
    config: K3Config,
    masters: Mapping[str, Tensor],
    batch: Callable[[], tuple[Tensor, Tensor]],
    *,
    steps: int,
    lr: float,
    warmup: int = 100,
    before: Callable[[int], None] = lambda _: None,
    after: Callable[[int, float], None] = lambda *_: None,
) -> None:
    """Train the masters in place with AdamW and a cosine.

    `batch` gives tokens [B, T] and the mask [B, T-1] of positions whose next token counts; `before` hears of each step
    and of the last one's end, `after` of each step's loss.
    """
    leaves = [t.requires_grad_() for n, t in masters.items() if not n.endswith(FROZEN)]
    stored = StoredWeights(config, masters)
    _descend(
        leaves, lambda: TrainableK3(config, stored.weights()), batch, steps=steps, lr=lr, warmup=warmup,
        before=before, after=after,
    )  # fmt: skip


def plain_weights(config: K3Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's text tensors in fp32, experts unpacked (`...wN.weight`): what `fit_adapter` leaves alone."""
    stored, out = NaiveK3(config, tensors), {}
    for p in text_params(config):
        if p.part is not Part.EXPERT:
            out[p.name] = stored.weight(p.name)
    for layer in config.moe_layers:
        for e in range(config.num_experts):
            for which in ("w1", "w3", "w2"):
                out[f"{expert_prefix(layer, e)}{which}.weight"] = stored.expert_weight(layer, e, which)
    return out


def fit_adapter(
    config: K3Config,
    weights: Mapping[str, Tensor],
    factors: Mapping[str, Tensor],
    batch: Callable[[], tuple[Tensor, Tensor]],
    *,
    scaling: float,
    steps: int,
    lr: float,
    warmup: int = 5,
    after: Callable[[int, float], None] = lambda *_: None,
) -> None:
    """Train an adapter's factors, fp32 by exported names, in place over `plain_weights`; the rest as in `fit`."""
    leaves = [t.requires_grad_() for t in factors.values()]
    model = TrainableK3(config, weights, factors, scaling)
    _descend(leaves, lambda: model, batch, steps=steps, lr=lr, warmup=warmup, after=after)


def _descend(
    leaves: Sequence[Tensor],
    model: Callable[[], TrainableK3],
    batch: Callable[[], tuple[Tensor, Tensor]],
    *,
    steps: int,
    lr: float,
    warmup: int,
    before: Callable[[int], None] = lambda _: None,
    after: Callable[[int, float], None] = lambda *_: None,
) -> None:
    optimizer = torch.optim.AdamW(leaves, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _lr_factor(s, steps, warmup))
    for step in range(steps):
        before(step)
        tokens, mask = batch()
        logits = model()(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (loss * mask).sum() / mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        schedule.step()
        after(step, loss.item())
    before(steps)


def _lr_factor(step: int, total: int, warmup: int) -> float:
    warm = min(1.0, (step + 1) / warmup)
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total)))


def released(p: Param, masters: Mapping[str, Tensor]) -> Tensor:
    """One tensor of a checkpoint, on the CPU, from the masters."""
    if p.part is Part.EXPERT:
        packed, scale = mxfp4.quantize(masters[p.name.removesuffix("_packed").removesuffix("_scale")].detach().cpu())
        return scale if p.is_scale else packed
    return masters[p.name].detach().cpu().to(torch.float32 if p.dtype is DType.F32 else torch.bfloat16)
