"""The whole loop on the shipped tiny model, in short form."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from helpers.runs import read_results, small_recipe, train_here

from miles_k3.assemble import assembled
from miles_k3.errors import LaunchError, MilesError, SyncError
from miles_k3.k3.config import K3Config
from miles_k3.types import StepStats, TrainBatch


def test_short_demo_trains_evaluates_and_exports(tmp_path: Path) -> None:
    from miles_k3.loop import run_eval

    result = train_here(tmp_path, "run.steps=3", "eval.prompts=32", "run.save_every=2")
    lines = read_results(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert result.steps == 3
    assert result.stopped_by is None
    for line in lines[1:]:
        assert line["train/mismatch_abs"] <= 1e-4  # fp32 on both sides; the two paths differ by rounding only
        assert line["rollout/samples"] == 32
        dropped = sum(v for k, v in line.items() if k.startswith("rollout/dropped/"))
        assert line["rollout/samples_trained"] + dropped == 32
        assert line["sync/version"] == line["step"]
        assert line["rollout/adapter_version_min"] == line["rollout/adapter_version_max"] == line["step"] - 1
    assert sorted(p.name for p in (tmp_path / "tiny-cpu" / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert all(p.stat().st_size > 1000 for p in result.plots)
    assert len(result.plots) == 3
    # The exported adapter is what was evaluated last: the same held-out prompts and draws give the same answers.
    again = run_eval(small_recipe(tmp_path, "eval.prompts=32"), result.adapter)
    assert again == result.after


def test_learning_moves_the_policy_and_lr_zero_does_not(tmp_path: Path) -> None:
    """20 steps at lr 0: the mismatch between trainer and engine stays flat and the canary never moves."""
    train_here(tmp_path, "run.steps=20", "trainer.lr=0.0", "rollout.prompts_per_step=4", "run.save_every=0")
    lines = read_results(tmp_path)[1:]
    mismatch = torch.tensor([line["train/mismatch_abs"] for line in lines if "train/mismatch_abs" in line])
    assert len(mismatch) >= 15
    assert mismatch.max() <= 1e-5
    assert mismatch[-5:].mean() <= 2 * mismatch[:5].mean() + 1e-7
    assert all(line["sync/canary_moved"] == 0.0 for line in lines)


def test_bf16_mismatch_stays_small(tmp_path: Path) -> None:
    train_here(tmp_path, "run.steps=2", "model.dtype=bfloat16")
    # bf16 keeps 8 bits; trainer and engine round at different places of the same formulas.
    assert all(line["train/mismatch_abs"] <= 2e-2 for line in read_results(tmp_path)[1:])


def test_trainer_and_engine_read_the_same_base_tensors(tmp_path: Path) -> None:
    """One resident base: every parameter of the trainer that is frozen, and the engine's weights, are its storages."""
    with assembled(small_recipe(tmp_path), training=True) as parts:
        base = parts.model.base
        assert base is not None
        held = {t.untyped_storage().data_ptr() for t in base.tensors.values()}
        for bank in base.experts.values():
            held |= {t.untyped_storage().data_ptr() for t in (bank.w13, bank.w2) if t is not None}
        model = parts.trainer.model  # type: ignore[union-attr]
        frozen = [t for t in (*model.parameters(), *model.buffers()) if not t.requires_grad]
        large = [t for t in frozen if t.numel() > 64]
        assert large
        foreign = [tuple(t.shape) for t in large if t.untyped_storage().data_ptr() not in held]
        assert not foreign, f"copies of base weights in the trainer: {foreign}"


def test_engine_that_drops_the_adapter_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that loses the payload but reports the version is caught by the canary, not by luck."""
    from miles_k3.adapters.store import AdapterSlot, AdapterStore

    def fill_nothing(self: AdapterSlot, update: object, layout: object) -> None:
        return None

    original = AdapterSlot.fill
    monkeypatch.setattr(AdapterSlot, "fill", lambda self, update, layout: (
        original if update.version == 0 else fill_nothing)(self, update, layout))  # fmt: skip
    assert AdapterStore is not None
    with pytest.raises(SyncError, match=r"adapter v1: trainer and engine differ"):
        train_here(tmp_path, "run.steps=3")
    assert [line["step"] for line in read_results(tmp_path)] == [0]  # nothing was sampled from the stale adapter


def test_a_failing_step_costs_no_checkpoint_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that ends waits for it, however slow its writing is."""
    from miles_k3.trainer.checkpoint import Writing
    from miles_k3.trainer.megatron import MegatronTrainer

    original = MegatronTrainer.step

    def fail_second(self: MegatronTrainer, batch: TrainBatch) -> StepStats:
        if self.version == 1:
            failed.set()
            raise MilesError("the gradient norm is nan")
        return original(self, batch)

    monkeypatch.setattr(MegatronTrainer, "step", fail_second)
    wait, failed = Writing.wait, threading.Event()
    monkeypatch.setattr(Writing, "wait", lambda self: (failed.wait(30), wait(self))[1])
    with pytest.raises(MilesError, match="nan"):
        train_here(tmp_path, "run.steps=3", "run.save_every=1", "rollout.prompts_per_step=2")
    assert [p.name for p in (tmp_path / "tiny-cpu" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_run_without_a_step_left_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its learning rate has decayed to the end, so a larger run.steps would be refused."""
    few = ("run.steps=1", "rollout.prompts_per_step=2", "run.save_every=0")
    train_here(tmp_path, *few)
    train_here(tmp_path, *few, resume=True)
    assert "no step is left; go on in a new run" in " ".join("".join(capsys.readouterr()).split())


def test_a_resume_that_is_refused_leaves_the_runs_recipe(tmp_path: Path) -> None:
    train_here(tmp_path, "run.steps=0")
    stored = tmp_path / "tiny-cpu" / "recipe.yaml"
    before = stored.read_text()
    with pytest.raises(LaunchError, match="there are 1; start with torchrun --nproc-per-node 3"):
        train_here(tmp_path, "run.steps=0", "trainer.parallel.pp=3", resume=True)
    assert stored.read_text() == before, "it can be resumed as before"


def test_shipped_model_is_small_and_complete() -> None:
    from transformers import AutoTokenizer

    folder = Path(__file__).parents[2] / "assets" / "tiny-k3"
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 8_000_000
    config = K3Config.from_folder(folder)
    assert config.mla_layers[-2:] == (config.num_hidden_layers - 2, config.num_hidden_layers - 1)
    assert -(-config.num_hidden_layers // config.attn_res_block_size) >= 3
    assert config.num_hidden_layers % config.attn_res_block_size
    widths = [
        config.vocab_size, config.hidden_size, config.intermediate_size, config.q_lora_rank, config.kv_lora_rank,
        config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.routed_expert_hidden_size,
    ]  # fmt: skip
    assert len(set(widths)) == len(widths)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "größe 12 + 34 =\n\t漢字"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7 - 12 ="}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids[0] == config.bos_token_id
    assert tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.decode(ids) == "<|bos|><|user|>7 - 12 =<|end_of_msg|><|assistant|>"


def test_metrics_account_for_each_second(tmp_path: Path) -> None:
    train_here(tmp_path, "run.steps=1")
    for line in (tmp_path / "tiny-cpu" / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        phases = sum(
            v
            for k, v in values.items()
            if k.startswith("time/") and k.endswith("_s") and k not in ("time/step_s", "time/tokens_per_s")
        )
        assert phases == pytest.approx(values["time/step_s"], abs=1e-6)
