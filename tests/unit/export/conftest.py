"""A tiny base of several files with a vision tower, an adapter for it, and what they make together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.exports import SHARD_BYTES, Case, write_base
from helpers.tiny import tiny_adapter, tiny_weights
from k3_cases import random_tensors, tiny

from miles_k3.adapters.peft_io import save_peft
from miles_k3.adapters.update import make_update
from miles_k3.export.merged import export_merged
from miles_k3.export.origin import open_origin
from miles_k3.k3.params import Part, iter_params
from miles_k3.types import AdapterConfig


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("export")
    config = tiny(num_experts=4)
    seen = {p.name for p in iter_params(config) if p.part is Part.VISION}
    weights = tiny_weights(config) | {n: t for n, t in random_tensors(config).items() if n in seen}
    write_base(root / "base", config, weights)
    shape = AdapterConfig(rank=4, alpha=6.0)
    update = make_update(0, shape, tiny_adapter(config, shape))
    save_peft(root / "adapter", update, str(root / "base"))
    return Case(base=root / "base", peft=root / "adapter", config=config, weights=weights, update=update)


Export = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def export(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """export(folder, target, source=case.peft, model=None, **options) -> the report."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("2 + 2\n")

    def run(folder: Path, target: Any, source: Path = case.peft, model: Path | None = None, **options: Any) -> Any:
        options = {"shard_bytes": SHARD_BYTES, "told": lambda line: None, "prompts": prompts, **options}
        with open_origin(source, model=model) as origin:
            return export_merged(origin, folder, target, **options)

    return run


@pytest.fixture(scope="session")
def merged(case: Case, export: Export, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The finished export of a target; nobody changes it."""
    root, made = tmp_path_factory.mktemp("merged"), {}

    def get(target: str) -> Path:
        if target not in made:
            made[target] = root / target
            export(made[target], target, verify=True)
        return made[target]

    return get
