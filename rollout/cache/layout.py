"""The bytes of a slot and of a page, and views of a buffer of them that the model addresses layer by layer.

A slot is one run of bytes: fp32 states of all KDA layers, then the convolution windows of all. A page is one run too:
token by token, and within a token layer by layer, so a row of the cache stands `kv_layers` rows from the next token's.
Behind the layers a token has what a draft model knows of it, so that whoever shares or copies a page takes that along.
With layers outside of tokens, `kv[layer].flatten(0, 1)` would be a copy, and what a layer writes into it would be lost.

Shapes: L layers of the kind, S slots, P pages, Z page size, N heads, K and V channels, W convolution width, C latent
cache numbers a token, D three times the KDA width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config

ALIGN_BYTES = 16  # of every block: widest load of a CUDA thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of one rank: `heads` are its own KDA heads, `dtype` that of windows and latents."""

    kda_layers: int
    heads: int
    head_dim: int
    conv_width: int
    mla_layers: int
    page_size: int
    width: int
    dtype: torch.dtype
    draft_width: int = 0  # numbers of a draft's keys and values, a token

    @classmethod
    def for_model(
        cls, config: K3Config, *, page_size: int, dtype: torch.dtype, tp: int = 1, draft_width: int = 0
    ) -> Layout:
        """The heads are split over `tp` ranks; the latents are whole on each."""
        return cls(
            kda_layers=len(config.kda_layers), heads=config.kda_num_heads // tp, head_dim=config.kda_head_dim,
            conv_width=config.short_conv_kernel_size, mla_layers=len(config.mla_layers), page_size=page_size,
            width=config.latent_cache_dim, dtype=dtype, draft_width=draft_width,
        )  # fmt: skip

    @property
    def window_offset(self) -> int:
        """Bytes of a slot's states, after which its windows begin."""
        return _aligned(4 * self.kda_layers * self.heads * self.head_dim**2, ALIGN_BYTES)

    @property
    def slot_bytes(self) -> int:
        numbers = self.kda_layers * (self.conv_width - 1) * 3 * self.heads * self.head_dim
        return _aligned(self.window_offset + numbers * self.dtype.itemsize, ALIGN_BYTES)

    @property
    def token_bytes(self) -> int:
        """One token in all MLA layers and the draft, padded so that a page is aligned."""
        unit = ALIGN_BYTES // math.gcd(ALIGN_BYTES, self.page_size)
        return _aligned(self.page_numbers * self.dtype.itemsize, max(unit, self.dtype.itemsize))

    @property
    def page_numbers(self) -> int:
        """Of one token: latents of all layers, then the draft's."""
        return self.mla_layers * self.width + self.draft_width

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Views:
    """One buffer (uint8) as the model sees it. Rows of both kinds overlap in memory: which are whose, the pool knows.

    Slot row i begins at byte i * slot_bytes; page row j ends (num_rows - 1 - j) pages before the buffer's end.
    `slot_words`, `page_words`: whole blocks as int64, one a row, to move and zero them.
    """

    states: Tensor  # fp32 [L, S, N, K, V]
    windows: Tensor  # [L, S, W - 1, D]
    kv: Tensor  # [L, P, Z, C]; flatten(0, 1) of a layer is a view
    draft: Tensor  # [1, P, Z, draft_width], likewise
    slot_words: Tensor  # [S, slot_bytes / 8]
    page_words: Tensor  # [P, page_bytes / 8]

    @classmethod
    def of(cls, layout: Layout, buffer: Tensor) -> Views:
        """`buffer` holds a multiple of ALIGN_BYTES."""
        slots, pages = len(buffer) // layout.slot_bytes, len(buffer) // layout.page_bytes
        first_page = len(buffer) - pages * layout.page_bytes
        size, slot_bytes = layout.dtype.itemsize, layout.slot_bytes
        n, d, taps = layout.heads, layout.head_dim, layout.conv_width - 1
        words, numbers = buffer.view(torch.int64), buffer.view(layout.dtype)
        token = layout.token_bytes // size
        return cls(
            states=buffer.view(torch.float32).as_strided(
                (layout.kda_layers, slots, n, d, d), (n * d * d, slot_bytes // 4, d * d, d, 1)
            ),
            windows=numbers.as_strided(
                (layout.kda_layers, slots, taps, 3 * n * d),
                (taps * 3 * n * d, slot_bytes // size, 3 * n * d, 1),
                layout.window_offset // size,
            ),
            kv=numbers.as_strided(
                (layout.mla_layers, pages, layout.page_size, layout.width),
                (layout.width, layout.page_size * token, token, 1),
                first_page // size,
            ),
            draft=numbers.as_strided(
                (1, pages, layout.page_size, layout.draft_width),
                (token, layout.page_size * token, token, 1),
                first_page // size + layout.mla_layers * layout.width,
            ),
            slot_words=words.as_strided((slots, slot_bytes // 8), (slot_bytes // 8, 1)),
            page_words=words.as_strided((pages, layout.page_bytes // 8), (layout.page_bytes // 8, 1), first_page // 8),
        )


def _aligned(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
