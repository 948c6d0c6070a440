"""KDA's delta rule through fla's kernels against ours, on packed sequences of odd lengths, forward and gradients.

Shape legend: T tokens, N heads, K = V channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from miles_k3.k3.kernels.fla_tuning import HOPPER, import_fla, limit_autotuning
from miles_k3.k3.kernels.kda_prefill import kda_prefill
from miles_k3.k3.ops.kda import kda_chunk, kda_gate
from miles_k3.k3.ops.packed import PREFILL_CHUNK, Packed
from miles_k3.trainer.model.kda_core import KdaMaps, delta_rule
from miles_k3.trainer.model.kda_fla import fla_delta_rule, fla_gated_delta_rule

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
HEADS, DIM = 4, 128  # K3's head; its number of heads only widens the grid
BOUND = -5.0
LENGTHS = [(5, 64, 17, 1, 130, 33), (257, 1, 63, 191, 129), (1023,)]
# ||a - b|| / ||b|| over a whole tensor. Ours is fp32 throughout. fla rounds the inputs of its products, the states
# between chunks and its results to q's dtype: 2^-9 (bf16) or 2^-11 (tf32) at most each, several in a row.
FORWARD = {torch.bfloat16: 1e-2, torch.float32: 2e-3}
BACKWARD = {torch.bfloat16: 2e-2, torch.float32: 5e-3}


def draw(lengths: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v in `dtype`; fp32 log decay over its whole range (-5, 0), and beta."""
    torch.manual_seed(sum(lengths))
    shape = sum(lengths), HEADS, DIM
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    return [q, k, v, BOUND * torch.rand(shape, device="cuda"), torch.rand(shape[:2], device="cuda")]


def results(form: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output and the gradients of all inputs, as float64."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = form(*leaves)
    torch.manual_seed(1)
    loss = (out.float() * torch.randn(out.shape, device="cuda")).sum()
    return [x.double() for x in (out, *torch.autograd.grad(loss, leaves))]


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def through_fla(packed: Packed) -> Callable[..., Tensor]:
    return partial(fla_delta_rule, cu_seqlens=packed.cu_seqlens, cu_seqlens_cpu=packed.cu_seqlens.cpu())


def through_torch(lengths: tuple[int, ...]) -> Callable[..., Tensor]:
    return partial(delta_rule, maps=KdaMaps.of(Packed.from_lengths(lengths), HEADS, 4).to("cuda"))


def through_the_plain_form(packed: Packed) -> Callable[..., Tensor]:
    return lambda q, k, v, g, beta: kda_chunk(q, k, v, g, beta, packed)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["many", "few", "one"])
def test_fla_equals_the_torch_form(lengths: tuple[int, ...], dtype: torch.dtype, record_property) -> None:
    packed, inputs = Packed.from_lengths(lengths, "cuda"), draw(lengths, dtype)
    fla, ours = results(through_fla(packed), inputs), results(through_torch(lengths), inputs)
    plain = results(through_the_plain_form(packed), inputs)
    errors = dict(zip(("out", "q", "k", "v", "g", "beta"), map(relative, fla, ours), strict=True))
    print(f"{lengths} {dtype}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    record_property("relative_errors", errors)
    assert errors.pop("out") <= FORWARD[dtype]
    assert max(errors.values()) <= BACKWARD[dtype], errors
    assert max(map(relative, fla[:1], plain[:1])) <= FORWARD[dtype]
    assert max(map(relative, fla[1:], plain[1:])) <= BACKWARD[dtype]


@pytest.mark.parametrize("lengths", LENGTHS, ids=["many", "few", "one"])
def test_prefill_equals_flas_public_kernel_and_never_waits(lengths: tuple[int, ...]) -> None:
    """From states that are there: the output, and the states left, bit for bit."""
    host, (q, k, v, f, beta) = Packed.from_lengths(lengths), draw(lengths, torch.bfloat16)
    cu, pieces, f = host.cu_seqlens.cuda(), host.pieces(PREFILL_CHUNK).cuda(), f.bfloat16()
    a_log, dt_bias = torch.randn(HEADS, device="cuda"), torch.randn(HEADS, DIM, device="cuda")
    state = torch.randn(len(lengths), HEADS, DIM, DIM, device="cuda")
    inputs = (q, k, v, f, beta, a_log, dt_bias, BOUND, cu, pieces)
    for started in (state, None):
        kda_prefill(*inputs, started)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = kda_prefill(*inputs, started)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = import_fla("ops.kda").chunk_kda(
            *(x.unsqueeze(0) for x in (q, k, v, f, beta)), initial_state=started, output_final_state=True,
            use_qk_l2norm_in_kernel=True, safe_gate=True, use_gate_in_kernel=True, A_log=a_log,
            dt_bias=dt_bias.reshape(-1), lower_bound=BOUND, cu_seqlens=cu,
        )  # fmt: skip
        assert torch.equal(found[0], expected[0][0])
        assert torch.equal(found[1], expected[1])


def test_no_sequence_sees_another() -> None:
    """Other tokens in the first sequence leave every bit of the second alone, forward and backward."""
    packed, inputs = Packed.from_lengths((37, 91), "cuda"), draw((37, 91), torch.bfloat16)
    changed = [torch.cat([x[:37].flip(0), x[37:]]) for x in inputs]
    for a, b in zip(results(through_fla(packed), inputs), results(through_fla(packed), changed), strict=True):
        assert torch.equal(a[37:], b[37:])


def test_gate_inside_the_kernel() -> None:
    """The same numbers as with the gate outside, up to the rounding of f's gradient."""
    packed, (q, k, v, g, beta) = Packed.from_lengths(LENGTHS[0], "cuda"), draw(LENGTHS[0], torch.bfloat16)
    host, f = packed.cu_seqlens.cpu(), (2 * torch.randn_like(g)).bfloat16()
    a_log, dt_bias = torch.randn(HEADS, device="cuda"), torch.randn(HEADS, DIM, device="cuda")

    def outside(q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor) -> Tensor:
        return fla_delta_rule(q, k, v, kda_gate(f, a_log, dt_bias, BOUND), beta, packed.cu_seqlens, host)

    def inside(q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor) -> Tensor:
        return fla_gated_delta_rule(q, k, v, f, a_log, dt_bias, BOUND, beta, packed.cu_seqlens, host)

    for a, b in zip(results(inside, [q, k, v, f, beta]), results(outside, [q, k, v, f, beta]), strict=True):
        assert relative(a, b) <= 4e-3


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the choices are for Hopper"
)
def test_autotuning_is_limited_and_restored() -> None:
    """Every choice is one of the kernel's own configurations in the fla that is installed."""
    limit_autotuning()()  # as fla has them
    full = [len(kernel.tuner.configs) for kernel in HOPPER]
    undo = limit_autotuning()
    assert [len(kernel.tuner.configs) for kernel in HOPPER] == [len(kernel.configs) for kernel in HOPPER]
    undo()
    assert [len(kernel.tuner.configs) for kernel in HOPPER] == full
    limit_autotuning()
