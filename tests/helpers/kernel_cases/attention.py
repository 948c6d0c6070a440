"""Attention over pages, its norms and gates, attention residuals."""

from __future__ import annotations

import itertools

import torch
from helpers.kernel_cases.common import Draw, case, near

from miles_k3.k3.kernels.attn_res_norm import Write, attn_res_norm
from miles_k3.k3.kernels.block_attention import block_attention
from miles_k3.k3.kernels.mla_decode import mla_decode
from miles_k3.k3.kernels.row_norms import gated_heads, mla_norms_, rms_norm_rows
from miles_k3.k3.ops import decode
from miles_k3.k3.ops.norm import rms_norm
from miles_k3.k3.ops.residual_bank import ResidualBank
from miles_k3.rollout.speculative.draft import DraftContext


@case
def attention_residuals(device: torch.device, dtype: torch.dtype) -> None:
    """A walk of writes as a model makes them, on a width that is no power of two."""
    tokens, hidden, most = 5, 96, 5
    draw = Draw(device, dtype, 0)
    embedding, weight = draw.normal(tokens, hidden), draw.normal(hidden)
    rows = torch.full((most, tokens, hidden), float("nan"), device=device, dtype=dtype)
    rows[0] = embedding
    bank, banked = ResidualBank(embedding, most), 0
    taps = torch.full((tokens, 3 * hidden), 7.0, device=device, dtype=dtype)
    for write in (Write.NOTHING, Write.BANK, Write.ADD, Write.BANK, Write.ADD, Write.ADD, Write.BANK, Write.NOTHING):
        query = 0.2 * draw.normal(hidden, dtype=torch.float32)
        output = None if write is Write.NOTHING else draw.normal(tokens, hidden)
        if output is not None:
            (bank.bank if write is Write.BANK else bank.add)(output)
        tap = taps[:, hidden : 2 * hidden]
        x, banked = attn_res_norm(rows, banked, query, weight, 1e-5, output, write, tap)
        near(x, rms_norm(bank.mix(query), weight, 1e-5), dtype)
        near(tap, bank.mix(query), dtype)
        assert (taps.unflatten(1, (3, hidden))[:, ::2] == 7.0).all()
        assert banked == bank.num_banked
        assert torch.equal(rows[: banked + 1], bank.rows_NTH[: banked + 1])


