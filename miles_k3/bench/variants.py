"""`miles-k3 bench variants`: recorded decode steps with and without a way of launching, turn by turn in one process.

`no branch`: shared experts after the routed ones instead of beside them. `dependent launches`: decode's kernels start
while the ones before them end. The adapter is on, as in a rollout.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from miles_k3.bench.engine import CONFIG, Work, bench_engine, cache_bytes, decode_step, decoding, end, random_update
from miles_k3.bench.measures import Ceilings, Row
from miles_k3.k3.weights import ResidentBase

ROUNDS = 3


def bench_variants(base: ResidentBase, ceilings: Ceilings, batches: Sequence[int], context: int) -> Iterator[Row]:
    """A row for each variant and batch; beside it the step as it is, measured in the same rounds."""
    engine, work = bench_engine(base, max_running=max(batches), context=context, new_tokens=256), Work.of(
        base.config, CONFIG
    )  # fmt: skip
    engine.load_adapter(random_update(engine))
    for batch in batches:
        requests = decoding(engine, batch, context)
        times: dict[str, list[float]] = {}
        touched = 0
        for _ in range(ROUNDS):
            for name in ("as it is", "no branch", "dependent launches"):
                with variant(name):
                    if engine.runner.graphs is not None:
                        engine.runner.graphs.forget()
                    ms, touched = decode_step(engine, requests)
                times.setdefault(name, []).append(ms)
        floor = ceilings.floor_ms(work.decode_bytes(touched, adapted=True) + cache_bytes(engine, requests), 0)
        end(engine, requests)
        usual = statistics.median(times.pop("as it is"))
        for name, found in times.items():
            yield Row(
                kernel=name, shape=f"batch {batch}, {touched} experts, LoRA of rank {CONFIG.rank}",
                ms=statistics.median(found), floor_ms=floor, peer="as it is", peer_ms=usual,
            )  # fmt: skip
    engine.close()


def variant(name: str) -> AbstractContextManager[None]:
    """Within it steps are recorded so."""
    if name == "no branch":
        return _without_branches()
    if name == "dependent launches":
        from miles_k3.k3.kernels.launch import dependent_launches  # Triton is not everywhere

        return dependent_launches()
    return nullcontext()


@contextmanager
def _without_branches() -> Iterator[None]:
    from miles_k3.rollout.embedded.fused.mlp import FusedMoe

    FusedMoe.branches = False
    try:
        yield
    finally:
        FusedMoe.branches = True
