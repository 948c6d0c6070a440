"""The row-wise LoRA kernels in Triton's interpreter, in a process of their own; others compile them."""

from __future__ import annotations

from helpers.interpreted import interpreted


def test_rows_are_the_formula() -> None:
    said = interpreted("helpers.row_lora_cases")
    assert said["many tokens are SGLang's affair"]
    assert set(said["differences"]) == {"rank 3", "rank 16", "a verify", "experts elsewhere"}
    assert all(part < 1e-5 for parts in said["differences"].values() for part in parts), said
