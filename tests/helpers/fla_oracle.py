"""fla's naive forms, taken function by function out of its source files.

Importing the package would import Triton and transformers first: 13 s in every test process for four plain functions.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import einops
import torch
import torch.nn.functional as F


def _function(file: str, name: str) -> Callable:
    package = find_spec("fla")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("flash-linear-attention is not installed; `make env` installs it")
    path = Path(package.origin).parent / file
    tree = ast.parse(path.read_text(), filename=str(path))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    namespace = {"torch": torch, "F": F, "rearrange": einops.rearrange, "einsum": einops.einsum, "Sequence": Sequence}
    exec(compile(tree, str(path), "exec"), namespace)
    return namespace[name]  # type: ignore[return-value]


naive_recurrent_kda = _function("ops/kda/naive.py", "naive_recurrent_kda")
naive_chunk_kda = _function("ops/kda/naive.py", "naive_chunk_kda")
naive_kda_lowerbound_gate = _function("ops/kda/gate.py", "naive_kda_lowerbound_gate")
naive_attnres = _function("ops/attnres/naive.py", "naive_attnres")
