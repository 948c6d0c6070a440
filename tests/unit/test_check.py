"""The dry run: a good recipe passes, and each thing that can be wrong is found and named."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from miles_k3 import check
from miles_k3.check import check_recipe
from miles_k3.config import Recipe
from miles_k3.errors import LaunchError
from miles_k3.findings import Finding, Level, print_findings
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import iter_params
from miles_k3.k3.safetensors_io import TORCH_DTYPE, write_checkpoint
from miles_k3.launch import refuse_launch
from miles_k3.plan import planner
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.span import span_problems
from miles_k3.rollout.tasks import rewards
from miles_k3.types import Grade
from miles_k3.world import ALONE, World

ASSETS = Path(__file__).parents[2] / "assets"
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def tiny_config() -> K3Config:
    return K3Config(
        vocab_size=160, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=96,
        first_k_dense_replace=1, rms_norm_eps=1e-5, mla_latent_norm_eps=1e-5, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, attn_res_block_size=3, num_experts=4,
        num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=32, routed_expert_hidden_size=32,
        latent_moe_use_norm=True, moe_renormalize=True, routed_scaling_factor=1.0, situ_beta=4.0,
        situ_linear_beta=25.0, kda_num_heads=2, kda_head_dim=16, short_conv_kernel_size=4, gate_lower_bound=-5.0,
        mla_layers=(3,), max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def write_model(folder: Path) -> None:
    config = tiny_config()
    symbols = [chr(code) for code in range(32, 127)]
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(["<unk>", *symbols])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    write_checkpoint(
        folder,
        list(iter_params(config)),
        lambda param: torch.zeros(param.shape, dtype=TORCH_DTYPE[param.dtype]),
        extra_files={
            "config.json": json.dumps(config.to_json()),
            "tokenizer.json": tokenizer.to_str(),
            "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
            "chat_template.jinja": TEMPLATE,
        },
    )


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    write_model(folder)
    return folder


@pytest.fixture
def model(good_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(good_model, tmp_path / "model"))


def recipe_for(model: Path, *overrides: str) -> Recipe:
    data = model.parent / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i} + {i} =", "answer": str(2 * i)}) + "\n" for i in range(40)))
    return load_recipe(
        "tiny-cpu",
        [f"model.path={model}", f"task.name=jsonl:{data}", "task.params={eval_fraction: 0.5}", "task.scorer=exact",
         "eval.prompts=4", f"run.folder={model.parent}/runs", *overrides],
    ).recipe  # fmt: skip


class InstantGrades(contextlib.nullcontext):
    """Stands for the grading processes where a test isn't about them."""

    def __init__(self, right: float, empty: float) -> None:
        super().__init__(self)
        self.right, self.empty = right, empty

    async def grade(self, _prompt: object, text: str) -> Grade:
        return Grade(reward=self.right if text else self.empty)


@pytest.fixture
def instant_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "RewardPool", lambda *_: InstantGrades(1.0, 0.0))


def failures(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if not finding.ok]


def test_a_good_recipe_passes_and_every_question_was_asked(model: Path) -> None:
    findings = check_recipe(recipe_for(model))
    assert failures(findings) == []
    assert [finding.name for finding in findings] == [
        "sizes", "model", "length", "weights", "layout", "tokenizer", "template", "task", "eval", "reward", "disk",
        "memory",
    ]  # fmt: skip
    told = {finding.name: finding.text for finding in findings}
    assert "3 KDA and 1 MLA layers, 4 experts" in told["model"]
    assert "the right answer '" in told["reward"]
    assert "gets 1, an empty one 0" in told["reward"]
    assert "dp 1 on 1 ranks" in told["layout"]
    assert told["layout"].endswith("start with miles-k3 train RECIPE")
    assert not (model.parent / "runs").exists(), "a dry run leaves nothing behind"


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_text(key: str, value: object) -> Callable[[Path], None]:
    return lambda m: edit_json(m / "config.json", lambda c: c["text_config"].__setitem__(key, value))


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("harm", "name", "said"),
    [
        (lambda m: (m / "config.json").unlink(), "model", "does not exist; model.path must be a Hugging Face folder"),
        (lambda m: (m / "config.json").write_text("{"), "model", "not JSON"),
        (set_text("hidden_size", None), "model", "hidden_size is missing"),
        (set_text("hidden_size", 128), "weights", "more tensors"),
        (set_text("max_position_embeddings", 100), "length", "the model takes 100; lower task.max_prompt_tokens"),
        (set_text("vocab_size", 64), "tokenizer", "96 tokens, the model has 64 rows"),
        (lambda m: (m / "model.safetensors").unlink(), "weights", "shard is missing"),
        (lambda m: truncate(m / "model.safetensors"), "weights", "the file is truncated"),
        (lambda m: (m / "model.safetensors").write_bytes(b"x"), "weights", "copy the file again"),
        (lambda m: (m / "tokenizer.json").unlink(), "tokenizer", "tokenizer.json does not exist"),
        (lambda m: (m / "tokenizer.json").write_text("{}"), "tokenizer", "transformers can't load the tokenizer"),
        (lambda m: (m / "chat_template.jinja").unlink(), "template", "has no chat template"),
        (lambda m: (m / "chat_template.jinja").write_text("{{ nope( }}"), "template", "can't be rendered"),
        (lambda m: (m / "chat_template.jinja").write_text("silence"), "template", "a question becomes 'silence'"),
    ],
)
@pytest.mark.usefixtures("instant_grades")
def test_a_broken_model_folder_is_found(model: Path, harm: Callable[[Path], None], name: str, said: str) -> None:
    recipe = recipe_for(model)
    harm(model)
    found = failures(check_recipe(recipe))
    assert any(finding.name == name and said in finding.text for finding in found), found


