"""The row-wise LoRA kernels: in Triton's interpreter against the formula, and compiled for the GPUs that they serve."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.interpreted import interpreted

POINTERS = {
    "x_ptr": "*bf16", "a_ptr": "*bf16", "b_ptr": "*bf16", "y_ptr": "*bf16", "slot_ptr": "*i32", "chosen_ptr": "*i32",
    "low_ptr": "*fp32", "weight_ptr": "*fp32",
}  # fmt: skip
LATENT, WIDTH, EXPERTS, K = 3584, 3072, 896, 16  # K3's


def test_rows_are_the_formula() -> None:
    said = interpreted("helpers.row_lora_cases")
    assert said["many tokens are SGLang's affair"]
    assert set(said["differences"]) == {"rank 3", "rank 16", "experts elsewhere"}
    assert all(part < 1e-5 for parts in said["differences"].values() for part in parts), said


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("rank", [16, 64])
def test_the_compiler_takes_them(rank: int, capability: int) -> None:
    """Down to machine code, which needs no GPU: what the interpreter lets pass, ptxas and its shared memory do not."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from miles_k3.rollout.sglang.hooks import row_lora

    one = {"RANK": rank, "RANK_BLOCK": rank, "SPLITS": 8}
    launches: list[tuple[Any, dict[str, int]]] = [
        (
            row_lora._shrink,
            {**one, "RANK": 2 * rank, "RANK_BLOCK": 2 * rank, "WIDTH": LATENT, "EXPERTS": 1, "INPUTS": 128},
        ),
        (row_lora._shrink, {**one, "WIDTH": WIDTH, "EXPERTS": EXPERTS, "INPUTS": 128}),
        (row_lora._expand, {**one, "HALF": WIDTH, "EXPERTS": EXPERTS, "OUTPUTS": 128}),
        (row_lora._expand_sum, {**one, "K": K, "WIDTH": LATENT, "OUTPUTS": 128}),
    ]
    for kernel, constants in launches:
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names},
            constexprs={(names.index(n),): value for n, value in constants.items()},
        )
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert made.asm["cubin"]
        assert made.metadata.shared < 48 << 10
