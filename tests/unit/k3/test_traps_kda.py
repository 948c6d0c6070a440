"""Traps 2, 3, 4, 10 (KDA) and 26 of spec 7.3.

Each check runs on the naive model and on both models made of the ops, and must reject each planted mistake.
Tolerance: fp32 sums, checked within one sublayer, 1e-4 of values near 1 (a mistake shows above 1e-2).
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from helpers.fla_oracle import naive_kda_lowerbound_gate
from helpers.mutants import assert_rejects, mutants, mutate, naive, on_ops, record
from helpers.ops_model import MODELS, OpsK3
from helpers.reference import Reference
from helpers.tiny import tiny_config, tiny_weights
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.ops import kda as kda_ops
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.ops.short_conv import short_conv
from miles_k3.k3.params import attn_prefix
from miles_k3.k3.weights import strip_a_log

KDA = 1
CONFIG = tiny_config()
WEIGHTS = tiny_weights(CONFIG)
P = attn_prefix(KDA)
HEADS = (CONFIG.kda_num_heads, CONFIG.kda_head_dim)
every_model = pytest.mark.parametrize("model", MODELS)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)


@cache
def hidden(tokens: int = 18) -> Tensor:
    return torch.randn(1, tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))


def delta_rule_args(model: NaiveK3, x: Tensor) -> tuple[Tensor, ...]:
    """(q, k, v, g, beta) as the recurrence of layer KDA gets them."""
    calls = record(model, "op_kda" if isinstance(model, OpsK3) else "delta_rule")
    model.kda(x, KDA)
    return calls[0][0]


# --- 2: A_log's padding ------------------------------------------------------------------------------------------
def check_02_model(model: type[NaiveK3]) -> None:
    """Head h's decay follows entry h, the padding nothing."""
    before = delta_rule_args(model(CONFIG, WEIGHTS), hidden())[3].reshape(-1, *HEADS)
    for entry in (0, 2, 3, 4, 96):
        changed = WEIGHTS[P + "A_log"].clone()
        changed[entry] += 1.0
        after = delta_rule_args(model(CONFIG, WEIGHTS | {P + "A_log": changed}), hidden())[3].reshape(-1, *HEADS)
        moved = ((after - before).abs().amax(dim=(0, 2)) > 1e-3).tolist()
        assert moved == [h == entry for h in range(HEADS[0])]


def check_02_loader(strip) -> None:
    """Slice first, shard after: rank r of 2 holds its own heads. Anything but zeros behind them is refused."""
    stored = WEIGHTS[P + "A_log"]
    for rank, part in enumerate(strip(stored, HEADS[0], "A_log").chunk(2)):
        assert torch.equal(part, stored[2 * rank : 2 * rank + 2])
    for wrong in (1e-30, float("nan")):
        dirty = stored.clone()
        dirty[-1] = wrong
        with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.A_log"):
            strip(dirty, HEADS[0], "layers.1.self_attn.A_log")


@every_model
def test_trap_02_a_log_padding(model):
    check_02_model(model)


def test_trap_02_a_log_padding_in_the_loader():
    check_02_loader(strip_a_log)


A_LOG = 'self.weight(p + "A_log")[:heads]'


@mutants(
    {
        "reshape of 128": naive((A_LOG, 'self.weight(p + "A_log").view(heads, -1)[:, 0]')),
        "last instead of first": naive((A_LOG, 'self.weight(p + "A_log")[-heads:]')),
        "one for all heads": on_ops(op_gate=lambda f, a, dt, lb: kda_ops.kda_gate(f, a[:1].expand(4), dt, lb)),
    }
)
def test_trap_02_rejects(plant):
    assert_rejects(check_02_model, plant())


