"""The report of a merged export as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REPORT, REPORT_TEXT = "export.json", "export.txt"
_COLUMNS = {
    "below_half_step": "below half a step",
    "error": "rounding error",
    "kept": "kept",
    "groups_rescaled": "groups rescaled",
}


def report_text(report: Mapping[str, Any]) -> str:
    """What was written, what rounding cost by kind of layer, and what it does to the logits."""
    adapter = report["adapter"]
    version = "" if adapter["version"] is None else f"v{adapter['version']} "
    lines = [
        f"{report['base']} with adapter {version}{adapter['sha256'][:12]} (rank {adapter['rank']}, alpha "
        f"{adapter['alpha']:g}) merged, in {report['to']}",
        "",
        "shares of the delta's energy:",
        "layers   " + "".join(f"{title:>19}" for title in _COLUMNS.values()),
    ]
    for kind, shares in report["rounding"].items():
        lines.append(f"{kind:<9}" + "".join(f"{shares[name]:>19.2%}" for name in _COLUMNS))
    lines += ["", _logits_text(report["logits"])]
    checked = report["verified_tensors"]
    lines.append(f"read back and compared: {checked} tensors" if checked else "not read back (--verify does it)")
    if report["folders_left_out"]:
        lines.append(f"folders of the base that were not copied: {', '.join(report['folders_left_out'])}")
    return "\n".join(lines)


def _logits_text(logits: Mapping[str, Any]) -> str:
    if reason := logits.get("left_out"):
        return f"logits: not compared: {reason}"
    return (
        f"logits over {logits['tokens']} tokens, beside base + adapter: mean difference {logits['mean']:.3g}, largest "
        f"{logits['max']:.3g}, KL {logits['kl']:.3g}, same likeliest token {logits['same_top']:.1%}; the adapter "
        f"itself moved them by {logits['adapter_mean']:.3g} (mean), KL {logits['adapter_kl']:.3g}"
    )
