"""The paged school's page for real shapes, with the arithmetic written out, and against numbers that vLLM logged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from k3_cases import PUBLISHED

from miles_k3.k3.config import K3Config
from miles_k3.rollout.cache.page_alignment import RawSizes, align, hash_block_size, raw_sizes, scaled_block


@pytest.fixture(scope="module")
def k3() -> K3Config:
    return K3Config.from_folder(PUBLISHED.parent)


def test_tensor_parallel_attention_step_by_step(k3: K3Config) -> None:
    """TP8, bf16: a rank holds 12 of 96 heads, but the whole latent."""
    raw = raw_sizes(k3, attention_tp=8)
    assert raw.token_bytes == (512 + 64) * 2 == 1_152
    assert raw.state_bytes == 12 * 128 * 128 * 4 + 3 * (3 * 12 * 128) * 2 == 786_432 + 27_648 == 814_080
    assert (raw.mla_layers, raw.kda_layers) == (24, 69)
    assert 706 * 1_152 < 814_080 <= 707 * 1_152  # what fits needs 707 tokens
    layout = align(raw)
    assert layout.block_size == 6 * 128 == 768  # the next multiple of lcm(128, 64)
    assert layout.page_bytes == 768 * 1_152 == 884_736
    assert layout.padding_share == pytest.approx((884_736 - 814_080) / 884_736) == pytest.approx(0.0799, abs=5e-5)
    assert (layout.group_layers, layout.state_groups) == (24, 3)  # 72 layer slots for 69 layers
    assert layout.kv_bytes == 24 * 884_736 == 21_233_664
    assert layout.state_bytes == 3 * 24 * 884_736 == 63_700_992
    assert layout.state_lost_share == pytest.approx(1 - 69 * 814_080 / 63_700_992) == pytest.approx(0.1182, abs=5e-5)


def test_data_parallel_attention_step_by_step(k3: K3Config) -> None:
    """Every rank holds all heads: eight times the state over the same latent."""
    raw = raw_sizes(k3, attention_tp=1)
    assert raw.token_bytes == 1_152
    assert raw.state_bytes == 8 * 814_080 == 6_512_640
    assert 5_653 * 1_152 < 6_512_640 <= 5_654 * 1_152
    layout = align(raw)
    assert layout.block_size == 45 * 128 == 5_760
    assert layout.page_bytes == 5_760 * 1_152 == 6_635_520
    assert layout.padding_share == pytest.approx(122_880 / 6_635_520) == pytest.approx(0.0185, abs=5e-5)
    assert layout.state_bytes == 72 * 6_635_520 == 477_757_440
    assert layout.state_lost_share == pytest.approx(0.0594, abs=5e-5)


def test_table_of_the_module(k3: K3Config) -> None:
    rows = [
        (tp, kv, align(raw_sizes(k3, attention_tp=tp, kv_dtype_bytes=kv)))
        for tp, kv in ((8, 2), (8, 1), (1, 2), (1, 1))
    ]
    assert [
        (scaled_block(x.raw, unit=1), x.block_size, x.page_bytes, f"{x.padding_share:.2%}", f"{x.state_lost_share:.2%}")
        for _, _, x in rows
    ] == [
        (707, 768, 884_736, "7.99%", "11.82%"),
        (1_414, 1_536, 884_736, "7.99%", "11.82%"),
        (5_654, 5_760, 6_635_520, "1.85%", "5.94%"),
        (11_307, 11_392, 6_561_792, "0.75%", "4.88%"),
    ]


def test_whole_states_and_tokens(k3: K3Config) -> None:
    """The 54 MB and 27 KB that a rank is said to need for a state and a token at TP8."""
    raw = raw_sizes(k3, attention_tp=8)
    assert raw.kda_layers * raw.state_bytes == 56_171_520 == pytest.approx(53.6 * 2**20, rel=1e-3)
    assert raw.mla_layers * raw.token_bytes == 27_648 == 27 * 2**10


def test_vllm_arrives_at_the_same(k3: K3Config) -> None:
    """K3 at TP8 and fp8 KV: 1,536 (vllm-project/vllm issue 50235). Kimi Linear, 32 heads at TP2: 960, 1.89% (28228)."""
    assert align(raw_sizes(k3, attention_tp=8, kv_dtype_bytes=1)).block_size == 1_536
    linear = RawSizes(
        token_bytes=576 * 2, state_bytes=16 * 128 * 128 * 4 + 3 * (3 * 16 * 128) * 2, mla_layers=7, kda_layers=20
    )
    layout = align(linear, kernel_block=32, kda_chunk=64)
    assert layout.block_size == 960
    assert f"{layout.padding_over_state:.2%}" == "1.89%"


def test_empty_layer_slots_are_4_35_percent_of_the_layers(k3: K3Config) -> None:
    """What vllm-ascend issue 14314 gives for K3 without a draft."""
    layout = align(raw_sizes(k3, attention_tp=8))
    empty = layout.state_groups * layout.group_layers - layout.raw.kda_layers
    assert f"{empty / layout.raw.kda_layers:.2%}" == "4.35%"


def test_heads_must_divide(k3: K3Config) -> None:
    with pytest.raises(ValueError, match="96 KDA heads can't be split over 7"):
        raw_sizes(k3, attention_tp=7)


SIZES = st.integers(1, 10**6)


@given(token=SIZES, state=SIZES, kernel=st.integers(1, 256), chunk=st.integers(1, 128), wanted=SIZES)
def test_alignment_holds_for_any_sizes(token: int, state: int, kernel: int, chunk: int, wanted: int) -> None:
    raw = RawSizes(token_bytes=token, state_bytes=state, mla_layers=2, kda_layers=5)
    layout = align(raw, kernel_block=kernel, kda_chunk=chunk, wanted=wanted)
    block = layout.block_size
    assert block % kernel == block % chunk == 0
    assert block >= wanted
    assert layout.page_bytes == block * token >= state
    smaller = [
        size for size in range(block - 1, max(block - kernel * chunk, 0), -1) if size % kernel == size % chunk == 0
    ]
    assert not any(size >= wanted and size * token >= state for size in smaller)
    assert 0 <= layout.padding_share < 1
    assert layout.state_groups * layout.group_layers >= 5
    assert 0 <= layout.state_lost_share < 1


@given(block=st.integers(1, 10_000), finest=st.integers(1, 512))
def test_hash_blocks_divide_the_block(block: int, finest: int) -> None:
    unit = hash_block_size(block, finest)
    assert block % unit == finest % unit == 0
