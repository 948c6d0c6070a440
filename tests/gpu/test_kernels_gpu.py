"""The Triton kernels on a GPU, compiled: the interpreter's cases in both dtypes, and K3's own widths."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def case_names() -> list[str]:
    from helpers.kernel_cases import CASES

    return list(CASES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", case_names())
def test_kernel_equals_its_plain_twin(name: str, dtype: torch.dtype) -> None:
    from helpers.kernel_cases import CASES, nan_filled_memory

    with nan_filled_memory():
        CASES[name](torch.device("cuda"), dtype)


@pytest.mark.parametrize("tokens", [1, 7, 14, 20, 300])
def test_experts_of_true_width(tokens: int) -> None:
    """Latent 3584, inner 3072, 16 of 40 experts, LoRA of rank 16, in bfloat16 against fp32: by norm, 1 % or so."""
    from helpers.kernel_cases import Draw, expert_term, fp32_term

    from miles_k3.k3.kernels.fused_experts import fused_experts
    from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts
    from miles_k3.k3.ops import mxfp4
    from miles_k3.k3.ops.latent_moe import latent_experts

    draw = Draw(torch.device("cuda"), torch.bfloat16, tokens)
    experts, latent, inner = 40, 3584, 3072
    w13, w2 = (
        draw.packed(*shape, scales=(116, 120)) for shape in ((experts, 2 * inner, latent), (experts, latent, inner))
    )
    z, chosen = draw.normal(tokens, latent), draw.chosen(tokens, 16, experts)
    weights, term = torch.rand(tokens, 16, device="cuda"), expert_term(draw, experts, latent, inner, 16, None)
    fused = partial(fused_experts, situ_beta=4.0, situ_linear_beta=25.0, lora=[term])
    out = fused(z, weights, chosen, PackedExperts.of(*w13), PackedExperts.of(*w2))
    plain = partial(latent_experts, situ_beta=4.0, situ_linear_beta=25.0, lora=[fp32_term(term)])
    expected = plain(z.float(), weights, chosen, mxfp4.dequantize(*w13), mxfp4.dequantize(*w2))
    assert ((out.float() - expected).norm() / expected.norm()).item() < 1e-2


@pytest.mark.parametrize("rows", [64, 3000, 9000])
def test_grouped_products_of_true_width(rows: int) -> None:
    """Every form of a tile that an average load picks; the shares of the experts differ widely, one gets nothing."""
    from helpers.kernel_cases import Draw

    from miles_k3.k3.kernels.grouped_mxfp4 import grouped_mxfp4, grouped_mxfp4_transposed
    from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts
    from miles_k3.k3.ops import mxfp4
    from miles_k3.k3.ops.latent_moe import grouped_linear

    draw = Draw(torch.device("cuda"), torch.bfloat16, rows)
    packed, scale = draw.packed(60, 6144, 3584, scales=(116, 120))
    share = torch.rand(60, generator=draw.generator) + 0.5
    share[7] = 0
    ends = (share.cumsum(0) / share.sum() * rows).round().int().cuda()
    weight, dense = PackedExperts.of(packed, scale), mxfp4.dequantize(packed, scale, torch.bfloat16)
    x, dy = draw.normal(rows, 3584), draw.normal(rows, 6144)
    with torch.no_grad():
        pairs = (
            (grouped_mxfp4(x, weight, ends), grouped_linear(x, dense, ends)),
            (grouped_mxfp4_transposed(dy, weight, ends), grouped_linear(dy, dense.transpose(1, 2).contiguous(), ends)),
        )
    for found, expected in pairs:
        assert ((found.float() - expected.float()).norm() / expected.float().norm()).item() < 4e-3  # rounding of bf16


@pytest.mark.parametrize("rows", [1, 600])
def test_draws_of_true_width(rows: int) -> None:
    """163,840 tokens, flat and peaked, beside plain sampling in fp64: no token whose share of the unit interval is
    further from the uniform than fp32's sums round (1e-6)."""
    from helpers.kernel_cases import Draw

    from miles_k3.k3.kernels.token_draw import draw_tokens
    from miles_k3.rollout.embedded.sampler import uniforms

    draw, device = Draw(torch.device("cuda"), torch.float32, rows), torch.device("cuda")
    logits = draw.normal(rows, 163840) * torch.linspace(0.5, 4.0, rows, device=device).unsqueeze(1)
    temperature, greedy = torch.ones(rows, device=device), torch.zeros(rows, dtype=torch.bool, device=device)
    seeds, positions = draw.integers(-(1 << 62), 1 << 62, rows), draw.integers(0, 1 << 20, rows)
    tokens, logprobs, finite = draw_tokens(logits, temperature, greedy, seeds, positions)
    shares = logits.double().softmax(-1)
    at, ends, drawn = tokens.unsqueeze(1), shares.cumsum(-1), uniforms(seeds, positions).double()
    end, share = ends.gather(1, at).squeeze(1), shares.gather(1, at).squeeze(1)
    assert finite.all()
    assert (end - share - 1e-6 <= drawn).all()
    assert (drawn <= end + 1e-6).all()
    torch.testing.assert_close(logprobs.double(), share.log(), rtol=0, atol=1e-5)


