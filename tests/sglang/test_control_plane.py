"""The real SGLang, started by us on a small K3: hooks, adapters through its own API, pauses, and its end.

The forward pass has no kernels on a CPU, so the first generate ends SGLang. That comes last, and is a test too.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.sglang_cpu import CPU_ARGUMENTS, RANK
from helpers.tiny import tiny_adapter

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.transport.loan import Loan
from miles_k3.adapters.update import cut, make_update
from miles_k3.errors import AdapterError, EngineError
from miles_k3.k3.config import K3Config
from miles_k3.plan.engine import BF16, engine_bytes
from miles_k3.plan.weights import Share, base_bytes
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.adapters import peft_config
from miles_k3.rollout.sglang.backend import SglangGoneError
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.rollout.sglang.hooks import hook_names
from miles_k3.rollout.sglang.hooks.report import KEY
from miles_k3.types import AdapterConfig, AdapterUpdate, LentAdapter, SamplingParams

if TYPE_CHECKING:
    from miles_k3.rollout.sglang.running import RunningSglang

ADAPTER = AdapterConfig(rank=4, alpha=8.0)
# The recipe that asks for what tests start SGLang with.
ASKED = [
    "rollout.engine=sglang", f"rollout.max_running={CPU_ARGUMENTS['max_running_requests']}", "rollout.page_size=16",
    f"rollout.num_pages={CPU_ARGUMENTS['max_total_tokens'] // 16}", f"rollout.max_lora_rank={RANK}",
    f"lora.rank={RANK}", f"rollout.sglang.state_slots={CPU_ARGUMENTS['max_mamba_cache_size']}",
    "rollout.sglang.cuda_graphs=false",
]  # fmt: skip


def an_update(config: K3Config, version: int) -> AdapterUpdate:
    return make_update(version, ADAPTER, tiny_adapter(config, ADAPTER, seed=version))


@contextmanager
def lent(config: K3Config, update: AdapterUpdate) -> Iterator[LentAdapter]:
    experts = range(config.num_experts)
    loan = Loan(cut(update, adapter_layout(config, update.config), experts), experts, readers=1, keep=True)
    yield LentAdapter(version=update.version, config=update.config, sha256=update.sha256, shards=(loan.lent,))


@pytest.fixture(scope="module")
def engine(running: RunningSglang, config: K3Config) -> SglangEngine:
    return SglangEngine(
        running, config, tokenizer=None, adapter_config=ADAPTER, max_lora_rank=ADAPTER.rank, max_sequence_tokens=256
    )


def test_the_scheduler_has_every_hook(running: RunningSglang) -> None:
    assert running.state()[KEY] == list(hook_names())
    assert running.state()["enable_lora"] is True


def test_what_lies_in_memory_is_what_the_planner_says(running: RunningSglang, config: K3Config) -> None:
    held: dict[str, int] = running.state()["bytes"]
    found = engine_bytes(load_recipe("tiny-cpu", ASKED).recipe, config, BF16)
    assert held["adapter slots"] == found.slots
    assert held["states"] == found.states
    assert held["kv"] == found.kv
    experts = base_bytes(config, Share.whole(config), itemsize=BF16, packed=True).experts
    assert held["weights"] == pytest.approx(found.base - experts, rel=0.002), "all but the routed experts"


def test_versions_come_and_go_through_sglangs_own_api(engine: SglangEngine, running: RunningSglang,
                                                      config: K3Config) -> None:  # fmt: skip
    for version in range(4):
        engine.load_adapter(an_update(config, version))
        assert engine.adapter_version == version
    loaded = set(running._manager.lora_registry._registry)
    assert loaded == {"policy@2", "policy@3"}, "the current one and the one before"


def test_a_loaded_name_is_refused_and_sglang_lives_on(engine: SglangEngine, running: RunningSglang,
                                                      config: K3Config) -> None:  # fmt: skip
    with (
        lent(config, an_update(config, 3)) as again,
        pytest.raises(AdapterError, match=r"SGLang refused adapter v3 as policy@3: .*already loaded"),
    ):
        running.load("policy@3", again)
    with pytest.raises(EngineError, match="did not give policy@9 up"):
        running.unload("policy@9")
    engine.load_adapter(an_update(config, 4))


def test_a_rank_above_the_slots_is_refused_by_us_and_by_sglang(engine: SglangEngine, running: RunningSglang,
                                                               config: K3Config) -> None:  # fmt: skip
    wide = AdapterConfig(rank=8, alpha=8.0)
    update = make_update(5, wide, tiny_adapter(config, wide))
    with pytest.raises(AdapterError, match="has rank 8, slots hold 4"):
        engine.load_adapter(update)
    with lent(config, update) as wider, pytest.raises(AdapterError, match="SGLang refused adapter v5"):
        running.load("policy@5", wider)
    assert engine.adapter_version == 4


def test_sglang_itself_takes_a_wrong_name_without_a_word(engine: SglangEngine, running: RunningSglang,
                                                         config: K3Config) -> None:  # fmt: skip
    """It would end at the first use. That is why everything is judged before it is loaded."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput

    tensors = dict(an_update(config, 5).tensors)
    name = next(n for n in tensors if "o_proj.lora_A" in n)
    tensors[name.replace("o_proj", "z_proj")] = tensors.pop(name)
    request = LoadLoRAAdapterFromTensorsReqInput(
        lora_name="odd", config_dict=peft_config(ADAPTER),
        serialized_named_tensors=running._engine._serialize_tensors_per_rank(tensors, None),
    )  # fmt: skip
    assert running._ask(running._manager.load_lora_adapter_from_tensors(request, None)).success
    running.unload("odd")
    with pytest.raises(AdapterError, match="lacks 1 of"):
        engine.load_adapter(make_update(5, ADAPTER, tensors))


def test_it_pauses_and_goes_on(engine: SglangEngine) -> None:
    engine.pause()
    engine.unpause()
    engine.pause(retract=True)
    engine.unpause()
    assert engine.stats()["adapter_version"] == 4


def test_its_end_is_told_and_nobody_else_ends(engine: SglangEngine, running: RunningSglang, log: Path) -> None:
    """The request copies its adapter into the pool, shapes and all, and only then finds no kernel."""
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        started = time.monotonic()
        with pytest.raises(SglangGoneError, match="processes"):
            asyncio.run(engine.generate([1, 2, 3], SamplingParams(temperature=0.0, max_new_tokens=2)))
        assert time.monotonic() - started < 100
        said = log.read_text()
        assert "Scheduler hit an exception" in said
        assert "srt/models/kimi_k3.py" in said, "it came as far as the model's own forward"
        assert "lora/mem_pool.py" not in said, said
        with pytest.raises(SglangGoneError):
            engine.stats()
        running.close()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
