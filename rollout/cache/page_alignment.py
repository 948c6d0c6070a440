"""One page size for KV and states: what the paged school pays to keep a hybrid model in one pool of equal blocks.

Per layer, an MLA page holds `block_size` tokens of the latent and a KDA page one state: its matrices and its
convolution window. Tensor parallelism splits the heads of a state but replicates the latent, so the block is short at
TP8, and eight times as long where data-parallel attention leaves every rank all heads.

Kimi K3 (96 heads of 128, latent 576, fp32 states, bf16 windows, MLA kernel blocks of 128 tokens, KDA chunks of 64);
bytes are one layer's, "lost" is the share of a page, "of a state" counts the layer slots that no layer fills as well:

    attention        KV     state page   smallest block   block   page bytes   lost    of a state   state, all layers
    TP8              bf16      814,080              707     768      884,736   7.99%       11.82%          63,700,992
    TP8              fp8       814,080            1,414   1,536      884,736   7.99%       11.82%          63,700,992
    DP (one rank)    bf16    6,512,640            5,654   5,760    6,635,520   1.85%        5.94%         477,757,440
    DP (one rank)    fp8     6,512,640           11,307  11,392    6,561,792   0.75%        4.88%         472,449,024

1,536 is what vLLM arrives at for TP8 and fp8 KV (vllm-project/vllm issue 50235, vllm-project/recipes PR 861).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from miles_k3.k3.config import K3Config

MLA_KERNEL_BLOCK = 128  # tokens; decode kernels address the latent in blocks of this many
KDA_CHUNK = 64  # tokens; a prefill kernel has states at these spacings only


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSizes:
    """Bytes on one rank before any alignment; the first two are one layer's."""

    token_bytes: int
    state_bytes: int
    mla_layers: int
    kda_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """The outcome: blocks of `block_size` tokens, pages of `page_bytes` a layer, `group_layers` pages to a block id.

    A block of KV takes one id, a state `state_groups` of them: as many as its layers need, the last not quite full.
    """

    raw: RawSizes
    block_size: int
    page_bytes: int
    group_layers: int
    state_groups: int

    @property
    def padding_share(self) -> float:
        """Share of a state's page that holds nothing."""
        return (self.page_bytes - self.raw.state_bytes) / self.page_bytes

    @property
    def padding_over_state(self) -> float:
        """The same bytes relative to the raw state, as vLLM logs it."""
        return (self.page_bytes - self.raw.state_bytes) / self.raw.state_bytes

    @property
    def kv_bytes(self) -> int:
        """All layers of one block of KV."""
        return self.group_layers * self.page_bytes

    @property
    def state_bytes(self) -> int:
        """All layers of one state as stored, padded pages and empty layer slots included."""
        return self.state_groups * self.group_layers * self.page_bytes

    @property
    def state_lost_share(self) -> float:
        """Share of a stored state that holds nothing."""
        return 1 - self.raw.kda_layers * self.raw.state_bytes / self.state_bytes


def raw_sizes(config: K3Config, *, attention_tp: int, kv_dtype_bytes: int = 2, state_dtype_bytes: int = 4,
              window_dtype_bytes: int = 2) -> RawSizes:  # fmt: skip
    """Step 1. `attention_tp` is how many ranks share a layer's heads: 1 with data-parallel attention."""
    if config.kda_num_heads % attention_tp:
        raise ValueError(f"{config.kda_num_heads} KDA heads can't be split over {attention_tp} ranks")
    heads, dim = config.kda_num_heads // attention_tp, config.kda_head_dim
    matrices = heads * dim * dim * state_dtype_bytes
    window = (config.short_conv_kernel_size - 1) * 3 * heads * dim * window_dtype_bytes  # inputs of q, k and v
    return RawSizes(
        token_bytes=config.latent_cache_dim * kv_dtype_bytes, state_bytes=matrices + window,
        mla_layers=len(config.mla_layers), kda_layers=len(config.kda_layers),
    )  # fmt: skip


def scaled_block(raw: RawSizes, *, unit: int, wanted: int = 1) -> int:
    """Step 2: the smallest multiple of `unit` tokens, at least `wanted`, whose page is no smaller than a state."""
    fits = -(-raw.state_bytes // raw.token_bytes)
    return -(-max(fits, wanted) // unit) * unit


def align(raw: RawSizes, *, kernel_block: int = MLA_KERNEL_BLOCK, kda_chunk: int = KDA_CHUNK,
          wanted: int = 1) -> PageLayout:  # fmt: skip
    """All four steps: raw sizes, the block scaled up, the state page padded to it, one page size for both.

    `wanted` is the block size that was asked for; it is kept when it is large enough and fits kernels and chunks.
    """
    block = scaled_block(raw, unit=lcm(kernel_block, kda_chunk), wanted=wanted)
    page = block * raw.token_bytes  # step 3 pads the state to this; MLA pages can't be padded, kernels stride by them
    group = min(raw.mla_layers, raw.kda_layers)  # step 4: groups of equally many layers, so that any block fits any
    return PageLayout(
        raw=raw, block_size=block, page_bytes=page, group_layers=group, state_groups=-(-raw.kda_layers // group)
    )


def hash_block_size(block_size: int, finest: int = MLA_KERNEL_BLOCK) -> int:
    """The spacing of hashes that divides the block and `finest`, as large as possible."""
    return gcd(block_size, finest)
