"""The Triton kernels in Triton's interpreter, in a process of their own: it is chosen when kernels are imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.interpreted import interpreted

TESTS = Path(__file__).parents[2]
SOURCE = (TESTS / "helpers/kernel_cases.py").read_text()
NAMES = [
    node.name for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef) and node.decorator_list
    and isinstance(node.decorator_list[0], ast.Name) and node.decorator_list[0].id == "case"
]  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Case -> what went wrong, empty where nothing did."""
    return interpreted("helpers.kernel_cases")


@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_its_plain_twin(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
