"""`miles-k3 bench`: what a part of the product costs on this machine, as a table, JSON and a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from miles_k3.errors import ConfigError
from miles_k3.k3.config import K3Config
from miles_k3.rollout.cache.page_alignment import align, hash_block_size, raw_sizes
from miles_k3.rollout.cache.paged import PagedCache
from miles_k3.rollout.cache.radix import RadixCache
from miles_k3.rollout.cache.replay import Budget, Replay
from miles_k3.rollout.cache.traces import TRACES

GIB = 1 << 30
PAGE_TOKENS = 64  # of the radix policy
STATE_SHARE = 0.5  # of a split pool, for states: what 256 running requests take of 80 GiB, and as much to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One line of the comparison: a cache and the memory it works in."""

    name: str
    budget: Budget
    cache: Any


def policies(config: K3Config, *, tp: int, num_bytes: int) -> Iterator[Policy]:
    """radix and paged policies, each over the bytes of one rank of `tp`."""
    raw = raw_sizes(config, attention_tp=tp)
    radix = {
        "page_bytes": PAGE_TOKENS * raw.token_bytes * raw.mla_layers, "slot_bytes": raw.state_bytes * raw.kda_layers
    }  # fmt: skip
    for name, share in (("radix/unified", None), ("radix/split", STATE_SHARE)):
        budget = Budget(num_bytes=num_bytes, state_share=share, **radix)
        yield Policy(name=name, budget=budget, cache=RadixCache(budget, page_size=PAGE_TOKENS))
    layout = align(raw)
    for name, tails in (("paged/partial", True), ("paged/full-block", False)):
        budget = Budget(num_bytes=num_bytes, page_bytes=layout.kv_bytes, slot_bytes=layout.state_bytes)
        step = hash_block_size(layout.block_size)
        cache = PagedCache(budget, page_size=layout.block_size, hash_block_size=step, partial=tails)
        yield Policy(name=name, budget=budget, cache=cache)


def bench_cache(
    config: K3Config, traces: Sequence[str], *, requests: int, tp: int, budget_gib: float, seed: int = 0,
    told: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Replay each trace against each policy; a row each, `told` as it comes. Raises ConfigError on unknown traces."""
    if unknown := [name for name in traces if name not in TRACES]:
        raise ConfigError(f"unknown trace {', '.join(unknown)}; known are {', '.join(TRACES)}")
    rows = []
    for trace in traces:
        for policy in policies(config, tp=tp, num_bytes=int(budget_gib * GIB)):
            started = time.perf_counter()
            report = Replay(policy.cache, policy.budget).run(TRACES[trace](requests, seed))
            rows.append({
                "trace": trace, "policy": policy.name, **asdict(report),
                "hit_share": report.hit_tokens / max(1, report.hit_tokens + report.computed_tokens),
                "book_us_per_token": report.book_us_per_token, "seconds": time.perf_counter() - started,
            })  # fmt: skip
            told(rows[-1])
    return rows


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("trace", lambda r: r["trace"]),
    ("policy", lambda r: r["policy"]),
    ("hit tokens", lambda r: f"{r['hit_tokens'] / 1e6:.2f} M ({r['hit_share']:.1%})"),
    ("recomputed", lambda r: f"{r['computed_tokens'] / 1e6:.2f} M"),
    ("peak GiB", lambda r: f"{r['peak_bytes'] / GIB:.1f}"),
    ("evicted pages, states", lambda r: f"{r['evicted_pages']:,}, {r['evicted_slots']:,}"),
    ("failed admissions", lambda r: f"{r['failed_admissions']:,}"),
    ("running, tokens held", lambda r: f"{r['most_running']}, {r['most_tokens'] / 1e6:.2f} M"),
    ("books, µs a token", lambda r: f"{r['book_us_per_token']:.3f}"),
)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = ["| " + " | ".join(name for name, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(shown(row) for _, shown in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Recomputed prompt tokens and failed admissions of each policy, trace by trace."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    traces, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("trace", "policy"))
    figure, axes = plt.subplots(2, len(traces), figsize=(3.2 * len(traces), 5.6), squeeze=False)
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))  # pyright: ignore[reportAttributeAccessIssue]
    for column, trace in enumerate(traces):
        own = [row for row in rows if row["trace"] == trace]
        numbers = (
            ("recomputed, M tokens", partial(_value, "computed_tokens", 1e6)),
            ("failed admissions", partial(_value, "failed_admissions", 1.0)),
        )
        for axis, (label, value) in zip(axes[:, column], numbers, strict=True):
            axis.bar([r["policy"] for r in own], [value(r) for r in own], color=[colours[r["policy"]] for r in own])
            axis.set_ylabel(label if column == 0 else "")
            axis.tick_params(axis="x", rotation=60)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(trace)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _value(key: str, unit: float, row: dict[str, Any]) -> float:
    return row[key] / unit


def write(rows: Sequence[dict[str, Any]], facts: dict[str, Any], folder: Path) -> tuple[Path, ...]:
    """`cache.json` and `cache.png` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "cache.json", folder / "cache.png"
    data.write_text(json.dumps({**facts, "rows": list(rows)}, indent=1) + "\n")
    draw(rows, picture)
    return data, picture
