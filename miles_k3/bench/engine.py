"""`miles-k3 bench decode|prefill|swap|eager`: whole engine steps of a model at its own widths, beside the floor.

Weights are random, drawn on the device. The floor of a decode step is the bytes that it must read, once each, over a
measured read: every dense weight and the head, the experts that its tokens chose, LoRA's factors of both, the cache,
and the states twice, for they are written too; of a prefill the FLOPs over a measured product. On a GPU a decode step
is the recorded one; a CPU, for which nothing is recorded, shows the steps as the engine takes them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from miles_k3.adapters.layout import adapter_layout, gate_up_pairs, tensor_name
from miles_k3.adapters.store import copy_all_
from miles_k3.adapters.update import make_update, update_bytes
from miles_k3.bench.measures import Ceilings, Row, device_ms, wall_ms
from miles_k3.errors import EngineError
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import Part, text_params
from miles_k3.k3.random_weights import random_base
from miles_k3.k3.weights import ResidentBase
from miles_k3.rollout.cache.blocks import Kind
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.request import Request, Stage
from miles_k3.types import AdapterConfig, AdapterUpdate, FinishReason, SamplingParams

CONFIG = AdapterConfig(rank=16, alpha=32.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model's step reads and computes, in numbers of parameters."""

    dense: int  # outside the experts, the embedding not counted
    per_expert: int
    lora_dense: int
    lora_expert: int  # of one expert, its own factors
    num_moe: int

    @classmethod
    def of(cls, config: K3Config, adapter: AdapterConfig) -> Work:
        params = text_params(config)
        layout = adapter_layout(config, adapter).values()
        dense = sum(p.num_params for p in params if p.part is not Part.EXPERT and "embed_tokens" not in p.name)
        inner = 3 * config.moe_intermediate_size * config.routed_expert_hidden_size
        own = [t for t in layout if t.kind == "expert" and not t.shared]
        return cls(
            dense=dense, per_expert=inner, num_moe=len(config.moe_layers),
            lora_dense=sum(torch.Size(t.shape).numel() for t in layout if t.kind == "dense" or t.shared),
            lora_expert=sum(torch.Size(t.shape).numel() for t in own) // (config.num_experts * len(config.moe_layers)),
        )  # fmt: skip

    def decode_bytes(self, touched: int, adapted: bool) -> float:
        """Of weights; `touched`: (layer, expert) pairs that some token chose."""
        lora = 2 * (self.lora_dense + touched * self.lora_expert) if adapted else 0
        return 2 * self.dense + touched * self.per_expert * 17 / 32 + lora