@case
def mla_decode_pages(device: torch.device, dtype: torch.dtype) -> None:
    """Ragged contexts, one token, padding; pages in any order with NaN behind each sequence's end and in free pages."""
    heads, nope, extra, latent, values, page, pages = 5, 16, 8, 32, 12, 8, 40
    for seed, (lengths, splits) in enumerate(itertools.product(([1, 70, 0, 33], [8]), (None, 1, 3))):
        draw = Draw(device, dtype, seed)
        pool = torch.full((pages, page, 2 * (latent + extra) + 8), float("nan"), device=device, dtype=dtype)
        cache = pool[:, :, latent + extra : 2 * (latent + extra)]  # the second layer's rows of each token
        table = torch.randperm(pages, generator=draw.generator)[: len(lengths) * -(-max(lengths) // page)]
        table = table.view(len(lengths), -1).to(device, torch.int32)
        gathered = torch.zeros(len(lengths), table.shape[1] * page, latent + extra, device=device, dtype=dtype)
        for b, length in enumerate(lengths):
            gathered[b, :length] = draw.normal(length, latent + extra)
            rows = cache[table[b].long()].flatten(0, 1)
            rows[:length] = gathered[b, :length]
            cache[table[b].long()] = rows.unflatten(0, (-1, page))
        q = draw.normal(len(lengths), heads, nope + extra)
        w_k, w_v = draw.normal(heads, nope, latent) / 4, draw.normal(heads, values, latent) / 4
        length = torch.tensor(lengths, dtype=torch.int32, device=device)
        out = mla_decode(q, cache, table, length, w_k, w_v, num_splits=splits)
        hidden = torch.arange(gathered.shape[1], device=device)[None, None] >= length[:, None, None]
        bias = torch.zeros(hidden.shape, device=device).masked_fill(hidden, -torch.inf)
        live = [b for b, n in enumerate(lengths) if n]
        expected = decode.mla_step(*(x.float() for x in (q, gathered, bias, w_k, w_v)))
        near(out[live], expected[live], dtype)
        assert not out[[b for b, n in enumerate(lengths) if not n]].any()


@case
def draft_block_attention(device: torch.device, dtype: torch.dtype) -> None:
    """Ragged contexts, none at all, queries that share heads; pages in any order, NaN behind each end and elsewhere."""
    for seed, (size, heads, kv_heads, width) in enumerate([(3, 6, 2, 20), (7, 8, 2, 64), (1, 4, 4, 16)]):
        draw, page, lengths = Draw(device, dtype, seed), 8, [1, 70, 0, 33]
        layers, numbers = 2, 2 * kv_heads * width
        pool = torch.full((40, page, 5 + layers * numbers), float("nan"), device=device, dtype=dtype)
        cache = pool[:, :, 5:]
        table = torch.randperm(40, generator=draw.generator)[:36].view(4, -1).to(device, torch.int32)
        gathered = torch.zeros(4, 72, layers * numbers, device=device, dtype=dtype)
        for b, length in enumerate(lengths):
            gathered[b, :length] = draw.normal(length, layers * numbers)
            rows = cache[table[b].long()].flatten(0, 1)
            rows[:length] = gathered[b, :length]
            cache[table[b].long()] = rows.unflatten(0, (-1, page))
        q, (k, v) = draw.normal(4, size, heads, width), (draw.normal(4, size, kv_heads, width) for _ in range(2))
        keys, values = gathered.float().unflatten(-1, (layers, 2, kv_heads, width))[:, :, 1].unbind(2)
        plain = DraftContext(keys=(keys,), values=(values,))
        length = torch.tensor(lengths, device=device)
        expected = plain.attention(length.unsqueeze(1), size)(0, q.float(), k.float(), v.float())
        near(block_attention(q, k, v, cache, table, length, numbers), expected, dtype)


@case
def norms_and_gates(device: torch.device, dtype: torch.dtype) -> None:
    """Rows of odd widths, gates beside strided heads, with and without each head's norm."""
    draw = Draw(device, dtype, 0)
    for rows, width in ((1, 40), (7, 100)):
        x, weight = draw.normal(rows, width + 3)[:, :width], draw.normal(width)
        near(rms_norm_rows(x, weight, 1e-5), rms_norm(x, weight, 1e-5), dtype)
    for heads, values in ((3, 24), (40, 16)):
        o, gate = (draw.normal(5, heads, values, dtype=d) for d in (torch.float32, dtype))
        norm = draw.normal(values)
        gated = gate.float().sigmoid().flatten(1)
        near(gated_heads(o, gate.flatten(1)), o.flatten(1) * gated, dtype)
        expected = rms_norm(o, norm.float(), 1e-5).flatten(1) * gated
        near(gated_heads(o.transpose(0, 1).contiguous().transpose(0, 1), gate.flatten(1), norm, 1e-5), expected, dtype)


@case
def mla_norms(device: torch.device, dtype: torch.dtype) -> None:
    """Both norms in place, the rows in the cache, padding and everybody else's rows untouched."""
    low, latent, extra, page, pages = 40, 32, 8, 4, 6
    for seed, write in enumerate(([5, -1, 22, 0], None)):
        draw = Draw(device, dtype, seed)
        q, row = draw.normal(4, low), draw.normal(4, latent + extra + 2)[:, : latent + extra]
        q_norm, kv_norm = draw.normal(low), draw.normal(latent)
        expected_q = rms_norm(q, q_norm, 1e-6)
        expected = torch.cat([rms_norm(row[:, :latent], kv_norm, 1e-6), row[:, latent:]], dim=1)
        width = latent + extra
        pool = draw.normal(pages, page, 2 * width + 3)
        cache, before = pool[:, :, width : 2 * width], pool.clone()  # the second layer's rows of each token
        twin = cache.clone()
        if write is None:
            mla_norms_(q, q_norm, row, kv_norm, 1e-6)
        else:
            mla_norms_(q, q_norm, row, kv_norm, 1e-6, cache, torch.tensor(write, device=device))
            live = [i for i, w in enumerate(write) if w >= 0]
            twin.view(-1, latent + extra)[[write[i] for i in live]] = row[live]
        near(q, expected_q, dtype)
        near(row, expected, dtype)
        assert torch.equal(cache, twin)
        assert torch.equal(pool[:, :, :width], before[:, :, :width])
        assert torch.equal(pool[:, :, 2 * width :], before[:, :, 2 * width :])
