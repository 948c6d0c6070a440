"""KDA, MLA, router and experts against transformers' `kimi_linear` model, on the same weights.

Kimi-Linear is K3's ancestor; where its formulas differ, the difference is taken out:
- forget gate: K3's -5 * sigmoid(...) instead of -exp(A_log) * softplus(...): the module is replaced;
- KDA output gate: low rank there, full rank in K3: K3's matrix is their product;
- MLA has no output gate there: a zero gate halves K3's output;
- MLA latent norms have eps 1e-6 there: K3's is a parameter, set to that;
- experts: SiLU(g) * u there: SiTU with betas of 1e4 is that; no latent projections: they run on the latent itself.
NoPE is the same in both. Tolerance: fp32 in another order, 2e-5 of values near 1.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.ops_model import MODELS, OpsK3
from helpers.tiny import tiny_config, tiny_weights
from torch import Tensor, nn

from miles_k3.k3.ops.latent_moe import latent_experts, route
from miles_k3.k3.params import attn_prefix

KDA, MLA, TOKENS = 1, 3, 19
CONFIG = tiny_config(mla_latent_norm_eps=1e-6)
WEIGHTS = tiny_weights(CONFIG)


@pytest.fixture(scope="module")
def kimi() -> ModuleType:
    """Imported here, since its import takes seconds, and without fla, so that its torch forms run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        return pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")


@pytest.fixture
def kimi_config(kimi):
    c = CONFIG
    config = kimi.KimiLinearConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_attention_heads,
        q_lora_rank=c.q_lora_rank, kv_lora_rank=c.kv_lora_rank, qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim, rms_norm_eps=c.rms_norm_eps,
        linear_head_dim=c.kda_head_dim, linear_num_heads=c.kda_num_heads,
        linear_conv_kernel_dim=c.short_conv_kernel_size, num_experts=c.num_experts,
        num_experts_per_token=c.num_experts_per_token, moe_intermediate_size=c.moe_intermediate_size,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, TOKENS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))


