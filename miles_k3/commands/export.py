"""`miles-k3 export`: a trained adapter as a PEFT folder or merged into its base."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """What an export becomes."""

    PEFT = "peft"
    BF16 = "bf16"
    MXFP4 = "mxfp4"


def _format(text: str) -> Format:
    try:
        return Format(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} given, expected {', '.join(Format)}") from None


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|PEFT_FOLDER", help="A run's folder, or an adapter's.")],
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            parser=_format,
            metavar="peft|bf16|mxfp4",
            help="peft: the adapter; bf16, mxfp4: merged into the base.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="A folder that doesn't exist yet.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="The base, where another one than is named.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="The run's checkpoint of that step; without it the newest.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything back and compare each tensor.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an export that was interrupted.")] = False,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="For the comparison of logits, a prompt a line.")
    ] = None,
    shard_gb: Annotated[float, typer.Option("--shard-gb", min=1e-6, help="Size of a file, GB.")] = 5.0,
) -> None:
    """Write a run's adapter as a PEFT folder, or merged into its base in BF16 or MXFP4.

    A merged export says what rounding cost: in export.json and export.txt of the folder. It takes little memory, a file
    at a time, and after an interruption goes on with --resume.
    """
    from miles_k3.export.merged import export_merged
    from miles_k3.export.origin import open_origin
    from miles_k3.export.peft import export_peft
    from miles_k3.export.report import report_text
    from miles_k3.export.verify import verify_peft

    def told(line: str) -> None:
        typer.echo(line, err=True)

    with open_origin(source, model=model, step=step) as origin:
        told(f"adapter: {origin.place} ({origin.sha256[:12]}), base: {origin.model}")
        if to is Format.PEFT:
            export_peft(origin, out, resume=resume)
            if verify:
                compared = verify_peft(out, origin.config, origin.adapter, origin.sha256)
                told(f"read back and compared: {compared} tensors")
        else:
            report = export_merged(
                origin, out, "bf16" if to is Format.BF16 else "mxfp4", shard_bytes=int(shard_gb * 1e9), resume=resume,
                verify=verify, prompts=prompts, told=told,
            )  # fmt: skip
            typer.echo(report_text(report))
    told(f"written: {out}")
