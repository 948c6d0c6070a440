"""The ladder's steps by name, and what of them can be tried without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.commands import command_line
from miles_k3.sglang_ladder.report import Report


def steps() -> dict[str, Callable[[Path, Report], None]]:
    """Name -> what a process of its own does with a work folder and its report."""
    from miles_k3.sglang_ladder.dspark import dspark, dspark_eager
    from miles_k3.sglang_ladder.golden import golden, golden_eager
    from miles_k3.sglang_ladder.lossless import lossless
    from miles_k3.sglang_ladder.ten_steps import ten_steps
    from miles_k3.sglang_ladder.wide import wide_base, wide_lora, wide_lora_blocks

    return {
        "kernels": kernels, "golden": golden, "golden-eager": golden_eager, "wide-base": wide_base,
        "wide-lora": wide_lora, "wide-lora-blocks": wide_lora_blocks, "rl": ten_steps,
        "dspark": dspark, "dspark-eager": dspark_eager, "lossless": lossless,
    }  # fmt: skip


def kernels(_: Path, report: Report) -> None:
    """What nvcc has to make on a machine that has none of it yet."""
    from miles_k3.rollout.sglang.kernels import compile_ahead

    report.note(compile_s=round(compile_ahead(expert_parallel=False), 1))


def dry_run(chosen: Sequence[str], work: Path) -> Iterator[str]:
    """Make the models and judge the arguments of some steps; a line each. Raises what a step would stumble over."""
    from miles_k3.sglang_ladder.drafts import write_telling_draft
    from miles_k3.sglang_ladder.models import arguments_for, golden_adapter, golden_checkpoint, recipe_for, wide_model
    from miles_k3.sglang_ladder.ten_steps import small_model, small_recipe

    for step in chosen:
        if step == "kernels":
            yield f"{step}: nothing but nvcc"
            continue
        if step.startswith("golden"):
            folder = golden_checkpoint(work)
            detail = f"{len(golden_adapter(folder))} adapter tensors"
            recipe = recipe_for(folder, max_running=16, prompt=512, new=256, cuda_graphs=step == "golden")
        elif step.startswith("dspark"):
            folder, detail = golden_checkpoint(work), "with a draft that knows nothing"
            draft = write_telling_draft(work / "golden-draft", K3Config.from_folder(folder), [])
            recipe = recipe_for(folder, max_running=32, prompt=512, new=256, draft=str(draft))
        elif step == "lossless":
            folder, detail = small_model(work), "as drawn, with a draft that knows nothing"
            draft = write_telling_draft(work / "lossless-draft", K3Config.from_folder(folder), [])
            recipe = recipe_for(folder, max_running=32, prompt=512, new=256, draft=str(draft))
        elif step.startswith("wide"):
            folder, detail = wide_model(work), "config only"
            recipe = recipe_for(folder, max_running=64, prompt=256, new=128, memory_fraction=0.6)
        else:
            folder, detail = small_model(work), "with the tiny tokenizer"
            recipe = small_recipe(work, folder)
        words = command_line(arguments_for(recipe, K3Config.from_folder(folder)))
        yield f"{step}: {detail}; {' '.join(words)}"
