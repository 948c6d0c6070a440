"""Megatron's configuration objects for a K3 model with a frozen base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from miles_k3.config import TrainerSection
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import ResidentBase
from miles_k3.parallel import rank_stages
from miles_k3.trainer import cpu_shim
from miles_k3.trainer.lora import Factory
from miles_k3.trainer.lora_rules import Reduction
from miles_k3.trainer.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TransformerConfig,
    finalize_model_grads,
    parallel_state,
)
from miles_k3.trainer.model.recompute import Recompute
from miles_k3.trainer.model.stage import K3Stage


def transformer_config(k3: K3Config, section: TrainerSection, dtype: torch.dtype) -> TransformerConfig:
    """What megatron's layers, schedules and gradient reduction need to know of the model."""
    p = section.parallel
    return TransformerConfig(
        num_layers=k3.num_hidden_layers,
        hidden_size=k3.hidden_size,
        num_attention_heads=k3.num_attention_heads,
        num_moe_experts=k3.num_experts if k3.moe_layers else None,
        moe_ffn_hidden_size=k3.moe_intermediate_size if k3.moe_layers else None,
        moe_token_dispatcher_type="alltoall",  # what variable lengths want; the dispatch itself is our own
        add_bias_linear=False,
        tensor_model_parallel_size=p.tp,
        sequence_parallel=p.tp > 1 and p.sequence_parallel,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=1,
        variable_seq_lengths=True,  # the bank grows from stage to stage, and micro-batches differ in length
        overlap_p2p_comm=p.vpp > 1,  # batched p2p gives silently wrong gradients with virtual stages
        batch_p2p_comm=p.vpp == 1,
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
    k3: K3Config, base: ResidentBase, factory: Factory, section: TrainerSection
) -> list[DistributedDataParallel]:
    """This rank's stages, one for each virtual stage, in megatron's data-parallel wrapper.

    Gradients are kept and reduced in fp32.
    """
    config = transformer_config(k3, section, base.dtype)
    config.finalize_model_grads_func = finalize
    recompute = Recompute.of(section.recompute, section.recompute_sublayers)
    distributed = section.distributed_optimizer and factory.ranks.dp_cp.size > 1  # else there is nothing to split
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False,
                                        use_distributed_optimizer=distributed)  # fmt: skip
    with cpu_shim.on_cpu():
        return [
            DistributedDataParallel(
                config, ddp, K3Stage(config, k3, base, factory, layers, recompute, section.mla_attention)
            )
            for layers in rank_stages(section.parallel, k3.num_hidden_layers, factory.ranks.pp.rank)
        ]


def finalize(model: Sequence[Any], _num_tokens: Any = None, *, force_all_reduce: bool = False, **groups: Any) -> None:
    """What ranks owe each other's gradients: first the tensor-parallel sums and means that `lora_rules` demands, then
    megatron's data-parallel reductions, without its division by tokens: the losses were divided already.

    Megatron's own pass over replicated parameters knows layer norms only, and does nothing here.
    """
    _reduce_over_tp([p for chunk in model for p in chunk.module.parameters() if p.requires_grad])
    finalize_model_grads(list(model), None, force_all_reduce=force_all_reduce, **groups)


def _reduce_over_tp(parameters: Sequence[Any]) -> None:
    """All in one message: they are small."""
    group: Any = parallel_state.get_tensor_model_parallel_group()
    wanted = [p for p in parameters if p.factor_rule.reduction in (Reduction.SUM_TP, Reduction.MEAN_TP)]
    if group.size() == 1 or not wanted:
        return
    flat = torch.cat([p.main_grad.reshape(-1) for p in wanted])
    dist.all_reduce(flat, group=group)
    for parameter, part in zip(wanted, flat.split([p.main_grad.numel() for p in wanted]), strict=True):
        share = group.size() if parameter.factor_rule.reduction is Reduction.MEAN_TP else 1
        torch.div(part.view_as(parameter.main_grad), share, out=parameter.main_grad)