def fill(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Every parameter of `module` must be given, with its own shape."""
    module.load_state_dict({n: v.float() for n, v in values.items()}, strict=True)
    module.requires_grad_(False).eval()


def attn(layer: int, *names: str) -> dict[str, Tensor]:
    return {f"{n}.weight": WEIGHTS[f"{attn_prefix(layer)}{n}.weight"] for n in names}


class BoundedGate(nn.Module):
    """K3's forget gate in the place of Kimi-Linear's."""

    def forward(self, hidden: Tensor) -> Tensor:
        p, heads = attn_prefix(KDA), (CONFIG.kda_num_heads, CONFIG.kda_head_dim)
        low = hidden @ WEIGHTS[p + "f_a_proj.weight"].float().T
        f = (low @ WEIGHTS[p + "f_b_proj.weight"].float().T + WEIGHTS[p + "dt_bias"]).unflatten(-1, heads)
        return -5.0 * torch.sigmoid(WEIGHTS[p + "A_log"][: heads[0], None].exp() * f)


def kda_block(kimi: ModuleType, config) -> tuple[nn.Module, dict[str, Tensor]]:
    """Kimi-Linear's block with layer KDA's weights, and K3 weights whose output gate is its low-rank product."""
    block, p = kimi.KimiLinearDeltaAttention(config, KDA), attn_prefix(KDA)
    block.forget_gate = BoundedGate()
    rng = torch.Generator().manual_seed(1)
    g_a = torch.randn(CONFIG.kda_head_dim, CONFIG.hidden_size, generator=rng) * CONFIG.hidden_size**-0.5
    g_b = torch.randn(CONFIG.kda_dim, CONFIG.kda_head_dim, generator=rng) * CONFIG.kda_head_dim**-0.5
    conv = torch.cat([WEIGHTS[f"{p}{n}_conv1d.weight"] for n in "qkv"])
    named = attn(KDA, "q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj")
    fill(block, named | {"conv1d.weight": conv, "g_a_proj.weight": g_a, "g_b_proj.weight": g_b})
    return block, WEIGHTS | {p + "g_proj.weight": g_b @ g_a}


@pytest.mark.parametrize("model", MODELS)
def test_kda_block(kimi, kimi_config, x, model):
    block, weights = kda_block(kimi, kimi_config)
    expected = block(x)
    assert expected.abs().max() > 1
    torch.testing.assert_close(model(CONFIG, weights).kda(x, KDA), expected, rtol=0, atol=2e-5 * expected.abs().max())


@pytest.mark.parametrize("model", MODELS)
def test_mla_block_without_its_gate(kimi, kimi_config, x, model):
    block, p = kimi.KimiLinearAttention(kimi_config, MLA), attn_prefix(MLA)
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    fill(block, attn(MLA, *names))
    future = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    expected, _ = block(x, future)
    gate_open_half = WEIGHTS | {p + "g_proj.weight": torch.zeros_like(WEIGHTS[p + "g_proj.weight"])}
    actual = model(CONFIG, gate_open_half).mla(x, MLA)
    torch.testing.assert_close(2 * actual, expected, rtol=0, atol=2e-5 * expected.abs().max())


def test_router(kimi, kimi_config):
    router, c = kimi.KimiLinearTopkRouter(kimi_config), CONFIG
    rng = torch.Generator().manual_seed(2)
    gate, bias = torch.randn(c.num_experts, c.hidden_size, generator=rng) * 0.15, 0.3 * torch.randn(8, generator=rng)
    router.load_state_dict({"weight": gate, "e_score_correction_bias": bias}, strict=False)
    router.e_score_correction_bias.copy_(bias)
    hidden = torch.randn(64, c.hidden_size, generator=rng)
    _, expected_weights, expected_experts = router(hidden)
    weights, experts = route(hidden, gate, bias, top_k=c.num_experts_per_token, renormalize=True, scaling=2.5)
    for (w, e), (we, ee) in zip(_sorted(weights, experts), _sorted(expected_weights, expected_experts), strict=True):
        assert torch.equal(e, ee)
        torch.testing.assert_close(w, we)


def _sorted(weights: Tensor, experts: Tensor) -> list[tuple[Tensor, Tensor]]:
    order = experts.argsort(-1)
    return list(zip(weights.gather(1, order), experts.gather(1, order), strict=True))


def test_experts_with_betas_out_of_the_way(kimi):
    latent, inter, num = 64, 32, 8
    shape = SimpleNamespace(num_local_experts=num, hidden_size=latent, moe_intermediate_size=inter, hidden_act="silu")
    shape._experts_implementation = "eager"
    module = kimi.KimiLinearExperts(shape)
    rng = torch.Generator().manual_seed(3)
    w13 = torch.randn(num, 2 * inter, latent, generator=rng) * latent**-0.5
    w2 = torch.randn(num, latent, inter, generator=rng) * inter**-0.5
    fill(module, {"gate_up_proj": w13, "down_proj": w2})
    z = torch.randn(40, latent, generator=rng)
    weights, experts = torch.rand(40, 2, generator=rng), torch.rand(40, num, generator=rng).topk(2).indices
    expected = module(z, experts, weights)
    actual = latent_experts(z, weights, experts, w13, w2, situ_beta=1e4, situ_linear_beta=1e4)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * expected.abs().max())


def test_norm_cast_order(kimi):
    """Theirs and ours round the normalised value to bf16 before the weight."""
    rng = torch.Generator().manual_seed(4)
    norm = kimi.KimiLinearRMSNorm(96, eps=1e-5)
    weight = (1 + 0.3 * torch.randn(96, generator=rng)).bfloat16()
    norm.weight.data = weight
    low = torch.randn(50, 96, generator=rng).bfloat16()
    assert torch.equal(OpsK3.op_norm(low, weight, 1e-5), norm(low))