def test_experts_in_a_cuda_graph() -> None:
    """A recorded step replays on other tokens, routes and adapters without being recorded again."""
    from helpers.kernel_cases import Draw, expert_term

    from miles_k3.k3.kernels.fused_experts import fused_experts
    from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts

    draw = Draw(torch.device("cuda"), torch.bfloat16, 0)
    w13, w2 = PackedExperts.of(*draw.packed(24, 256, 128)), PackedExperts.of(*draw.packed(24, 128, 128))
    z, chosen, weights = draw.normal(5, 128), draw.chosen(5, 4, 24), torch.rand(5, 4, device="cuda")
    term = expert_term(draw, 24, 128, 128, 16, None)

    def step() -> torch.Tensor:
        return fused_experts(z, weights, chosen, w13, w2, situ_beta=4.0, situ_linear_beta=25.0, lora=[term])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(2):
        z.copy_(draw.normal(5, 128))
        chosen.copy_(draw.chosen(5, 4, 24))
        term.b1.copy_(draw.normal(24, 128, 16))
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.parametrize("load", [1, 6, 8, 11, 20, 45, 75, 146, 2048])
def test_products_are_right_every_time(load: int) -> None:
    """Every form of a tile at true widths, again and again: three stages of wide tiles once gave a few outputs in ten
    million other weights, at random. An output differs from torch's by less than 0.3 when both only round."""
    from miles_k3.k3.kernels.grouped_mxfp4 import grouped_mxfp4, grouped_mxfp4_transposed
    from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts
    from miles_k3.k3.ops import mxfp4

    torch.manual_seed(load)
    experts, out, width = 64, 3584, 3072
    codes = torch.randint(0, 256, (experts, out, width // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(119, 122, (experts, out, width // 32), dtype=torch.uint8, device="cuda")
    ends = torch.randint(int(0.7 * load), int(1.3 * load) + 2, (experts,)).cumsum(0).int().cuda()
    weight, dense = PackedExperts.of(codes, scale), mxfp4.dequantize(codes, scale, torch.bfloat16)
    x, dy = (torch.randn(int(ends[-1]), n, device="cuda", dtype=torch.bfloat16) for n in (width, out))
    pairs = (
        (partial(grouped_mxfp4, x, weight, ends), F.grouped_mm(x, dense.transpose(1, 2), offs=ends)),
        (partial(grouped_mxfp4_transposed, dy, weight, ends), F.grouped_mm(dy, dense, offs=ends)),
    )
    for product, expected in pairs:
        wrong = sum(((product().float() - expected.float()).abs() >= 0.3).sum() for _ in range(12))
        assert int(wrong) == 0


def test_fused_experts_repeat_bit_for_bit() -> None:
    """Nothing in them is summed in an order that changes, so any difference is memory read too early or too late."""
    from helpers.kernel_cases import Draw

    from miles_k3.k3.kernels.fused_experts import fused_experts
    from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts

    draw = Draw(torch.device("cuda"), torch.bfloat16, 0)
    experts, latent, inner = 64, 3584, 3072
    w13 = PackedExperts.of(*draw.packed(experts, 2 * inner, latent, scales=(116, 120)))
    w2 = PackedExperts.of(*draw.packed(experts, latent, inner, scales=(116, 120)))
    for tokens in (4, 64, 600, 8192):
        z, chosen = draw.normal(tokens, latent), draw.chosen(tokens, 16, experts)
        run = partial(fused_experts, situ_beta=4.0, situ_linear_beta=25.0)
        weights = torch.rand(tokens, 16, device="cuda")
        first = run(z, weights, chosen, w13, w2)
        assert torch.isfinite(first).all()
        assert all(torch.equal(run(z, weights, chosen, w13, w2), first) for _ in range(12))
