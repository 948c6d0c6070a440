"""What a training step's layers cost at K3's true widths on one GPU: ours, and the same written with torch and peft.

Each layer runs forward and backward by itself, over a packed stream, with rank-16 LoRA on the same random weights, so
that one layer's activations must fit and nothing is recomputed. 112 experts with 16 chosen are one rank's load at
expert parallelism 8. The stack is dense KDA, MoE KDA, MoE KDA, MoE MLA, and the head; its time the sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_k3.config import TrainerSection
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import LM_HEAD, Param, layer_params
from miles_k3.k3.weights import ResidentBase, build_base
from miles_k3.trainer import distributed
from miles_k3.trainer.build import transformer_config
from miles_k3.trainer.lora import Factory
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.head import head_logprobs
from miles_k3.trainer.model.layer import K3Layer
from miles_k3.trainer.model.stream import Stream
from miles_k3.types import AdapterConfig

PEAK_TFLOPS = 989.0  # H200, dense bf16, by its data sheet
KINDS = {"dense KDA": 0, "MoE KDA": 1, "MoE MLA": 3}
STACK = {"dense KDA": 1, "MoE KDA": 2, "MoE MLA": 1}
LENGTHS = (1536, 1000, 736, 824)  # repeated
BANK_ROWS = 4  # the mean over K3's layers is 4.5
RANK, ALPHA = 16, 32.0


def true_widths(path: Path, experts: int) -> K3Config:
    released = K3Config.from_json(json.loads(path.read_text()))
    return replace(released, num_hidden_layers=4, mla_layers=(3,), num_experts=experts)


def random_base(k3: K3Config, params: Iterable[Param]) -> ResidentBase:
    """Random weights, drawn on the device; activations keep a plausible size."""
    generator = torch.Generator("cuda").manual_seed(0)

    def read(p: Param) -> Tensor:
        if p.is_scale:
            return torch.full(p.shape, 118, dtype=torch.uint8, device="cuda")
        if p.name.endswith("weight_packed"):
            return torch.randint(0, 256, p.shape, generator=generator, dtype=torch.uint8, device="cuda")
        if len(p.shape) == 1 and not p.name.endswith(("A_log", "dt_bias", "correction_bias")):
            return torch.ones(p.shape, device="cuda")
        x = torch.randn(p.shape, generator=generator, device="cuda")
        if p.name.endswith("A_log"):
            x[k3.kda_num_heads :] = 0
        return x * (0.5 if p.module.endswith("conv1d") or len(p.shape) == 1 else p.shape[1] ** -0.5)

    return build_base(k3, params, read, dtype=torch.bfloat16, device="cuda")


def true_base(k3: K3Config) -> ResidentBase:
    """The measured layers and the head."""
    base = random_base(k3, (p for layer in KINDS.values() for p in layer_params(k3, layer)))
    head = torch.randn(k3.vocab_size, k3.hidden_size, device="cuda", dtype=torch.bfloat16)
    base.tensors[LM_HEAD] = head.mul_(k3.hidden_size**-0.5)
    return base


class Flops:
    """Model FLOPs of forward and backward over a packed stream. A frozen weight costs 2 a token and parameter forward
    and 2 for the input's gradient; LoRA's factors 2 more for their own. Attention: 6 K V a token and head of KDA's
    recurrence (decay, read, update, read); 2 (Q + V) a query, visible key and head of MLA; backward twice each."""

    def __init__(self, k3: K3Config, lengths: tuple[int, ...]):
        self.k3, self.tokens = k3, sum(lengths)
        self.pairs = sum(n * (n + 1) // 2 for n in lengths)

    def _linear(self, params: float, lora: float) -> float:
        return self.tokens * (4.0 * params + 6.0 * RANK * lora)

    def kda(self) -> float:
        c, h, d = self.k3, self.k3.hidden_size, self.k3.kda_dim
        frozen = 5 * h * d + c.kda_head_dim * (h + d) + h * c.kda_num_heads
        return self._linear(frozen, h + d) + 3 * 6.0 * self.tokens * d * c.kda_head_dim

    def mla(self) -> float:
        c, h, n = self.k3, self.k3.hidden_size, self.k3.num_attention_heads
        q, kv, o = n * c.qk_head_dim, n * (c.qk_nope_head_dim + c.v_head_dim), n * c.v_head_dim
        frozen = c.q_lora_rank * (h + q) + h * c.latent_cache_dim + c.kv_lora_rank * kv + 2 * h * o
        lora = 2 * h + c.q_lora_rank + c.latent_cache_dim + h + o
        return self._linear(frozen, lora) + 3 * 2.0 * n * (c.qk_head_dim + c.v_head_dim) * self.pairs

    def mlp(self, width: int) -> float:
        h = self.k3.hidden_size
        return self._linear(3 * h * width, 3 * (h + width))

    def moe(self) -> float:
        c, z, i = self.k3, self.k3.routed_expert_hidden_size, self.k3.moe_intermediate_size
        active = c.num_experts_per_token
        routed = self._linear(c.hidden_size * (c.num_experts + 2 * z) + active * 3 * z * i, active * 3 * (z + i))
        return routed + self.mlp(c.shared_intermediate_size)

    def head(self) -> float:
        return 4.0 * self.tokens * self.k3.hidden_size * self.k3.vocab_size

    def of(self, kind: str) -> float:
        mixer = self.mla() if "MLA" in kind else self.kda()
        return mixer + (self.moe() if "MoE" in kind else self.mlp(self.k3.intermediate_size))


def timed(run: Callable[[Tensor], Tensor], x: Tensor, params: list[nn.Parameter], repeats: int) -> dict[str, Any]:
    """Milliseconds of forward + backward (median, range) and the peak memory above what was held before."""
    leaves = [x.requires_grad_(), *params]
    grad = torch.randn_like(run(x.detach()))
    times = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(run(x), leaves, grad, allow_unused=True)
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return {"ms": statistics.median(times), "range_ms": [min(times), max(times)], "peak_gib": peak}


def try_timed(run: Callable[[Tensor], Tensor], x: Tensor, params: list[nn.Parameter], repeats: int) -> dict[str, Any]:
    try:
        return timed(run, x, params, repeats)
    except torch.OutOfMemoryError as error:
        return {"error": str(error).split(". ")[0]}
    finally:
        torch.cuda.empty_cache()


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


class Ours:
    name = "miles-k3"

    def __init__(self, k3: K3Config, base: ResidentBase, kernel: str):
        section = TrainerSection()
        self.ranks = distributed.initialize(k3, section, device=torch.device("cuda", 0), seed=0)
        frozen = FrozenWeights(base, k3, transformer_config(k3, section, torch.bfloat16), self.ranks)
        factory = Factory(k3, AdapterConfig(rank=RANK, alpha=ALPHA), seed=0, dtype=torch.bfloat16,
                          device=torch.device("cuda"), ranks=self.ranks)  # fmt: skip
        self.k3, self.base, self.kernel = k3, base, kernel
        self.layers = {kind: K3Layer(frozen, factory, layer) for kind, layer in KINDS.items()}

    def parts(self, kind: str, lengths: tuple[int, ...], bank: tuple[Tensor, ...]) -> dict[str, Any]:
        """Part -> (function, its module)."""
        tokens = torch.zeros(sum(lengths), dtype=torch.int64)
        stream = Stream.of(tokens, lengths, self.k3, "cuda", ranks=self.ranks, kernel=self.kernel)  # pyright: ignore
        layer = self.layers[kind]
        mlp = layer.mlp if layer.moe is None else partial(layer.moe, stream=stream)
        return {
            "layer": (lambda x: layer(x, bank, stream)[0], layer),
            "attention": (partial(layer.attention, stream=stream), layer.attention),
            "mlp": (mlp, layer.moe or layer.mlp),
        }

    def head(self, targets: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: head_logprobs(x, self.base[LM_HEAD], targets, 1.0)[0]


class Baseline:
    name = "torch + peft + fla"

    def __init__(self, k3: K3Config, base: ResidentBase):
        import baseline_layers

        self.base, self.module = base, baseline_layers
        self.layers = {
            kind: baseline_layers.layer_with_lora(base, k3, layer, rank=RANK, alpha=ALPHA)
            for kind, layer in KINDS.items()
        }

    def parts(self, kind: str, lengths: tuple[int, ...], bank: tuple[Tensor, ...]) -> dict[str, Any]:
        cu = torch.tensor([0, *lengths]).cumsum(0).cuda()
        layer: Any = self.layers[kind]
        return {
            "layer": (lambda x: layer(x, bank, lengths, cu), layer),
            "attention": (lambda x: layer.attention(x, lengths, cu), layer.attention),
            "mlp": (layer.mlp, layer.mlp),
        }

    def head(self, targets: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: self.module.head_logprobs(x, self.base[LM_HEAD], targets)


def measure(side: Any, k3: K3Config, tokens: int, repeats: int) -> dict[str, Any]:
    lengths = LENGTHS * (tokens // sum(LENGTHS))
    flops = Flops(k3, lengths)
    x, *bank = torch.randn(1 + BANK_ROWS, tokens, k3.hidden_size, device="cuda", dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for kind in KINDS:
        rows = {}
        for part, (run, module) in side.parts(kind, lengths, tuple(bank)).items():
            rows[part] = try_timed(run, x.detach().clone(), trained(module), repeats)
        found[kind] = rows | {"tflop": flops.of(kind) / 1e12}
        print(side.name, tokens, kind, {k: v.get("ms", v.get("error")) for k, v in rows.items()}, flush=True)
    targets = torch.randint(0, k3.vocab_size, (tokens,), device="cuda")
    found["head"] = {"layer": try_timed(side.head(targets), x.detach().clone(), [], repeats),
                     "tflop": flops.head() / 1e12}  # fmt: skip
    return found | summary(found, tokens)


def summary(found: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Tokens a second and the share of peak of the stack without its head, and with it; None where a part failed."""
    result: dict[str, Any] = {}
    for name, parts in (("layers", STACK), ("layers and head", STACK | {"head": 1})):
        if any("error" in found[part]["layer"] for part in parts):
            result[name] = None
            continue
        seconds = sum(n * found[part]["layer"]["ms"] for part, n in parts.items()) / 1e3
        tflop = sum(n * found[part]["tflop"] for part, n in parts.items())
        result[name] = {"tokens_per_s": tokens / seconds, "mfu": tflop / seconds / PEAK_TFLOPS, "ms": 1e3 * seconds}
    return result


