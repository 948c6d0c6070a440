"""Index maps of packed streams."""

from __future__ import annotations

import pytest
import torch

from miles_k3.k3.ops.packed import Packed


def test_maps_of_a_ragged_stream():
    packed = Packed.from_lengths([3, 1, 2])
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packed.rows_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert packed.cols_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert (packed.num_seqs, packed.max_len, packed.num_tokens) == (3, 3, 6)
    assert packed.lengths_B.tolist() == [3, 1, 2]
    assert packed.last_index_B().tolist() == [2, 3, 5]


@pytest.mark.parametrize("lengths", [(1,), (64, 65, 1, 128), (200, 63)])
def test_pieces_equal_flas(lengths):
    from fla.ops.utils.index import prepare_chunk_indices

    packed = Packed.from_lengths(lengths)
    for size in (32, 64):
        assert torch.equal(packed.pieces(size), prepare_chunk_indices(packed.cu_seqlens, size))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_of_any_integer_type(dtype):
    packed = Packed.from_cu_seqlens(torch.tensor([0, 8, 12, 24], dtype=dtype))
    other = Packed.from_lengths((8, 4, 12))
    assert packed.cu_seqlens.dtype == torch.int64
    for name in ("cu_seqlens", "rows_T", "cols_T"):
        assert torch.equal(getattr(packed, name), getattr(other, name))
    assert packed.max_len == 12


def test_pad_and_unpad_are_inverse_and_pass_gradients():
    packed = Packed.from_lengths((2, 5, 1))
    x = torch.randn(8, 3, requires_grad=True)
    padded = packed.pad(x, value=float("nan"))
    assert padded.shape == (3, 5, 3)
    assert padded.isnan().sum() == 3 * (15 - 8)
    assert torch.equal(padded[1], x[2:7])
    back = packed.unpad(padded)
    assert torch.equal(back, x)
    (grad,) = torch.autograd.grad((back * 2).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 2.0))
