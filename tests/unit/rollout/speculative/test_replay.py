"""The fold against decode: the state and window after every count of kept positions, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.tiny import tiny_config
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.k3.ops.decode import kda_step_, short_conv_step_
from miles_k3.rollout.cache.layout import Layout, Views
from miles_k3.rollout.speculative import replay
from miles_k3.rollout.speculative.replay import ReplayBuffer, WindowBytes
from miles_k3.rollout.speculative.verify import VerifySteps, kda_verify, short_conv_verify

CPU = torch.device("cpu")
SLOTS = 12


def layout_of(dtype: torch.dtype) -> Layout:
    return dataclasses.replace(Layout.for_model(tiny_config(), page_size=4, dtype=dtype), kda_layers=3)


class Case:
    """A verify of three KDA layers over a pool's own views, and decode's way to the same place."""

    def __init__(self, lengths: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        layout = self.layout = layout_of(dtype)
        buffer = torch.zeros(layout.slot_bytes * SLOTS, dtype=torch.uint8)
        self.views = Views.of(layout, buffer)
        self.views.states.copy_(torch.randn(self.views.states.shape))
        self.views.windows.copy_(torch.randn(self.views.windows.shape))
        self.slots = torch.randperm(SLOTS)[: len(lengths)].tolist()
        self.lengths, self.steps = lengths, VerifySteps.of(lengths, layout.conv_width)
        total, n, d = sum(lengths), layout.heads, layout.head_dim
        self.raw = torch.randn(3, total, 3 * n * d).to(dtype)
        self.weight = torch.randn(3, 3 * n * d, 1, layout.conv_width)
        self.g, self.beta = -5 * torch.rand(3, total, n, d), torch.rand(3, total, n)
        self.buffer = ReplayBuffer.for_layout(layout, total + 5, CPU)
        for part in (self.buffer.raw_TLD, self.buffer.k_TLNK, self.buffer.v_TLNV, self.buffer.g_TLNK):
            part.fill_(torch.nan)
        self.buffer.beta_TLN.fill_(torch.nan)

    def verify(self) -> list[Tensor]:
        outs = []
        for layer in range(3):
            window = self.views.windows[layer][self.slots]
            y = short_conv_verify(self.raw[layer], self.weight[layer], window, self.steps)
            q, k, v = y.view(len(y), 3, self.layout.heads, -1).unbind(1)
            given = self.g[layer], self.beta[layer]
            outs.append(kda_verify(q, k, v, *given, self.views.states[layer][self.slots], self.steps))
            self.buffer.record(layer, self.raw[layer], k, v, *given)
        return outs

    def decoded(self, kept: list[int]) -> tuple[Tensor, Tensor]:
        """Every slot's states and windows after decoding so many tokens of each request, one by one and alone."""
        states, windows = self.views.states.clone(), self.views.windows.clone()
        for layer in range(3):
            for b, (slot, first) in enumerate(zip(self.slots, self.steps.packed.cu_seqlens.tolist(), strict=False)):
                state, window = states[layer, slot][None], windows[layer, slot][None]
                for t in range(first, first + kept[b]):
                    y = short_conv_step_(self.raw[layer, t][None], self.weight[layer], window)
                    q, k, v = y.view(1, 3, self.layout.heads, -1).unbind(1)
                    kda_step_(q, k, v, self.g[layer, t][None], self.beta[layer, t][None], state)
        return states, windows

    def forget(self, kept: list[int]) -> None:
        """NaN in all records that are not kept."""
        for b, first in enumerate(self.steps.packed.cu_seqlens.tolist()[:-1]):
            gone = slice(first + kept[b], first + self.lengths[b])
            for part in (self.buffer.raw_TLD, self.buffer.k_TLNK, self.buffer.v_TLNV, self.buffer.g_TLNK):
                part[gone] = torch.nan
            self.buffer.beta_TLN[gone] = torch.nan

    def fold(self, kept: list[int]) -> None:
        self.buffer.fold_(self.views.states, self.views.windows, self.slots, kept, self.steps)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", range(9))