def agreement(ours: Ours, theirs: Baseline, k3: K3Config) -> dict[str, float]:
    """||a - b|| / ||b|| of each layer's output, on 4,096 tokens: both compute the same function."""
    x, *bank = torch.randn(1 + BANK_ROWS, sum(LENGTHS), k3.hidden_size, device="cuda", dtype=torch.bfloat16)
    found = {}
    with torch.no_grad():
        for kind in KINDS:
            a, b = (side.parts(kind, LENGTHS, tuple(bank))["layer"][0](x).float() for side in (ours, theirs))
            found[kind] = ((a - b).norm() / b.norm()).item()
    return found


def kernels(side: Ours, k3: K3Config, tokens: int) -> dict[str, list[Any]]:
    """The longest-running GPU kernels of one forward and backward of each layer: (name, milliseconds, calls)."""
    lengths = LENGTHS * (tokens // sum(LENGTHS))
    x, *bank = torch.randn(1 + BANK_ROWS, tokens, k3.hidden_size, device="cuda", dtype=torch.bfloat16)
    found = {}
    for kind in KINDS:
        run, module = side.parts(kind, lengths, tuple(bank))["layer"]
        leaves = [x.detach().clone().requires_grad_(), *trained(module)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(run(leaves[0]), leaves, x, allow_unused=True)
            torch.cuda.synchronize()
        events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
        found[kind] = [(e.key[:90], e.self_device_time_total / 1e3, e.count) for e in events[:25]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "assets/kimi-k3/config.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--experts", type=int, default=112)
    parser.add_argument("--kernels", nargs="+", choices=["fla", "torch"], default=["fla"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    k3 = true_widths(args.config, args.experts)
    base = true_base(k3)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "experts": args.experts, "runs": {}}
    sides: list[Any] = [Ours(k3, base, kernel) for kernel in args.kernels]
    sides.append(Baseline(k3, base))
    result["agreement"] = agreement(sides[0], sides[-1], k3)
    print("agreement", result["agreement"], flush=True)
    for tokens in args.tokens:
        for side in sides:
            name = f"{side.name} ({side.kernel})" if isinstance(side, Ours) else side.name
            found = measure(side, k3, tokens, args.repeats)
            result["runs"].setdefault(str(tokens), {})[name] = found
            print(tokens, name, found["layers"], found["layers and head"], flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1))
    result["kernels"] = kernels(sides[0], k3, args.tokens[0])
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
