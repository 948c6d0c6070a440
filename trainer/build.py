"""Megatron's configuration objects for a K3 model with a frozen base."""

from __future__ import annotations

from typing import Any

import torch

from miles_k3.config import ParallelSection
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import ResidentBase
from miles_k3.trainer import cpu_shim
from miles_k3.trainer.lora import Factory
from miles_k3.trainer.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TransformerConfig,
    finalize_model_grads,
)
from miles_k3.trainer.model.stage import K3Stage


def transformer_config(k3: K3Config, parallel: ParallelSection, dtype: torch.dtype) -> TransformerConfig:
    """What megatron's layers, schedules and gradient reduction need to know of the model."""
    return TransformerConfig(
        num_layers=k3.num_hidden_layers,
        hidden_size=k3.hidden_size,
        num_attention_heads=k3.num_attention_heads,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,  # weights are never initialised: they are the resident base's
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,  # losses come with their denominators: sum them over micro-batches and ranks
        hidden_dropout=0.0,
        attention_dropout=0.0,
        cuda_graph_modules=[],
    )


def build_model(
    k3: K3Config, base: ResidentBase, factory: Factory, parallel: ParallelSection
) -> DistributedDataParallel:
    """The stage of this rank in megatron's data-parallel wrapper; gradients are kept and reduced in fp32."""
    config = transformer_config(k3, parallel, base.dtype)
    config.finalize_model_grads_func = _finalize
    with cpu_shim.on_cpu():
        stage = K3Stage(config, k3, base, factory)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False,
                                            use_distributed_optimizer=False)  # fmt: skip
        return DistributedDataParallel(config, ddp, stage)


def _finalize(model: list[Any], num_tokens: Any, **groups: Any) -> None:
    """Megatron's reductions without its division by tokens: the losses were divided already."""
    finalize_model_grads(model, None, **groups)