def cache_bytes(engine: EmbeddedEngine, requests: Sequence[Request]) -> int:
    """What a step reads of the caches, and writes of the states."""
    slot, page = (engine.pool.block_bytes[kind] for kind in (Kind.SLOT, Kind.PAGE))
    return sum(2 * slot + r.num_cached * page // engine.pool.page_size for r in requests)


def bench_engine(base: ResidentBase, *, max_running: int, context: int, new_tokens: int,
                 kernels: Literal["auto", "plain"] = "auto", chunk: int = 8192) -> EmbeddedEngine:  # fmt: skip
    """An engine for `max_running` requests of so many tokens, with two adapter slots."""
    return EmbeddedEngine(
        base, base.config, max_lora_rank=CONFIG.rank, max_running=max_running, page_size=64,
        prefill_chunk_tokens=chunk, max_sequence_tokens=context + new_tokens, prefix_cache="off",
        kernels=kernels,
    )  # fmt: skip


def random_update(engine: EmbeddedEngine, config: AdapterConfig = CONFIG, version: int = 0) -> AdapterUpdate:
    """A whole adapter on the engine's device."""
    device = engine.pool.device
    generator = torch.Generator(device).manual_seed(version)
    layout = adapter_layout(engine.config, config)
    tensors = {
        name: torch.randn(t.shape, generator=generator, device=device).mul_(0.02).to(torch.bfloat16)
        for name, t in layout.items()
    }
    for gate, up in gate_up_pairs(layout):
        tensors[up] = tensors[gate]
    return make_update(version, config, tensors)


def decoding(engine: EmbeddedEngine, count: int, context: int, *, same: bool = False) -> list[Request]:
    """Requests that have computed random prompts of `context` tokens and decode, driven by hand.

    `same`: one prompt and one seed for all, so that they go through the same experts, as equal rows of zeros do.
    """
    generator = torch.Generator().manual_seed(count)
    requests = []
    for i in range(count):
        if same:
            generator.manual_seed(count)
        prompt = tuple(torch.randint(0, engine.config.vocab_size, (context,), generator=generator).tolist())
        params = SamplingParams(
            max_new_tokens=engine.max_sequence_tokens - context, seed=0 if same else i,
            return_routed_experts=engine.runner.graphs is None,
        )  # fmt: skip
        requests.append(Request(id=f"bench-{i}", prompt=prompt, params=params, version=engine.store.acquire()))
        engine.scheduler.submit(requests[-1])
    while any(len(r.token_ids) < 4 for r in requests):
        engine.runner.step()
        if any(r.stage is Stage.DONE for r in requests):
            raise EngineError("a request ended before it decoded: its logits are not finite")
    return requests


def end(engine: EmbeddedEngine, requests: Sequence[Request]) -> None:
    """Give back what `decoding` took."""
    engine.runner.collect()
    for request in requests:
        engine.scheduler.finish(request, FinishReason.ABORT)
        engine.store.release(request.version)


def step_ms(engine: EmbeddedEngine, steps: int = 40) -> float:
    """Median milliseconds from one step's return to the next one's, the host's work included."""
    marks = []
    for _ in range(steps):
        engine.runner.step()
        marks.append(time.perf_counter())
    return 1e3 * statistics.median(b - a for a, b in pairwise(marks))


@torch.inference_mode()
def decode_step(engine: EmbeddedEngine, requests: Sequence[Request], repeats: int = 20) -> tuple[float, int]:
    """(median milliseconds of a step: forward, head and draws; (layer, expert) pairs that its tokens chose)."""
    graphs = engine.runner.graphs
    if graphs is None:
        ms = step_ms(engine, repeats)
        engine.runner.collect()
        routed = torch.stack([r.routed[-1].view(-1, *r.routed[-1].shape[-2:])[-1] for r in requests])
        return ms, pairs(routed)
    engine.runner.collect()
    engine.pool.flush()
    with engine.pool.forward():
        _, recorded = graphs.decode.prepare(requests)
        recorded.replay()
        touched = pairs(recorded.left.routed_TMK[: len(requests)])
        return device_ms(recorded.replay, repeats), touched


def pairs(routed_TMK: Tensor) -> int:
    """Different (layer, expert) pairs."""
    return sum(layer.unique().numel() for layer in routed_TMK.unbind(1))


def bench_decode(base: ResidentBase, ceilings: Ceilings, batches: Sequence[int], context: int = 256) -> Iterator[Row]:
    """Decode steps without and with an adapter, on the device and as the engine takes them; of different prompts, and
    of one, whose requests share their experts."""
    work = Work.of(base.config, CONFIG)
    engine = bench_engine(base, max_running=max(batches), context=context, new_tokens=256)
    for adapted in (False, True):
        if adapted:
            engine.load_adapter(random_update(engine))
        for batch, same in [(batch, False) for batch in batches] + [(batch, True) for batch in batches if batch > 1]:
            requests = decoding(engine, batch, context, same=same)
            wall = step_ms(engine)
            ms, touched = decode_step(engine, requests)
            read = work.decode_bytes(touched, adapted) + cache_bytes(engine, requests)
            end(engine, requests)
            floor = ceilings.floor_ms(read, 0)
            shape = f"batch {batch}{' of one prompt' if same else ''}, {touched} experts"
            shape += ", LoRA of rank 16" if adapted else ""
            yield Row(
                kernel="decode step", shape=shape, ms=ms, floor_ms=floor, peer="as the engine steps", peer_ms=wall
            )
    engine.close()


def bench_eager(base: ResidentBase, ceilings: Ceilings, batches: Sequence[int], context: int = 256) -> Iterator[Row]:
    """The same steps without an adapter, and in plain torch: experts unpacked beforehand, torch's grouped_mm, a kernel
    launched for each operation, as model code written for reading runs."""
    unpacked = random_base(base.config, dtype=base.dtype, device=base.device, base_dtype="bf16")
    new_engine = partial(bench_engine, max_running=max(batches), context=context, new_tokens=256)
    ours, plain = new_engine(base), new_engine(unpacked, kernels="plain")
    work = Work.of(base.config, CONFIG)
    for batch in batches:
        requests = decoding(ours, batch, context)
        ms, touched = decode_step(ours, requests)
        read = work.decode_bytes(touched, adapted=False) + cache_bytes(ours, requests)
        end(ours, requests)
        requests = decoding(plain, batch, context)
        peer_ms = step_ms(plain)
        end(plain, requests)
        yield Row(
            kernel=f"decode step of {base.config.num_hidden_layers} layers", shape=f"batch {batch}, {touched} experts",
            ms=ms, floor_ms=ceilings.floor_ms(read, 0), peer="eager torch, unpacked experts", peer_ms=peer_ms,
        )  # fmt: skip
    ours.close()
    plain.close()


def bench_prefill(base: ResidentBase, ceilings: Ceilings, tokens: int = 8192) -> Iterator[Row]:
    """One prompt in one chunk, to its first sampled token."""
    engine, work = bench_engine(base, max_running=2, context=tokens, new_tokens=8), Work.of(base.config, CONFIG)
    top_k, head = base.config.num_experts_per_token, base.config.vocab_size * base.config.hidden_size
    flops = 2.0 * tokens * (work.dense - head + work.num_moe * top_k * work.per_expert)
    for adapted in (False, True):
        if adapted:
            engine.load_adapter(random_update(engine))
        times = [ms for i in range(4) for ms in wall_ms(partial(_prefill, engine, tokens, i), 1)]
        shape = f"{tokens} tokens{', LoRA of rank 16' if adapted else ''}"
        yield Row(kernel="prefill", shape=shape, ms=statistics.median(times[1:]), floor_ms=ceilings.floor_ms(0, flops))
    engine.close()


def _prefill(engine: EmbeddedEngine, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompt = tuple(torch.randint(0, engine.config.vocab_size, (tokens,), generator=generator).tolist())
    request = Request(
        id=f"prefill-{seed}", prompt=prompt, params=SamplingParams(max_new_tokens=1), version=engine.store.acquire()
    )
    engine.scheduler.submit(request)
    while request.stage is not Stage.DONE:
        engine.runner.step()
    engine.store.release(request.version)


def bench_swap(base: ResidentBase, ceilings: Ceilings, batch: int = 8, swaps: int = 8) -> Iterator[Row]:
    """A whole adapter into the idle slot while requests decode. Floor: its bytes read and written once each.

    Each update is made just before, as a step makes it: what is timed is `load_adapter`, on an idle device and between
    decode steps.
    """
    engine = bench_engine(base, max_running=batch, context=256, new_tokens=512)
    engine.load_adapter(first := random_update(engine))
    num_bytes = update_bytes(first)
    floor = ceilings.floor_ms(2 * num_bytes, 0)
    shape = f"{num_bytes / 1e9:.3f} GB, rank {CONFIG.rank}"
    idle, stalls, usual = [], [], []
    for version in range(1, swaps + 1):
        idle += wall_ms(partial(engine.load_adapter, random_update(engine, version=version)), 1)
    yield Row(
        kernel="swap, idle device", shape=shape, ms=statistics.median(idle), floor_ms=floor,
        peer="its copies alone", peer_ms=_copies_ms(engine, random_update(engine, version=swaps)),
    )  # fmt: skip
    for version in range(swaps + 1, 2 * swaps + 1):
        update = random_update(engine, version=version)
        requests = decoding(engine, batch, 256)  # of the version before: their slot is free again when they have ended
        usual.append(step_ms(engine, 8))
        engine.runner.step()
        start = time.perf_counter()
        engine.load_adapter(update)
        engine.runner.step()
        engine.runner.step()  # with overlap a step returns when the one before it is done
        stalls.append(1e3 * (time.perf_counter() - start) - 2 * usual[-1])
        end(engine, requests)
    yield Row(
        kernel="swap, what decode loses", shape=f"{shape}, batch {batch}", ms=statistics.median(stalls), floor_ms=floor,
        peer="a step", peer_ms=statistics.median(usual),
    )  # fmt: skip
    engine.close()


def _copies_ms(engine: EmbeddedEngine, update: AdapterUpdate) -> float | None:
    """Of an update into a slot that nobody uses, without what the host does around it; None on a CPU."""
    slot = next(s for s in engine.store.slots if s.version != engine.adapter_version)
    targets, sources = [], []
    for module, pair in slot.factors.items():
        for factor, target in zip(("A", "B"), pair, strict=True):
            targets.append(target)
            sources.append(update.tensors[tensor_name(module, factor)])
    if not targets[0].is_cuda:
        return None
    return device_ms(partial(copy_all_, targets, sources), 7)


def two_layers(config: K3Config) -> K3Config:
    """MLA with a dense MLP, then KDA with routed experts: one of each, small enough for unpacked experts."""
    return dataclasses.replace(config, num_hidden_layers=2, first_k_dense_replace=1, mla_layers=(0,))