@pytest.mark.parametrize(
    ("override", "name", "said"),
    [
        ("rollout.sampling.max_new_tokens=500", "length", "up to 628 tokens, the model takes 512"),
        ("task.name=jsonl:/nope.jsonl", "task", "/nope.jsonl"),
        ("task.name=gsm8k", "task", "expected one of reasoning_gym:<dataset>, jsonl:<path>"),
        ("task.params={promt: q}", "task", "promt"),
        ("eval.prompts=1000", "eval", "eval.prompts is 1000"),
        ("task.max_prompt_tokens=5", "task", "the limit is 5"),
        ("trainer.parallel.ep=3", "layout", "the model's 4 experts can't be split over trainer.parallel.ep 3"),
        ("trainer.parallel.tp=4", "layout", "KDA heads 2 can't be split over trainer.parallel.tp 4"),
        ("trainer.mla_attention=transformer_engine", "kernels", "runs on CUDA, but this rank computes on the CPU"),
        ("run.keep_checkpoints=1000000000", "disk", "lower run.keep_checkpoints"),
        ("rollout.max_running=100000000", "memory", "`miles-k3 plan` finds what to change"),
    ],
)
@pytest.mark.usefixtures("instant_grades")
def test_a_recipe_that_does_not_fit_is_found(model: Path, override: str, name: str, said: str) -> None:
    found = failures(check_recipe(recipe_for(model, override)))
    assert {finding.name for finding in found} == {name}
    assert any(said in finding.text for finding in found), found


@pytest.mark.usefixtures("instant_grades")
def test_a_layout_says_how_it_is_started(model: Path) -> None:
    layout = ("trainer.parallel.tp=2", "trainer.parallel.ep=4", "model.device=cpu")

    def told(*overrides: str, world: World = ALONE) -> str:
        findings = check_recipe(recipe_for(model, *layout, *overrides), world)
        assert failures(findings) == []
        return next(finding.text for finding in findings if finding.name == "layout")

    assert "dp 2 on 4 ranks (the least for this layout" in told(), "ep 4 needs four ranks a stage"
    assert told().endswith("start with torchrun --nproc-per-node 4 -m miles_k3 train RECIPE")
    assert "dp 4 on 8 ranks (as started)" in told(world=World(size=8, local_size=4))


@pytest.mark.parametrize(
    ("answer_lines", "overrides", "said"),
    [
        ('{"prompt": "1 + 1 =", "answer": "<answer>2</answer>"}', [], "expected 1 and less"),
        ('{"prompt": "1 + 1 =", "answer": "2"}', ["task.reward_timeout_s=0.000001"], "grading failed: timeout"),
    ],
)
def test_a_reward_that_can_not_be_earned_is_found(
    model: Path, answer_lines: str, overrides: list[str], said: str
) -> None:
    recipe = recipe_for(model, "eval.prompts=0", "task.params={}", *overrides)
    (model.parent / "data.jsonl").write_text(answer_lines + "\n")
    found = failures(check_recipe(recipe))
    assert any(finding.name == "reward" and said in finding.text for finding in found), found


@pytest.mark.parametrize(
    ("right", "empty", "ok"), [(1.0, 0.0, True), (1.0, 0.01, True), (0.5, 0.0, False), (1.0, 1.0, False)]
)
def test_the_right_answer_must_earn_it_all_and_an_empty_one_less(
    model: Path, monkeypatch: pytest.MonkeyPatch, right: float, empty: float, ok: bool
) -> None:
    monkeypatch.setattr(rewards, "RewardPool", lambda *_: InstantGrades(right, empty))
    verdict = next(finding for finding in check_recipe(recipe_for(model)) if finding.name == "reward")
    assert verdict.ok is ok, verdict


def test_where_length_is_graded_the_right_answer_is_one_of_that_length(model: Path) -> None:
    recipe = recipe_for(model, "eval.prompts=0", "task.params={}", "task.scorer=length")
    (model.parent / "data.jsonl").write_text('{"prompt": "Write 8 characters.", "answer": "8"}\n')
    verdict = next(f for f in check_recipe(recipe) if f.name == "reward")
    assert verdict.ok, verdict
    assert verdict.text == "the right answer of 8 characters gets 1, an empty one 0"


