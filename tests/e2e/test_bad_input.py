"""Bad input through the command line: one clear sentence (what came, what was expected, what to do), exit code 2, no
traceback, nothing lost. In this process, and refused before anything is trained, so that each case takes little."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.odd_grader import OddGrader
from helpers.ordinary_rights import ordinary_rights
from safetensors import safe_open
from safetensors.torch import save_file

from miles_k3 import cli
from miles_k3.k3.config import K3Config
from miles_k3.trainer.megatron import MegatronTrainer

TINY = Path(__file__).parents[2] / "assets" / "tiny-k3"
QUESTIONS = [{"prompt": f"{i} + {i} =", "answer": 2 * i} for i in range(1, 9)]
SMALL = (
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_running=16", "run.steps=1", "eval.prompts=0",
    "task.params={}", "task.scorer=exact", "run.threads=1",
)  # fmt: skip


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """`miles-k3 COMMAND ...` in this process; anything but a clean end is a traceback and fails the test."""

    def call(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["miles-k3", *arguments])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, errors=[x for x in err.splitlines() if x.startswith("err")])

    return call


@pytest.fixture
def train(run_cli: Callable[..., SimpleNamespace], tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """`miles-k3 train tiny-cpu`, small, on a file of eight questions."""
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))

    def call(*overrides: str, resume: bool = False) -> SimpleNamespace:
        sets = (*SMALL, f"task.name=jsonl:{tmp_path}/q.jsonl", f"run.folder={tmp_path}/runs", *overrides)
        flags = ["--resume"] if resume else []
        return run_cli("train", "tiny-cpu", *(x for s in sets for x in ("--set", s)), *flags)

    return call


def refused(done: SimpleNamespace, *parts: str) -> None:
    assert done.code == 2, done.err
    assert len(done.errors) == 1, done.err
    for part in parts:
        assert part in done.errors[0]
    assert "Traceback" not in done.err


# --- recipes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.groupsize=4", ("rollout.groupsize: unknown key; did you mean rollout.group_size?",)),
        ("colour=red", ("colour: unknown key; ",)),
        ("lora.rank=abc", ("lora.rank: text 'abc' given", "(--set)")),
        ("trainer.lr=1e-5", ("text '1e-5' given", "write 1.0e-5")),
        ("trainer.lr=1.0e+300", ("expected 100 or less", "Adam's peak learning rate")),
        ("trainer.lr=.nan", (".nan given, expected a finite number",)),
        ("rollout.group_size=4.0", ("4.0 given, expected a whole number; write 4",)),
        ("rollout.sampling.stop=end", ("text 'end' given, expected a list",)),
        ("rollout.group_size=1", ("compares samples of a group", "set rollout.group_size: 2 or more")),
        ("rollout.sampling.temperature=0", ("expected a number above 0",)),
        ("rollout.sampling.temperature=-1.0", ("expected a number above 0",)),
        ("rollout.max_lora_rank=4", ("lora.rank is 8", "slots hold rank 4", "set rollout.max_lora_rank: 8")),
        ("rollout.num_pages=2", ("hold 32 tokens", "set rollout.num_pages: 9 or more")),
        ("trainer.micro_batch_tokens=8", ("may have 140 tokens", "set trainer.micro_batch_tokens: 140 or more")),
        ("trainer.updates_per_rollout=3", ("is not a multiple of", "choose numbers that divide")),
        ("run.seed=99999999999999999999", ("run.seed: 99999999999999999999 given", "expected a number below")),
        ("run.threads=100000", ("run.threads: 100000 given, expected 1024 or less",)),
        ("lora.alpha=1.0e+308", ("lora.alpha: 1.0e+308 given, expected 1e+06 or less",)),
        ("trainer.adam_eps=1.0e-300", ("expected 1e-30 or more",)),
        ("task.reward_timeout_s=1.0e+300", ("expected 86400 or less",)),
        ("rollout.sampling.top_k=99999999999999999999", ("expected a number below",)),
        ("run.name=../up", ("expected one folder name",)),
    ],
)
def test_recipe(train: Callable[..., SimpleNamespace], tmp_path: Path, override: str, parts: tuple[str, ...]) -> None:
    refused(train(override), *parts)
    assert not (tmp_path / "runs").exists(), "a refused recipe leaves no folder behind"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.parallel.tp=2", ("= 2 ranks, but there are 1; start with torchrun --nproc-per-node 2",)),
        ("trainer.kda_kernel=fla", ("runs on CUDA, but this rank computes on the CPU",)),
        ("rollout.page_size=100000000000", ("don't fit into memory", "lower one")),
        ("rollout.num_pages=100000000000", ("don't fit into memory", "lower one")),
        ("rollout.max_lora_rank=100000000000", ("rollout.max_lora_rank 100000000000 don't fit into memory",)),
        ("task.max_prompt_tokens=100000", ("is 100012; the model takes", "lower one of them")),
        ("lora.init_from=/nowhere", ("/nowhere/adapter_config.json does not exist", "expected a PEFT folder")),
    ],
)
def test_what_this_machine_or_model_can_not_do(
    train: Callable[..., SimpleNamespace], override: str, parts: tuple[str, ...]
) -> None:
    refused(train(override, "trainer.micro_batch_tokens=200000"), *parts)


def test_a_scorer_that_the_task_has_no_use_for(run_cli: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    sets = ("task.scorer=exact", f"run.folder={tmp_path}")
    done = run_cli("train", "tiny-cpu", *(x for s in sets for x in ("--set", s)))
    refused(done, "task.scorer is 'exact'", "has a scorer of its own", "set task.scorer: auto")


@pytest.mark.parametrize(("recipe", "override"), [("tiny-cpu", "rollout.engine=sglang"), ("k3-64xgb300", "run.seed=1")])
def test_a_recipe_of_another_engine_is_not_served_by_the_embedded_one(
    run_cli: Callable[..., SimpleNamespace], recipe: str, override: str
) -> None:
    done = run_cli("serve", "--recipe", recipe, "--set", override, "--port", "0")
    refused(done, "rollout.engine is sglang, but miles-k3 serve runs the embedded engine", "rollout.engine=embedded")


def test_commands_of_sglang_for_a_recipe_without_it(run_cli: Callable[..., SimpleNamespace]) -> None:
    refused(run_cli("sglang-commands", "tiny-cpu"), "rollout.engine is embedded, so the recipe starts no SGLang")


# --- checkpoints ------------------------------------------------------------------------------------------------------
def rewrite(model: Path, match: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first tensor whose name holds `match`."""
    with safe_open(TINY / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
        metadata = file.metadata()
    name = next(name for name in sorted(tensors) if match in name)
    tensors[name] = change(tensors[name].clone()).contiguous()
    save_file(tensors, model / "model.safetensors", metadata=metadata)


def halve(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def with_last_one(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[-1] = 1.0
    return tensor


@pytest.mark.parametrize(
    ("harm", "parts"),
    [
        (lambda m: (m / "model.safetensors").unlink(), ("shard is missing; copy it",)),
        (lambda m: halve(m / "model.safetensors"), ("the file is truncated", "copy the file again")),
        (lambda m: (m / "model.safetensors").write_bytes(b""), ("0 bytes, too short", "copy the file again")),
        (lambda m: rewrite(m, "o_proj", lambda t: t[:-1]), ("o_proj.weight has shape [95, 64], expected [96, 64]",)),
        (lambda m: rewrite(m, "o_proj", torch.Tensor.double), ("o_proj.weight is F64, expected BF16",)),
        (lambda m: rewrite(m, "A_log", with_last_one), ("A_log: entries from 4 on must be zero padding but are not",)),
        (lambda m: rewrite(m, "o_proj", lambda t: t * torch.nan), ("of the trainer are not finite", "check the model")),
        (lambda m: (m / "config.json").unlink(), ("config.json does not exist; model.path must be",)),
        (lambda m: halve(m / "config.json"), ("config.json:", "not JSON", "copy the file again")),
        (lambda m: halve(m / "tokenizer.json"), ("no tokenizer that transformers can read", "copy tokenizer.json")),
        (lambda m: (m / "tokenizer.json").unlink(), ("no tokenizer that transformers can read", "copy tokenizer.json")),
        (lambda m: (m / "tokenizer.json").write_text("[1]"), ("no tokenizer that transformers can read",)),
        (lambda m: (m / "chat_template.jinja").write_text("{% for %}"), ("the chat template can't be rendered",)),
        (lambda m: (m / "chat_template.jinja").write_text("hello"), ("the chat template makes 'hello' of",)),
    ],
)  # fmt: skip
def test_checkpoint(
    train: Callable[..., SimpleNamespace], tmp_path: Path, harm: Callable[[Path], None], parts: tuple[str, ...]
) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    harm(model)
    refused(train(f"model.path={model}"), *parts)


# --- data -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": \n', ("d.jsonl:2: not JSON", "task.on_bad_prompt: skip")),
        ('{"question": "1 + 1 =", "answer": "2"}\n', ("d.jsonl:1: no 'prompt' among 'question', 'answer'",)),
        ('{"prompt": "1 + 1 =", "answer": NaN}\n', ("d.jsonl:1: 'answer' is NaN",)),
        ('{"prompt": " ", "answer": "2"}\n', ("d.jsonl:1: 'prompt' is \" \", expected text that isn't blank",)),
        ("", ("has no usable row", "expected one JSON object a line")),
        (json.dumps({"prompt": "1 + " * 99, "answer": "2"}), ("d.jsonl:1: the prompt has", "the limit is 128; set")),
    ],
)
def test_data(train: Callable[..., SimpleNamespace], tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "d.jsonl").write_text(text)
    refused(train(f"task.name=jsonl:{tmp_path}/d.jsonl"), *parts)


# --- runs -------------------------------------------------------------------------------------------------------------
def metrics(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "runs/tiny-cpu/metrics.jsonl").read_text().splitlines()]


