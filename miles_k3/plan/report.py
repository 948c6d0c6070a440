"""A plan as text: one line a kind of rank, what the worst of them holds, and what to change where it doesn't fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from miles_k3.plan.changes import Fix
from miles_k3.plan.shapes import ITEMS, MARGIN, Phase, Plan, RankPlan, Verdict


def report_lines(plan: Plan, fix: Fix | None) -> Iterator[str]:
    """The whole report. `fix` is for a plan that doesn't fit; None: nothing that was tried helps."""
    where = "GPU" if plan.cuda else "CPU"
    yield f"{plan.name}: {plan.world} {_plural(plan.world, 'rank')}, {where} memory of one in GB by phase"
    yield ""
    yield from _phase_table(plan)
    for verdict in plan.verdicts:
        yield ""
        yield from _verdict_lines(verdict)
        yield from _why(plan, verdict)
    yield ""
    yield f"disk: {gb(plan.disk_bytes)} a checkpoint"
    if not plan.fits:
        yield from _fix_lines(plan, fix)


def _phase_table(plan: Plan) -> Iterator[str]:
    """Ranks that hold the same in every phase share a line."""
    groups: dict[tuple[int, ...], list[RankPlan]] = {}
    for rank in plan.ranks:
        key = tuple(round(rank.device_bytes(p) / 1e8) for p in Phase)
        groups.setdefault(key, []).append(rank)
    rows = [["", "ranks", *Phase]]
    if plan.cuda:
        rows[0].append("host")
    for ranks in groups.values():
        first, last = ranks[0], ranks[-1]
        name = first.name if first is last else f"{first.name} ... {last.name}"
        cells = [name, str(sum(rank.count for rank in ranks)), *(_number(first.device_bytes(p)) for p in Phase)]
        rows.append(cells + ([_number(max(first.host_bytes(p) for p in Phase))] if plan.cuda else []))
    yield from _aligned(rows)


def _verdict_lines(verdict: Verdict) -> Iterator[str]:
    pool, shared = verdict.pool, ""
    if pool.ranks > 1:
        shared = f" of {pool.ranks} ranks"
    limit = "capacity unknown"
    if pool.capacity is not None:
        share = verdict.needed / pool.capacity
        limit = f"{share:.0%} of {gb(pool.capacity)} ({pool.source}); up to {MARGIN:.0%} is planned for"
    sign = "fits" if verdict.fits else "DOES NOT FIT"
    yield f"{pool.where}{shared}: {sign}. Most in {verdict.phase}, {verdict.rank.name}: {gb(verdict.needed)}, {limit}"
    ordered = [name for name in ITEMS if name in verdict.items]
    rows = [[f"  {name}", gb(verdict.items[name]), ITEMS[name]] for name in ordered]
    yield from _aligned(rows, last_left=True)


def _why(plan: Plan, verdict: Verdict) -> Iterator[str]:
    """What sets the worst rank apart from the others in that phase, and the phase from the rank's lightest one."""

    def held(rank: RankPlan, phase: Phase) -> dict[str, int]:
        return rank.in_pool(verdict.pool, phase, cuda=plan.cuda)

    own, phases = held(verdict.rank, verdict.phase), {p: held(verdict.rank, p) for p in Phase}
    lightest = min(Phase, key=lambda p: sum(phases[p].values()))
    name, more = _most_above(own, phases[lightest])
    if more > 0:
        yield f"  this phase: {name} takes {gb(more)} more than in {lightest}"
    others = [rank for rank in plan.ranks if rank is not verdict.rank]
    if others:
        least = min(others, key=lambda rank: sum(held(rank, verdict.phase).values()))
        name, more = _most_above(own, held(least, verdict.phase))
        if more > 0:
            layers = f"{verdict.rank.layers} layers against {least.layers}"
            yield f"  this rank: {name} takes {gb(more)} more than in {least.name} ({layers})"


def _most_above(own: Mapping[str, int], other: Mapping[str, int]) -> tuple[str, int]:
    more = {name: size - other.get(name, 0) for name, size in own.items()}
    name = max(more, key=lambda item: more[item])
    return name, more[name]


def _fix_lines(plan: Plan, fix: Fix | None) -> Iterator[str]:
    yield ""
    for verdict in (v for v in plan.verdicts if not v.fits):
        assert verdict.pool.capacity is not None
        over = verdict.needed - verdict.pool.capacity * MARGIN
        yield (
            f"does not fit because {verdict.phase} takes {gb(verdict.needed)} of {verdict.pool.where} memory, "
            f"{gb(over)} more than may be planned for; most of it is {verdict.largest}, "
            f"{gb(verdict.items[verdict.largest])}"
        )
    if fix is None:
        yield "no change of up to three that were tried makes it fit; give it more or larger machines"
        return
    yield "smallest change that fits: " + set_options(fix.values)
    for change in fix.changes:
        yield f"  {_spelled(change.values)}: costs {change.cost}"
    for verdict in fix.plan.verdicts:
        yield f"  then {verdict.pool.where} {gb(verdict.needed)} at most, in {verdict.phase}"


def set_options(values: Mapping[str, Any]) -> str:
    """As the command line takes them."""
    return " ".join(f"--set {key}={_value(value)}" for key, value in values.items())


def _spelled(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "[" + ",".join(str(v) for v in value) + "]"
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]


def _aligned(rows: Sequence[Sequence[str]], *, last_left: bool = False) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        if last_left:
            cells[-1] = row[-1]
        yield "  ".join(cells).rstrip()


def gb(size: float) -> str:
    """1e9 bytes, or what reads better."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def _number(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.3f}"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else word + "s"


def listed(items: Iterable[tuple[str, int]]) -> str:
    """Largest first, in one line."""
    return ", ".join(f"{name} {gb(size)}" for name, size in sorted(items, key=lambda item: -item[1]))
