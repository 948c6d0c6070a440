"""Traps 8, 9, 10 (MLA) and 11 of spec 7.3.

Each check runs on the naive model and on both models made of the ops (expanded and absorbed MLA), and must reject each
planted mistake. Tolerance: fp32 sums within one sublayer, 1e-4 of values near 1 (a mistake shows above 1e-2).
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from helpers.mutants import assert_rejects, mutants, naive, on_ops
from helpers.ops_model import MODELS
from helpers.reference import Reference
from helpers.tiny import tiny_config, tiny_weights
from torch import Tensor

from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops.norm import rms_norm
from miles_k3.k3.params import attn_prefix

MLA = 3
CONFIG = tiny_config()
WEIGHTS = tiny_weights(CONFIG)
P = attn_prefix(MLA)
every_model = pytest.mark.parametrize("model", MODELS)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)


@cache
def hidden(tokens: int = 18) -> Tensor:
    return torch.randn(1, tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))


@cache
def mla_reference() -> Tensor:
    return Reference(CONFIG, WEIGHTS).mla(hidden()[0].double(), MLA).float()


# --- 8: no positions, scale over all 192 ---------------------------------------------------------------------------
def check_08(model: type[NaiveK3]) -> None:
    x = hidden()
    made, last = model(CONFIG, WEIGHTS), x.shape[1] - 1
    order = [*torch.randperm(last, generator=torch.Generator().manual_seed(1)).tolist(), last]
    close(made.mla(x[:, order], MLA)[:, -1], made.mla(x, MLA)[:, -1])
    close(made.mla(x, MLA)[0], mla_reference())


@every_model
def test_trap_08_nope(model):
    check_08(model)


SCORES = "q @ k.transpose(-1, -2) * c.qk_head_dim**-0.5"
ROTATED = """turn(q) @ turn(k).transpose(-1, -2) * c.qk_head_dim**-0.5"""
TURN = """at = torch.arange(q.shape[2]).float()[:, None]
        even, odd = slice(nope, None, 2), slice(nope + 1, None, 2)
        turn = lambda z: torch.cat([z[..., :nope], z[..., even] * at.cos() - z[..., odd] * at.sin(),
                                    z[..., even] * at.sin() + z[..., odd] * at.cos()], -1)
        scores = """


@mutants(
    {
        "rotated extra dims": naive(("scores = " + SCORES, TURN + ROTATED)),
        "scale without the extra dims": naive((SCORES, SCORES.replace("c.qk_head_dim", "nope"))),
        "extra dims left out": naive((SCORES, "q[..., :nope] @ k[..., :nope].transpose(-1, -2) * c.qk_head_dim**-0.5")),
        "normalised extra key": naive(
            (
                'extra = self.linear(x, p + "kv_a_proj_with_mqa").split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)',
                'extra = self.linear(x, p + "kv_a_proj_with_mqa").split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)\n'
                "        extra = extra * torch.rsqrt(extra.pow(2).mean(-1, keepdim=True) + eps)",
            )
        ),
    }
)
def test_trap_08_rejects(plant):
    assert_rejects(check_08, plant())


# --- 9: kv_b per head ------------------------------------------------------------------------------------------------
def check_09(model: type[NaiveK3]) -> None:
    """Expanded or absorbed, against the reference's absorbed form; nope != v, so every wrong split shows."""
    close(model(CONFIG, WEIGHTS).mla(hidden(), MLA)[0], mla_reference())


@every_model
def test_trap_09_kv_b_split(model):
    check_09(model)


KV = "kv = kv.unflatten(-1, (heads, -1)).transpose(1, 2)"


def all_keys_first(weight: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    return weight[: heads * nope].unflatten(0, (heads, -1)), weight[heads * nope :].unflatten(0, (heads, -1))


@mutants(
    {
        "all keys, then all values": naive(
            (
                KV,
                "kv = torch.cat([part.unflatten(-1, (heads, -1)) for part in kv.tensor_split([heads * nope], -1)], -1)"
                ".transpose(1, 2)",
            )
        ),
        "values before keys": naive(
            ("torch.cat([kv[..., :nope], extra", "torch.cat([kv[..., c.v_head_dim :], extra"),
            ("@ kv[..., nope:]", "@ kv[..., : c.v_head_dim]"),
        ),
        "op: all keys first": on_ops(op_split_kv_b=all_keys_first),
    }
)
def test_trap_09_rejects(plant):
    assert_rejects(check_09, plant())


# --- 10: the output gate -------------------------------------------------------------------------------------------
def check_10(model: type[NaiveK3]) -> None:
    """A zero gate halves the ungated output; any gate is a sigmoid of the layer's normed input, before o_proj."""
    zero = WEIGHTS | {P + "g_proj.weight": torch.zeros_like(WEIGHTS[P + "g_proj.weight"])}
    ungated = Reference(CONFIG, zero)
    ungated.w = lambda name, w=ungated.w: 2 * w(name) if name == P + "o_proj" else w(name)  # type: ignore[method-assign]
    close(2 * model(CONFIG, zero).mla(hidden(), MLA)[0], ungated.mla(hidden()[0].double(), MLA).float())
    close(model(CONFIG, WEIGHTS).mla(hidden(), MLA)[0], mla_reference())


@every_model
def test_trap_10_mla_output_gate(model):
    check_10(model)


READ = "o = o.transpose(1, 2).flatten(-2)\n        return self.linear("
GATED = 'o * torch.sigmoid(self.linear(x, p + "g_proj"))'


@mutants(
    {
        "no gate": naive((READ + GATED, READ + "o")),
        "SiLU": naive((READ + GATED, READ + 'o * torch.nn.functional.silu(self.linear(x, p + "g_proj"))')),
        "twice": naive((READ + GATED, READ + GATED + '* torch.sigmoid(self.linear(x, p + "g_proj"))')),
        "1 + gate": naive((READ + GATED, READ + 'o * (1 + torch.sigmoid(self.linear(x, p + "g_proj")))')),
    }
)
def test_trap_10_rejects(plant):
    assert_rejects(check_10, plant())


# --- 11: eps of the latent norms -------------------------------------------------------------------------------------
def check_11(model: type[NaiveK3]) -> None:
    """Latents of rms 1e-3 tell 1e-6 from 1e-5; the model follows its own field, not rms_norm_eps."""
    names = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    weights = WEIGHTS | {P + n: 1e-3 * WEIGHTS[P + n].float() for n in names}
    outs = []
    for eps in (1e-6, 1e-5):
        config = tiny_config(mla_latent_norm_eps=eps, rms_norm_eps=3e-4)
        outs.append(model(config, weights).mla(hidden(), MLA)[0])
        close(outs[-1], Reference(config, weights).mla(hidden()[0].double(), MLA).float())
    assert (outs[0] - outs[1]).abs().max() > 0.1


@every_model
def test_trap_11_latent_norm_eps(model):
    check_11(model)


EPS = "c.qk_nope_head_dim, c.mla_latent_norm_eps"


@mutants(
    {
        "always 1e-6": naive((EPS, "c.qk_nope_head_dim, 1e-6")),
        "rms_norm_eps": naive((EPS, "c.qk_nope_head_dim, c.rms_norm_eps")),
        "op without its eps": on_ops(op_norm=lambda x, w, eps: rms_norm(x, w, 1e-5)),
    }
)
def test_trap_11_rejects(plant):
    assert_rejects(check_11, plant())