def test_a_start_that_failed_can_be_mended_and_made_again(
    train: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    refused(train("model.path=/nowhere"), "/nowhere/config.json does not exist")
    assert train().code == 0
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1]
    refused(train(), "already holds a run; go on with it by --resume")
    done = train("trainer.lr=0.5", resume=True)
    assert done.code == 2
    assert done.errors[0].startswith("error: trainer.lr: the run in")
    again = train(resume=True)
    assert again.code == 0
    assert "the run is at step 1 and run.steps is 1" in again.err
    assert len(metrics(tmp_path)) == 2, "nothing lost, nothing twice"


def test_rewards_that_are_no_numbers_or_never_come_cost_their_answers_only(
    train: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles_k3.rollout.tasks import jsonl

    monkeypatch.setattr(jsonl, "_grader", lambda scorer: OddGrader())
    rows = [{"prompt": f"{i} + 1 =", "answer": a} for i, a in enumerate(["none", "nan", "text", "never", "length"])]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = train(
        f"task.name=jsonl:{tmp_path}/odd.jsonl", "rollout.prompts_per_step=5", "rollout.group_size=2",
        "task.reward_timeout_s=0.3",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "failed gradings 8" in done.err
    line = metrics(tmp_path)[1]
    assert {name: n for name, n in line.items() if name.startswith("rollout/failures")} == {
        "rollout/failures": 8, "rollout/failures/not a number": 4, "rollout/failures/not finite": 2,
        "rollout/failures/timeout": 2,
    }  # fmt: skip
    assert line["rollout/samples"] == 10


def test_logits_that_are_never_finite_end_the_run(train: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    """A damaged embedding that only prompts hit: without an answer there is no step, and a silent run is no run."""
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    bos = K3Config.from_folder(TINY).bos_token_id

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[bos] = torch.nan
        return tensor

    rewrite(model, "embed_tokens", spoil)
    done = train(f"model.path={model}")
    assert done.code == 2, done.err
    assert "not finite" in done.errors[-1]


def test_a_temperature_that_overflows_is_refused(train: Callable[..., SimpleNamespace]) -> None:
    refused(train("rollout.sampling.temperature=1.0e-308"), "temperature is 1e-308; expected 0 (greedy) or a finite")


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(
    train: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MegatronTrainer, folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder / "trainer.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr(MegatronTrainer, "save", full)
        refused(train(), "trainer.safetensors: No space left on device; free some space", "--resume")
    assert not list((tmp_path / "runs/tiny-cpu/checkpoints").glob("*")), "no half checkpoint"
    assert train(resume=True).code == 0
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1]


def test_folders_that_may_not_be_written(train: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    """A closed place for runs, then a closed part of a run: nothing half-written, and it goes on once that is open."""
    place, run = tmp_path / "closed", tmp_path / "runs/tiny-cpu"
    place.mkdir(mode=0o555)
    with ordinary_rights():
        refused(train(f"run.folder={place}"), f"{place}/tiny-cpu: Permission denied; change its permissions or choose")
        assert list(place.iterdir()) == []
        constant = ("trainer.lr_decay=constant", "run.save_every=1")
        assert train(*constant).code == 0
        (run / "checkpoints").chmod(0o555)
        refused(train(*constant, "run.steps=2", resume=True), f"{run}/checkpoints/", ": Permission denied; change")
        (run / "checkpoints").chmod(0o755)
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000001"]
        assert train(*constant, "run.steps=2", resume=True).code == 0
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1, 2]
