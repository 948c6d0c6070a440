"""A K3 with every kind of layer and no two equal widths, and adapters for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from miles_k3.adapters.layout import adapter_layout, gate_up_pairs
from miles_k3.adapters.update import make_update
from miles_k3.k3.config import K3Config
from miles_k3.types import AdapterConfig, AdapterUpdate


@pytest.fixture(scope="session")
def config() -> K3Config:
    return K3Config(
        vocab_size=256, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=80,
        first_k_dense_replace=1, rms_norm_eps=1e-5, mla_latent_norm_eps=1e-5, q_lora_rank=20, kv_lora_rank=24,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=14, attn_res_block_size=3, num_experts=5,
        num_experts_per_token=2, num_shared_experts=3, moe_intermediate_size=32, routed_expert_hidden_size=64,
        latent_moe_use_norm=True, moe_renormalize=True, routed_scaling_factor=1.0, situ_beta=4.0, situ_linear_beta=25.0,
        kda_num_heads=2, kda_head_dim=11, short_conv_kernel_size=4, gate_lower_bound=-5.0, mla_layers=(2, 3),
        max_position_embeddings=512, bos_token_id=253, eos_token_id=254, pad_token_id=255,
    )  # fmt: skip


@pytest.fixture(scope="session")
def adapter() -> AdapterConfig:
    return AdapterConfig(rank=4, alpha=6.0)


def random_tensors(
    config: K3Config, adapter: AdapterConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A dense random adapter; gate and up share A where the config says so."""
    generator = torch.Generator().manual_seed(seed)
    layout = adapter_layout(config, adapter)
    tensors = {t.name: torch.randn(t.shape, generator=generator).mul_(0.3).to(dtype) for t in layout.values()}
    if adapter.share_gate_up_a:
        for gate, up in gate_up_pairs(layout):
            tensors[up] = tensors[gate].clone()
    return tensors


MakeTensors = Callable[..., dict[str, torch.Tensor]]
MakeUpdate = Callable[..., AdapterUpdate]


@pytest.fixture
def new_tensors(config: K3Config, adapter: AdapterConfig) -> MakeTensors:
    """new_tensors(seed=0, *, dtype=float32, adapter=adapter, config=config) -> exported names and tensors."""

    def make(
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        adapter: AdapterConfig = adapter,
        config: K3Config = config,
    ) -> dict[str, torch.Tensor]:
        return random_tensors(config, adapter, seed, dtype)

    return make


@pytest.fixture
def new_update(config: K3Config, adapter: AdapterConfig) -> MakeUpdate:
    """new_update(version, *, seed=version, dtype=float32, adapter=adapter) -> AdapterUpdate."""

    def make(
        version: int, *, seed: int | None = None, dtype: torch.dtype = torch.float32, adapter: AdapterConfig = adapter
    ) -> AdapterUpdate:
        seed = version if seed is None else seed
        return make_update(version, adapter, random_tensors(config, adapter, seed, dtype))

    return make