def test_every_count_of_kept_positions(kept: int, dtype: torch.dtype) -> None:
    """One block of 8 positions, kept 0 to 8; every slot compared, others' too."""
    case = Case([8], dtype, seed=kept)
    states, windows = case.decoded([kept])
    case.verify()
    case.forget([kept])
    case.fold([kept])
    assert same_bits(case.views.states, states)
    assert same_bits(case.views.windows, windows)


@pytest.mark.parametrize("fold_bytes", [1, 1 << 14, 1 << 26])
def test_ragged_requests_in_any_blocks(fold_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "FOLD_BYTES", fold_bytes)
    lengths, kept = [5, 8, 1, 8, 3, 8, 2], [2, 8, 1, 0, 3, 5, 1]
    case = Case(lengths, torch.bfloat16)
    states, windows = case.decoded(kept)
    case.verify()
    case.forget(kept)
    case.fold(kept)
    assert same_bits(case.views.states, states)
    assert same_bits(case.views.windows, windows)


def test_a_second_round_starts_where_the_first_ended() -> None:
    """Two verifies with a fold each, against decode of all kept tokens."""
    first, second = Case([4, 6], torch.float32), Case([5, 2], torch.float32, seed=1)
    second.views, second.slots = first.views, first.slots
    states, windows = first.views.states.clone(), first.views.windows.clone()
    first.verify()
    first.fold([1, 4])
    expected = second.decoded([5, 1])
    second.verify()
    second.fold([5, 1])
    assert same_bits(first.views.states, expected[0])
    assert same_bits(first.views.windows, expected[1])
    assert not same_bits(first.views.states, states)
    assert not same_bits(first.views.windows, windows)


def test_verify_writes_no_checkpoint() -> None:
    case = Case([4, 8], torch.float32)
    states, windows = case.views.states.clone(), case.views.windows.clone()
    outs = case.verify()
    assert all(out.isfinite().all() for out in outs)
    assert same_bits(case.views.states, states)
    assert same_bits(case.views.windows, windows)


def test_bytes_at_true_shapes() -> None:
    """Per head and layer, 8 positions of K3: a state is 64 KB, a position of a replay 1.8 KB."""
    layout = Layout(
        kda_layers=69, heads=96, head_dim=128, conv_width=4, mla_layers=24, page_size=64, width=576,
        dtype=torch.bfloat16,
    )  # fmt: skip
    found = WindowBytes.of(layout, 8)
    heads = layout.kda_layers * layout.heads
    assert found.snapshots == heads * 8 * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    assert found.snapshots > heads * 512 * 1024
    assert found.replay == heads * 8 * (2 * 3 * 128 + 2 * 2 * 128 + 4 * 128 + 4)
    assert found.replay < heads * 16 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_buffer(dtype: torch.dtype) -> None:
    layout = layout_of(dtype)
    buffer = ReplayBuffer.for_layout(layout, 8, CPU)
    parts = (buffer.raw_TLD, buffer.k_TLNK, buffer.v_TLNV, buffer.g_TLNK, buffer.beta_TLN)
    assert WindowBytes.of(layout, 8).replay == sum(p.nbytes for p in parts)


def test_what_does_not_fit_is_refused() -> None:
    case = Case([4, 2], torch.bfloat16)
    case.verify()
    with pytest.raises(EngineError, match="can't keep 3 of 2"):
        case.fold([1, 3])
    case.slots = [1, 1]
    with pytest.raises(EngineError, match="2 requests need as many slots"):
        case.fold([1, 1])
    k = torch.zeros(12, 4, 16)
    with pytest.raises(EngineError, match="a verify of 12 positions, room for 11"):
        case.buffer.record(0, torch.zeros(12, 192), k, k, k, k[..., 0])
    with pytest.raises(EngineError, match=r"got torch\.float32, the buffer holds torch\.bfloat16"):
        case.buffer.record(0, torch.zeros(2, 192), k[:2], k[:2], k[:2], k[:2, :, 0])
