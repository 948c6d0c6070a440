"""The Triton kernels in Triton's interpreter, in a process of their own: it is chosen when kernels are imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.interpreted import interpreted

TESTS = Path(__file__).parents[2]
SOURCES = sorted((TESTS / "helpers/kernel_cases").glob("*.py"))
NAMES = [
    node.name
    for source in SOURCES
    for node in ast.parse(source.read_text()).body
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(d, ast.Name) and d.id == "case" for d in node.decorator_list)
]


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Case -> what went wrong, empty where nothing did."""
    return interpreted("helpers.kernel_cases")


@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_its_plain_twin(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