def test_engines_over_several_ranks_are_checked_as_launch_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def span_only(recipe: Recipe, _config: K3Config, world: World) -> list[tuple[str, str]]:
        found = span_problems(recipe, ranks=world.size, per_node=world.local_size, launcher=world.launcher)
        return [("sglang ranks", text) for text in found]

    monkeypatch.setattr("miles_k3.launch.named_launch_problems", span_only)
    told = [f for f in check_recipe(load_recipe("k3-16xgb300").recipe) if f.name == "layout"]
    assert [f.ok for f in told] == [True], told
    assert told[0].text.endswith("start with miles-k3 launch RECIPE")


ONE_COST = '{"curves": [{"requests": 1, "draft_s": 0, "positions": [1], "seconds": [1]}]}'


@pytest.mark.usefixtures("instant_grades")
def test_a_draft_and_its_costs_are_read_before_anything_is_loaded(tmp_path: Path) -> None:
    draft, costs = tmp_path / "draft", tmp_path / "costs.json"
    shutil.copytree(ASSETS / "tiny-k3-draft", draft)
    costs.write_text(ONE_COST)
    on = [f"rollout.speculative.draft={draft}", "rollout.speculative.mode=trim", f"rollout.speculative.costs={costs}"]
    recipe = load_recipe("tiny-cpu", on).recipe

    def found() -> list[Finding]:
        return [f for f in check_recipe(recipe) if f.name in ("draft", "memory")]

    assert [(f.name, f.ok) for f in found()][:2] == [("draft", True), ("memory", True)]
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    told = [f for f in found() if f.name == "draft"]
    assert [f.level for f in told] == [Level.OK, Level.WARN]
    assert "it takes 16 tokens" in told[1].text
    (draft / "config.json").write_text(json.dumps(config))
    costs.write_text("{}")
    assert [(f.name, f.ok) for f in found()] == [("draft", False)]
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:9000])
    (told,) = found()
    assert "the file is truncated" in told.text
    with pytest.raises(LaunchError, match="the file is truncated"):
        refuse_launch(recipe, K3Config.from_folder(recipe.model.path), ALONE, training=False)


@pytest.mark.usefixtures("instant_grades")
def test_what_sglang_lacks_has_a_name_for_each_part(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_k3.launch.installed_version", lambda: None)
    wrong = ("rollout.engine=sglang", "rollout.engine_tp=2", "rollout.sglang.nodes=2", "rollout.sglang.dcp=3",
             "rollout.sglang.draft=nowhere", "rollout.sampling.top_k=2")  # fmt: skip
    found = failures(check_recipe(recipe_for(model, *wrong)))
    told = {name: " ".join(f.text for f in found if f.name == name) for name in {f.name for f in found}}
    assert "model.dtype is float32" in told["sglang model"]
    assert "dcp 3 doesn't divide" in told["sglang split"]
    assert "rollout.sampling.top_p is 1.0 and top_k 2" in told["sglang options"]
    assert "nowhere" in told["sglang draft"]
    assert "SGLang is not installed" in told["sglang version"]
    assert "no CUDA device" in told["device"]
    assert "knows one machine" in told["sglang ranks"]


def test_findings_are_one_line_each_or_a_table(tmp_path: Path) -> None:
    findings = [Finding("sizes", Level.OK, "fit " * 40), Finding("model", Level.FAIL, "[red] gone")]
    plain = Console(file=io.StringIO(), width=40)
    print_findings(findings, plain)
    lines = plain.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.rstrip() for line in lines] == ["✓ sizes: " + ("fit " * 40).rstrip(), "✗ model: [red] gone"]
    screen = Console(file=io.StringIO(), width=60, force_terminal=True)
    print_findings(findings, screen)
    assert "[red] gone" in screen.file.getvalue()  # type: ignore[attr-defined]


def memory_findings(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.name == "memory"]


@pytest.mark.usefixtures("instant_grades")
def test_memory_is_the_plans(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host,) = memory_findings(check_recipe(recipe_for(model)))
    assert host.text.startswith("host: about 1.")
    assert "activations" in host.text
    monkeypatch.setattr(planner, "free_host_bytes", lambda: 10**9)
    (host,) = memory_findings(check_recipe(recipe_for(model)))
    assert not host.ok
    assert "1.0 GB free on this machine; `miles-k3 plan` finds what to change" in host.text
    stated = recipe_for(model, "model.device=cuda", "cluster.gpu_memory_gb=80")
    gpu, _ = memory_findings(check_recipe(stated))
    assert gpu.ok
    assert "80.0 GB cluster.gpu_memory_gb" in gpu.text


@pytest.mark.usefixtures("instant_grades")
def test_a_layout_that_cannot_work_has_no_memory(model: Path) -> None:
    found = check_recipe(recipe_for(model, "trainer.parallel.tp=3"))
    assert [finding.name for finding in failures(found)] == ["layout"] * len(failures(found))
    assert memory_findings(found) == []


@pytest.mark.usefixtures("instant_grades")
def test_no_network_is_asked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("a dry run asks nobody"))
    check.check_recipe(recipe_for(model, "eval.prompts=0"))
