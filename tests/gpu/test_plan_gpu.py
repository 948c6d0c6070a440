"""A training step on one GPU takes what the plan says, within a tenth: weights, factors, caches, activations."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest
import torch
from helpers.planned import fullest_batch
from helpers.tiny import tiny_config
from torch import Tensor

from miles_k3.assemble import Model, make_engine, make_trainer
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import Param, text_params
from miles_k3.k3.weights import ResidentBase, build_base
from miles_k3.plan.phases import rank_facts
from miles_k3.recipe import load_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
TENTH = 0.1
WORK_SPACE = 80e6  # bytes that cuBLAS takes once for a process, at its first product
# A quarter of K3's widths; allocations are in the gigabytes, so that rounding and work spaces stay small beside them.
WIDTHS = {
    "vocab_size": 32768, "hidden_size": 1792, "kda_num_heads": 24, "kda_head_dim": 128, "num_attention_heads": 24,
    "intermediate_size": 8448, "q_lora_rank": 384, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 64, "num_experts_per_token": 16,
    "moe_intermediate_size": 768, "routed_expert_hidden_size": 896, "max_position_embeddings": 8192,
}  # fmt: skip
RECIPE = (
    "model.device=cuda", "model.dtype=bfloat16", "lora.rank=16", "lora.alpha=32.0", "task.max_prompt_tokens=512",
    "rollout.sampling.max_new_tokens=512", "rollout.max_running=64", "trainer.micro_batch_tokens=8192",
)  # fmt: skip


def random_base(config: K3Config, base_dtype: str) -> ResidentBase:
    """Weights drawn on the device: a plausible size is all that matters."""
    generator = torch.Generator("cuda").manual_seed(0)

    def read(p: Param) -> Tensor:
        if p.is_scale:
            return torch.full(p.shape, 118, dtype=torch.uint8, device="cuda")
        if p.name.endswith("weight_packed"):
            return torch.randint(0, 256, p.shape, generator=generator, dtype=torch.uint8, device="cuda")
        x = torch.randn(p.shape, generator=generator, device="cuda")
        if p.name.endswith("A_log"):
            x[config.kda_num_heads :] = 0
        return x * 0.5 if len(p.shape) == 1 or p.module.endswith("conv1d") else x * p.shape[1] ** -0.5

    return build_base(config, text_params(config), read, dtype=torch.bfloat16, device="cuda", base_dtype=base_dtype)


class Held:
    """What a block leaves allocated on the device, and the most that it had."""

    def __enter__(self) -> Held:
        gc.collect()  # what an earlier test's objects held in cycles doesn't count
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.kept = torch.cuda.memory_allocated() - self.before
        self.peak = torch.cuda.max_memory_allocated() - self.before


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("base_dtype", ["bf16", "mxfp4"])
@pytest.mark.parametrize("kernel", ["torch", "fla"])
def test_a_step_takes_what_is_planned(
    kernel: str, base_dtype: str, recompute: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kernel == "fla" and find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    chosen = (f"trainer.kda_kernel={kernel}", f"model.base_dtype={base_dtype}", f"trainer.recompute={recompute}")
    recipe, config = load_recipe("tiny-cpu", [*RECIPE, *chosen]).recipe, tiny_config(**WIDTHS)
    facts = rank_facts(recipe, config, 1, 0, cuda=True, fla=kernel == "fla")
    with Held() as base:
        model = Model(config=config, base=random_base(config, base_dtype), tokenizer=None)
    with Held() as started:
        trainer = make_trainer(recipe, model)
    with Held() as served:
        engine = make_engine(recipe, model)
    with Held() as first:  # compiles, and makes Adam's moments and work spaces
        trainer.step(fullest_batch(recipe, config))
    with Held() as second:
        trainer.step(fullest_batch(recipe, config, seed=1))
    with Held() as exported:
        trainer.export_adapter()
    masters = facts.optimizer // 3
    rows = {
        "base": (facts.base, base.kept),
        "factors, gradients, masters": (facts.adapter + facts.gradients + masters, started.kept),
        "slots, KV, states": (facts.engine.slots + facts.engine.kv + facts.engine.states, served.kept),
        "moments": (facts.optimizer - masters, first.kept),
        "activations": (facts.activations, second.peak),
        "export": (facts.export, exported.peak),
    }
    with capsys.disabled():
        print(f"\n{kernel}, {base_dtype}, recompute {recompute}")
        for name, (planned, found) in rows.items():
            print(
                f"  {name:28} planned {planned / 1e6:9.1f} MB, allocated {found / 1e6:9.1f} MB, {planned / found:.3f}"
            )
    engine.close()
    for name, (planned, found) in rows.items():
        assert planned == pytest.approx(found, rel=TENTH, abs=WORK_SPACE), name
