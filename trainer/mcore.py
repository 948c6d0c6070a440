"""All that the trainer takes from megatron-core, in one place: the CPU shim goes in first, import noise stays out."""

from __future__ import annotations

import logging
import warnings

from miles_k3.trainer import cpu_shim

cpu_shim.install()
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron tells at import what is not installed: TransformerEngine, Apex, absl
    import megatron.core.models.backends
    import megatron.core.models.mimo.model.base  # noqa: F401  (so is this)
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        all_to_all,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig
# Megatron's wrapper lays the distributed optimizer's buffers out itself where nobody did it before, and says so.
logging.getLogger("megatron.core.distributed.distributed_data_parallel").setLevel(logging.ERROR)
# In fp32 the masters are views of the parameters, and megatron looks whether they have a gradient.
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", module="megatron")
# Megatron says so again when the first schedule runs; torch's own norm is what we mean to use.
warnings.filterwarnings("ignore", message="Apex is not installed")
cpu_shim.patch_megatron_rng()

__all__ = [
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "MegatronModule",
    "MegatronOptimizer",
    "ModelType",
    "OptimizerConfig",
    "RowParallelLinear",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "all_to_all",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_cuda_rng_tracker",
    "get_forward_backward_func",
    "get_megatron_optimizer",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "set_tensor_model_parallel_attributes",
]
