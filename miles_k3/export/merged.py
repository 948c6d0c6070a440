"""The adapter merged into its base and written as a checkpoint of the published layout, in BF16 or in MXFP4."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_k3 import __version__
from miles_k3.adapters.merge import MERGE_MARKER
from miles_k3.errors import AdapterError
from miles_k3.export.logits import compare_logits
from miles_k3.export.merging import Merger, Target
from miles_k3.export.origin import Origin
from miles_k3.export.report import REPORT, REPORT_TEXT, report_text
from miles_k3.export.rounding import Losses
from miles_k3.export.shards import PLAN, Shard, ShardedFolder
from miles_k3.export.verify import verify_merged
from miles_k3.k3.safetensors_header import read_metadata
from miles_k3.k3.safetensors_io import INDEX, Checkpoint

SHARD_BYTES = 5 * 10**9
_OWN = {"config.json", INDEX, REPORT, REPORT_TEXT, PLAN}


def export_merged(
    origin: Origin, folder: Path, target: Target, *, shard_bytes: int = SHARD_BYTES, resume: bool = False,
    verify: bool = False, prompts: Path | None = None, told: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Write `folder` and give its report, which lies in it too. `prompts`: see `compare_logits`.

    Everything is in `folder`.partial until it is whole and, with `verify`, found right. Raises ConfigError,
    CheckpointError or AdapterError; what is written stays for `resume`.
    """
    if resume and (report := _finished(folder, origin, target)) is not None:
        told(f"{folder} is whole already")
        if verify:
            verify_merged(folder, origin.model, origin.config, origin.adapter)
            told("read back and compared")
        return report
    with Checkpoint(origin.model) as base:
        base.require(base.table(origin.config))
        _refuse_merged_base(origin, base)
        merger = Merger(base, origin.config, origin.adapter, target)
        params = list(merger.params())
        plan = {"format": 1, "to": target, "adapter": origin.sha256, "base": _fingerprint(base)}
        with ShardedFolder(folder, params, plan, shard_bytes=shard_bytes, resume=resume) as out:
            files = f"{len(out.shards)} file{'s'[: len(out.shards) != 1]}"
            told(f"{len(params)} tensors, {sum(p.num_bytes for p in params):,} bytes in {files}")
            marker = {MERGE_MARKER: _adapter_name(origin)}
            losses = Losses.merged(out.write(merger.pieces, merger.losses.take, marker, _teller(told, out)))
            return _finish(origin, target, out, losses, verify=verify, prompts=prompts, told=told)


def _finished(folder: Path, origin: Origin, target: Target) -> dict[str, Any] | None:
    """The report of a whole export of the same adapter in the same form; None where there is none."""
    try:
        report = json.loads((folder / REPORT).read_text())
        same = report["adapter"]["sha256"] == origin.sha256 and report["to"] == target
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if same else None


def _finish(
    origin: Origin, target: Target, out: ShardedFolder, losses: Losses, *, verify: bool, prompts: Path | None,
    told: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Everything beside the shards, the checks, the report, the name."""
    out.write_file("config.json", json.dumps(_config_json(origin, target), indent=1) + "\n")
    out.write_index()
    left_out = []
    for path in sorted(origin.model.iterdir()):
        if path.is_file() and path.name not in _OWN and not path.name.startswith(".") and path.suffix != ".safetensors":
            out.copy_file(path)
        elif path.is_dir() and not path.name.startswith("."):
            left_out.append(path.name)
    compared = None
    if verify:
        told("reading it back")
        compared = verify_merged(out.partial, origin.model, origin.config, origin.adapter)
    report = {
        "miles_k3": __version__,
        "to": target,
        "adapter": {
            "sha256": origin.sha256, "version": origin.version, "rank": origin.adapter.config.rank,
            "alpha": origin.adapter.config.alpha,
        },
        "base": origin.model.resolve().name,
        "rounding": {"total": losses.total().shares(), **{kind: loss.shares() for kind, loss in losses.items()}},
        "logits": compare_logits(origin.config, origin.model, origin.adapter, out.partial, prompts),
        "verified_tensors": compared,
        "folders_left_out": left_out,
        "files": out.fingerprints(),
    }  # fmt: skip
    out.write_file(REPORT, json.dumps(report, indent=1) + "\n")
    out.write_file(REPORT_TEXT, report_text(report) + "\n")
    out.publish()
    return report


def _refuse_merged_base(origin: Origin, base: Checkpoint) -> None:
    """A base that holds an adapter already is right only for an adapter that was trained on that very base."""
    for file in sorted({header.file for header in base.headers.values()}):
        if (inside := read_metadata(base.folder / file).get(MERGE_MARKER)) is None:
            continue
        if origin.own_base and origin.sha256 not in inside:
            return
        raise AdapterError(
            f"{base.folder} already holds adapter {inside[:20]}..., and {origin.place} was not trained on it; name the "
            "base that it was trained on with --model"
        )


def _adapter_name(origin: Origin) -> str:
    version = "" if origin.version is None else f"v{origin.version} "
    return f"{version}{origin.sha256}"


def _config_json(origin: Origin, target: Target) -> dict[str, Any]:
    raw = origin.config.to_json()
    if target == "bf16":
        for owner in (raw, raw["text_config"]):
            owner.pop("quantization_config", None)
    return raw


def _fingerprint(base: Checkpoint) -> str:
    """Changes when a file of the base does, as far as names, sizes and times tell."""
    files = sorted({"config.json", *(header.file for header in base.headers.values())})
    stats = [(name, (base.folder / name).stat()) for name in files]
    facts = [str(base.folder.resolve()), *((name, s.st_size, s.st_mtime_ns) for name, s in stats)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _teller(told: Callable[[str], None], out: ShardedFolder) -> Callable[[Shard], None]:
    done = iter(range(1, len(out.shards) + 1))
    return lambda shard: told(f"{shard.name}: {shard.num_bytes:,} bytes ({next(done)} of {len(out.shards)})")