@mutants(
    {
        "reshape of 128": lambda: lambda a, heads, name: a.view(heads, -1)[:, 0],
        "padding not looked at": lambda: lambda a, heads, name: a[:heads],
        "sharded before slicing": lambda: lambda a, heads, name: torch.cat([s[: heads // 2] for s in a.chunk(2)]),
    }
)
def test_trap_02_rejects_in_the_loader(plant):
    assert_rejects(check_02_loader, plant())


# --- 3: the gate's form ------------------------------------------------------------------------------------------
def check_03(model: type[NaiveK3]) -> None:
    for f, bound in ((100.0, -5.0), (-100.0, 0.0)):
        weights = WEIGHTS | {P + "dt_bias": torch.full_like(WEIGHTS[P + "dt_bias"], f)}
        g = delta_rule_args(model(CONFIG, weights), hidden())[3]
        close(g, torch.full_like(g, bound), atol=1e-6)
    x = hidden()[0]
    f = x @ WEIGHTS[P + "f_a_proj.weight"].float().T @ WEIGHTS[P + "f_b_proj.weight"].float().T
    a_log, dt_bias = WEIGHTS[P + "A_log"][: HEADS[0]], WEIGHTS[P + "dt_bias"]
    expected = naive_kda_lowerbound_gate(f.view(-1, *HEADS), a_log, dt_bias, lower_bound=-5.0)
    close(delta_rule_args(model(CONFIG, WEIGHTS), hidden())[3].reshape(expected.shape), expected)


@every_model
def test_trap_03_gate_form(model):
    check_03(model)


GATE = "c.gate_lower_bound * torch.sigmoid(rate * f.unflatten(-1, (heads, dim)))"
DT = 'self.weight(p + "dt_bias").unflatten(-1, (heads, dim))'


@mutants(
    {
        "clamped softplus": naive(
            (GATE, "(-rate * torch.nn.functional.softplus(f.unflatten(-1, (heads, dim)))).clamp(c.gate_lower_bound)")
        ),
        "A_log without exp": naive((A_LOG + ".exp()", A_LOG)),
        "dt_bias outside of the rate": naive(
            (GATE, f"c.gate_lower_bound * torch.sigmoid(rate * (f.unflatten(-1, (heads, dim)) - {DT}) + {DT})")
        ),
        "no bound": naive((GATE, GATE.removeprefix("c.gate_lower_bound * "))),
        "softplus op": on_ops(op_gate=lambda f, a, dt, lb: -a.exp()[:, None] * F.softplus(f + dt)),
        "op without exp": on_ops(op_gate=lambda f, a, dt, lb: lb * torch.sigmoid(a[:, None] * (f + dt))),
    }
)
def test_trap_03_rejects(plant):
    assert_rejects(check_03, plant())


# --- 4: L2 norm and scale ----------------------------------------------------------------------------------------
def kda_core(model: type[NaiveK3], x: Tensor, **factors: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The recurrence's output before o_norm [T, N, D], and q, k, v behind their convolutions, scaled by `factors`."""
    made, inputs = model(CONFIG, WEIGHTS), {}
    convolve = made.conv_silu

    def scaled(y: Tensor, name: str) -> Tensor:
        letter = name.removeprefix(P)[0]
        inputs[letter] = convolve(y, name) * factors.get(letter, 1.0)
        return inputs[letter]

    made.conv_silu = scaled  # type: ignore[method-assign]
    norms = record(made, "norm")
    made.kda(x, KDA)
    (o,) = (args[0] for args, _ in norms if args[1].endswith("o_norm.weight"))
    return o.reshape(-1, *HEADS), {n: t.reshape(-1, *HEADS).double() for n, t in inputs.items()}


def check_04(model: type[NaiveK3]) -> None:
    x = hidden()
    plain, _ = kda_core(model, x)
    for letter in "qk":
        close(kda_core(model, x, **{letter: 64.0})[0], plain)  # far from eps the size of q or k doesn't count
    zero, _ = kda_core(model, x, k=0.0)
    assert torch.equal(zero, torch.zeros_like(zero))
    beta = torch.sigmoid(x[0, :1].double() @ WEIGHTS[P + "b_proj.weight"].double().T)
    for factors in ({}, {"q": 1e-3}, {"k": 1e-3}):
        o, z = kda_core(model, x[:, :1], **factors)
        norm = {n: (z[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in "qk"}
        read = (z["q"] / norm["q"] * z["k"] / norm["k"]).sum(-1) * HEADS[1] ** -0.5
        close(o.double(), (beta * read)[..., None] * z["v"])


@every_model
def test_trap_04_l2_norm_and_scale(model):
    check_04(model)


L2 = "z * torch.rsqrt(z.pow(2).sum(-1, keepdim=True) + 1e-6) for z in (q, k)"
UNIT_Q = "l2_norm(q_TNK) * q_TNK.shape[-1] ** -0.5"


@mutants(
    {
        "mean instead of sum": naive((L2, L2.replace(".sum(", ".mean("))),
        "eps outside the root": naive((L2, "z / (z.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6) for z in (q, k)")),
        "no eps": naive((L2, L2.replace(" + 1e-6", ""))),
        "q not normalised": naive(
            (L2, "z * torch.rsqrt(z.pow(2).sum(-1, keepdim=True) + 1e-6) if z is k else z for z in (q, k)")
        ),
        "no scale": naive(("q = q * dim**-0.5", "q = q * 1.0")),
        "scale twice": naive(("q = q * dim**-0.5", "q = q * dim**-1.0")),
        "chunk form without scale": lambda: on_ops(op_kda=mutate(kda_ops.kda_chunk, (UNIT_Q, "l2_norm(q_TNK)")))(),
        "chunk form without q norm": lambda: on_ops(op_kda=mutate(kda_ops.kda_chunk, ("l2_norm(q_TNK)", "q_TNK")))(),
    }
)
def test_trap_04_rejects(plant):
    assert_rejects(check_04, plant())


# --- 10: the output gate -------------------------------------------------------------------------------------------
def check_10(model: type[NaiveK3]) -> None:
    """A zero gate halves; any gate is a sigmoid of the layer's normed input, applied after o_norm, before o_proj."""
    x = hidden()
    shut = WEIGHTS | {P + "g_proj.weight": torch.zeros_like(WEIGHTS[P + "g_proj.weight"])}
    made = model(CONFIG, shut)
    norms = record(made, "norm")
    out = made.kda(x, KDA)
    (normed,) = (result for args, result in norms if args[1].endswith("o_norm.weight"))
    ungated = normed.reshape(x.shape[1], -1) @ WEIGHTS[P + "o_proj.weight"].float().T
    close(2 * out[0], ungated)
    close(model(CONFIG, WEIGHTS).kda(x, KDA)[0], Reference(CONFIG, WEIGHTS).kda(x[0].double(), KDA).float())


@every_model
def test_trap_10_kda_output_gate(model):
    check_10(model)


NORMED = 'o = self.norm(o, p + "o_norm.weight", c.rms_norm_eps).flatten(-2)\n        '
GATE_OUT = 'torch.sigmoid(self.linear(x, p + "g_proj"))'
LAST = f"{NORMED}return self.linear(o * {GATE_OUT}"


@mutants(
    {
        "SiLU": naive((LAST, LAST.replace("torch.sigmoid(", "torch.nn.functional.silu("))),
        "no gate": naive((LAST, LAST.replace(f" * {GATE_OUT}", ""))),
        "gate before the norm": naive(
            (
                LAST,
                f"o = o * {GATE_OUT}.unflatten(-1, (heads, dim))\n        " + LAST.replace(f" * {GATE_OUT}", ""),
            )
        ),
        "softer gate": naive((LAST, LAST.replace('"g_proj")', '"g_proj") / 2'))),
    }
)
def test_trap_10_rejects(plant):
    assert_rejects(check_10, plant())


# --- 26: packed sequences --------------------------------------------------------------------------------------------
SEQUENCES = ([5, 77, 130, 9, 200], [3] * 17, [250], [8, 1, 99, 4, 4, 61, 17, 30])


def together(model: type[NaiveK3], sequences) -> list[Tensor]:
    """One forward of all: packed on the ops, a right-padded batch (of junk tokens) on the naive model."""
    made = model(CONFIG, WEIGHTS)
    if isinstance(made, OpsK3):
        return made.packed_logits(sequences)
    longest = max(map(len, sequences))
    batch = torch.tensor([[*s, *range(20, 20 + longest - len(s))] for s in sequences])
    return [row[: len(s)] for row, s in zip(made(batch), sequences, strict=True)]


def check_26(model: type[NaiveK3]) -> None:
    """Fp32 noise grows to 1e-3 over the whole model where AttnRes picks sharply; a leak moves logits by whole units."""
    alone = [together(model, [s])[0] for s in SEQUENCES]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        for i, logits in zip(order, together(model, [SEQUENCES[i] for i in order]), strict=True):
            close(logits, alone[i], atol=1e-2)


@every_model
def test_trap_26_packed_sequences(model):
    check_26(model)


@every_model
def test_trap_26_a_neighbours_last_token_changes_nothing(model):
    """[A, B] and [A with another last token, B]: B's logits are the same to the bit."""
    changed = [[*SEQUENCES[1][:-1], 111], *SEQUENCES[2:]]
    for before, after in zip(together(model, SEQUENCES[1:])[1:], together(model, changed)[1:], strict=True):
        assert torch.equal(before, after)


def one_sequence(packed: Packed) -> Packed:
    return Packed.from_lengths([packed.num_tokens])


class LeakyMla(OpsK3):
    def attention(self, q: Tensor, latent: Tensor, extra: Tensor, w_k: Tensor, w_v: Tensor, packed: Packed) -> Tensor:
        return super().attention(q, latent, extra, w_k, w_v, one_sequence(packed))


def leaky_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    return kda_ops.kda_chunk(q, k, v, g, beta, one_sequence(packed))


@mutants(
    {
        "KDA without cu_seqlens": on_ops(op_kda=leaky_kda),
        "conv without cu_seqlens": on_ops(op_conv=lambda x, w, p: short_conv(x, w, one_sequence(p))),
        "MLA without cu_seqlens": lambda: LeakyMla,
        "state carried to the next": on_ops(
            op_kda=mutate(
                kda_ops.kda_recurrent,
                (
                    "state = zero_state(1, q_TNK, v_TNV) if state_BNKV is None",
                    "state = (states[-1] if states else zero_state(1, q_TNK, v_TNV)) if state_BNKV is None",
                ),
            )
        ),
        "conv that looks ahead": naive(("(w.shape[-1] - 1, 0))", "(w.shape[-1] - 2, 1))")),
        "attention that looks ahead": naive((".triu(1)", ".triu(2)")),
    }
)
def test_trap_26_rejects(plant):
    assert_rejects(check_26, plant())
