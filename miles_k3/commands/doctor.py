"""`miles-k3 doctor`: what keeps the product from working here, with fixes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    subject: Annotated[
        str | None, typer.Argument(metavar="[RECIPE|RUN]", help="What is to run; without it the machine alone.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", metavar="HOST[:PORT]", help="Another host of the run, to be reached.")
    ] = None,
    hashes: Annotated[bool, typer.Option("--hashes", help="Read the whole model and compare known hashes.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the recipe.")
    ] = None,
) -> None:
    """Find what keeps a run from working: versions, GPUs, network, disks, files. Exit code 1 when something does."""
    import json

    from miles_k3.doctor.diagnosis import diagnose
    from miles_k3.findings import print_findings
    from miles_k3.recipe import load_recipe

    recipe = load_recipe(subject, overrides or []).recipe if subject is not None else None
    run = Path(subject) if subject is not None and Path(subject).is_dir() else None
    findings = diagnose(recipe, run, hosts=hosts or (), hashes=hashes)
    healthy = all(finding.ok for finding in findings)
    if as_json:
        rows = [{"name": f.name, "level": f.level.value, "text": f.text, "fix": f.fix} for f in findings]
        typer.echo(json.dumps({"ok": healthy, "findings": rows}, indent=1, ensure_ascii=False))
    else:
        print_findings(findings)
    if not healthy:
        raise typer.Exit(1)
