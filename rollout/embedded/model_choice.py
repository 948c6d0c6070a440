"""Whether the forward runs in plain torch or on Triton kernels, and whether steps are recorded as graphs."""

from __future__ import annotations

from miles_k3.errors import EngineError
from miles_k3.k3.weights import ResidentBase
from miles_k3.rollout.embedded.model import EngineModel


def choose_model(base: ResidentBase, kernels: str) -> EngineModel:
    """Raises EngineError where kernels were asked for and can't run."""
    if kernels == "plain" or (kernels == "auto" and base.device.type != "cuda"):
        return EngineModel(base)
    try:
        from miles_k3.k3.kernels.launch import INTERPRETED
        from miles_k3.rollout.embedded.fused.model import FusedModel, misfit  # Triton is not everywhere
    except ImportError as error:
        if kernels == "auto":
            return EngineModel(base)
        raise EngineError(f"rollout.kernels: fused needs Triton ({error}); install it, or choose plain") from error
    why = misfit(base.config)
    if base.device.type != "cuda" and not INTERPRETED:
        why = f"it is on {base.device}, and Triton's kernels run on CUDA"
    if why is None:
        return FusedModel(base)
    if kernels == "auto":
        return EngineModel(base)
    raise EngineError(f"rollout.kernels: fused can't run this model: {why}; choose auto or plain")


def records_steps(model: EngineModel, wanted: bool | None) -> bool:
    """Whether steps without prompts are recorded. Raises EngineError where that was asked for and can't be."""
    why = None if model.on_kernels and model.weights.head.is_cuda else "it needs CUDA and rollout.kernels: fused"
    if why is None:
        why = model.unrecordable
    if wanted and why is not None:
        raise EngineError(f"rollout.cuda_graphs can't be had: {why}; leave it null, or set it to false")
    return why is None if wanted is None else wanted
