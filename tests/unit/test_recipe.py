"""Recipes: layers, strictness, every problem at once, exact round trips."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_k3.config import ModelSection, Recipe, TaskSection
from miles_k3.errors import ConfigError
from miles_k3.judge import recipe_fields
from miles_k3.recipe import RECIPES_FOLDER, dump_resolved, flatten, load_recipe, shipped_recipes
from miles_k3.yaml_text import parse

MINIMAL = "model: {path: m}\ntask: {name: 'reasoning_gym:chain_sum'}\n"


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    (folder / name).write_text(dedent(text))
    return folder / name


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems


def only_problem(path: Path, *overrides: str) -> str:
    found = problems(path, *overrides)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads(name: str) -> None:
    overrides = ["model.path=m", "task.name=reasoning_gym:chain_sum"] if name == "base" else []
    recipe = load_recipe(name, overrides).recipe
    assert isinstance(recipe, Recipe)


def test_base_spells_every_key_with_its_default() -> None:
    loaded = load_recipe("base", ["model.path=/m", "task.name=x:y"])
    default = Recipe(model=ModelSection(path="/m"), task=TaskSection(name="x:y"))
    assert loaded.recipe == default
    spelled = parse((RECIPES_FOLDER / "base.yaml").read_text()).lines.keys()
    assert set(recipe_fields()) <= set(spelled)


def test_base_requires_model_and_task() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("base")
    assert [p.split(":")[0] for p in caught.value.problems] == ["model.path", "task.name"]
    assert all("missing; set it in the recipe or with --set" in p for p in caught.value.problems)


def test_a_recipe_wins_over_its_base_and_set_over_both(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + "trainer: {lr: 0.1, grad_clip: 2.0}\nlora: {rank: 4}\n", "a.yaml")
    write(
        tmp_path,
        "base: a.yaml\ntrainer: {lr: 0.2, weight_decay: 0.5}\nrollout: {max_lora_rank: '${lora.rank}'}",
        "b.yaml",
    )
    loaded = load_recipe(write(tmp_path, "base: b.yaml\nrun: {steps: 7}\n", "c.yaml"), ["run.steps=9", "lora.rank=8"])
    recipe, sources = loaded.recipe, loaded.sources
    assert (recipe.trainer.lr, recipe.trainer.grad_clip, recipe.trainer.weight_decay) == (0.2, 2.0, 0.5)
    assert (recipe.run.steps, recipe.lora.rank, recipe.rollout.max_lora_rank) == (9, 8, 8)
    assert sources["trainer.lr"].endswith("b.yaml:2")
    assert sources["trainer.grad_clip"].endswith("a.yaml:3")
    assert sources["rollout.max_lora_rank"].endswith("b.yaml:3 as ${lora.rank}")
    assert sources["run.steps"] == "--set"
    assert sources["sync.canary_tokens"] == "default"
    assert sources.keys() == {key for key, _ in flatten(recipe.model_dump())}
    assert loaded.name == "c"


def test_params_merge_key_by_key_but_set_replaces(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL.replace("'}", "', params: {a: 1, b: [1, 2]}}"), "a.yaml")
    child = write(tmp_path, "base: a.yaml\ntask: {params: {b: [3], c: 2}}\n", "b.yaml")
    assert load_recipe(child).recipe.task.params == {"a": 1, "b": [3], "c": 2}
    assert load_recipe(child, ["task.params.a=5"]).recipe.task.params == {"a": 5, "b": [3], "c": 2}
    replaced = load_recipe(child, ["task.params={z: 1}"])
    assert replaced.recipe.task.params == {"z": 1}
    assert replaced.sources["task.params.z"] == "--set"


def test_paths_start_from_the_file_that_spells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    write(
        tmp_path / "sub",
        "model: {path: ../weights}\ntask: {name: 'jsonl:d.jsonl', params: {eval_path: ../e}}\nrun: {folder: out}",
        "a.yaml",
    )
    child = write(tmp_path, "base: sub/a.yaml\nlora: {init_from: adapter}\n", "b.yaml")
    monkeypatch.chdir("/")
    recipe = load_recipe(child).recipe
    assert recipe.model.path == str(tmp_path / "weights")
    assert recipe.task.name == f"jsonl:{tmp_path}/sub/d.jsonl"
    assert recipe.task.params == {"eval_path": str(tmp_path / "e")}
    assert recipe.lora.init_from == str(tmp_path / "adapter")
    assert recipe.run.folder == "out"
    assert load_recipe(child, ["model.path=here"]).recipe.model.path == "/here"
    assert load_recipe(child, ["model.path=/abs"]).recipe.model.path == "/abs"
    assert load_recipe("tiny-cpu").recipe.model.path == str(RECIPES_FOLDER.parent / "assets" / "tiny-k3")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("rollout: {group_sise: 4}", "rollout.group_sise: unknown key; did you mean rollout.group_size?"),
        ("group_size: 4", "group_size: unknown key; did you mean rollout.group_size?"),
        ("trainr: {lr: 0.1}", "trainr: unknown key; did you mean trainer?"),
        ("temperature: 1.0", "did you mean rollout.sampling.temperature or eval.temperature?"),
        ("sync: {zzz: 1}", "sync.zzz: unknown key; sync has canary_tokens, canary_max_diff"),
        ("trainer.lr: 0.1", "trainer.lr: unknown key; write it nested, as trainer: {lr: ...}"),
        ("trainer: {lr: 1e-5}", "trainer.lr: text '1e-5' given, expected a number; YAML needs the dot: write 1.0e-5"),
        ("trainer: {lr: 3E6}", "write 3.0e+6"),
        ("trainer: {lr: '0.1'}", "trainer.lr: text '0.1' given, expected a number; write 0.1 without quotes"),
        ("trainer: {lr: true}", "trainer.lr: true given, expected a number"),
        ("trainer: {lr: fast}", "trainer.lr: text 'fast' given, expected a number; write a number"),
        ("trainer: {lr: .inf}", "trainer.lr: .inf given, expected a finite number"),
        ("trainer: {lr: .nan}", "trainer.lr: .nan given, expected a finite number"),
        ("trainer: {lr: -0.1}", "trainer.lr: -0.1 given, expected 0 or more (Adam's peak learning rate)"),
        ("trainer: {lr: null}", "trainer.lr: null given, expected a number"),
        ("run: {steps: 1.0}", "run.steps: 1.0 given, expected a whole number; write 1"),
        ("run: {steps: 1.5}", "run.steps: 1.5 given, expected a whole number"),
        ("run: {steps: true}", "run.steps: true given, expected a whole number"),
        ("run: {steps: '8'}", "run.steps: text '8' given, expected a whole number; write 8"),
        ("run: {steps: 1e3}", "run.steps: text '1e3' given, expected a whole number; write 1000"),
        ("run: {steps: 010}", "run.steps: text '010' given, expected a whole number; write 10"),
        ("run: {wandb: no}", "run.wandb: text 'no' given, expected 'off', 'offline' or 'online'"),
        ("run: {name: 12}", "run.name: 12 given, expected text; put quotes around it"),
        ("run: {name: ../x}", "run.name: text '../x' given, expected one folder name"),
        ("run: {folder: ''}", "run.folder: text '' given, expected text that isn't empty"),
        ("run: {folder: '${nope.x}'}", "run.folder: ${nope.x} can't be filled in: Interpolation key"),
        ("run: {folder: '${run.folder}'}", "run.folder: ${run.folder} can't be filled in: Recursive interpolation"),
        ("run: {folder: '${'}", "run.folder: '${' holds a broken ${...}"),
        ("lora: {share_gate_up_a: yes}", "lora.share_gate_up_a: text 'yes' given, expected true or false"),
        ("rollout: 3", "rollout: 3 given, expected a section of keys"),
        ("rollout: {sampling: {stop: [a, 1]}}", "rollout.sampling.stop.1: 1 given, expected text"),
        ("rollout: {sampling: {stop: end}}", "rollout.sampling.stop: text 'end' given, expected a list"),
        ("rollout: {sampling: {temperature: 0}}", "0 given, expected a number above 0 (Must be above 0 for training)"),
        ("rollout: {sampling: {temperature: -1.0}}", "-1.0 given, expected a number above 0"),
        ("rollout: {group_size: 1}", "rollout.group_size is 1 but algorithm.advantage 'grpo' compares samples"),
        ("lora: {rank: 64}", "lora.rank is 64 but the engine's slots hold rank 16; set rollout.max_lora_rank: 64"),
        ("trainer: {updates_per_rollout: 5}", "rollout.prompts_per_step 32 is not a multiple of"),
        ("algorithm: {clip_high: 0.3}", "algorithm.clip_high is 0.3 but would do nothing"),
        ("algorithm: {dual_clip: 3.0}", "2 or more, or leave algorithm.dual_clip at null"),
        ("trainer: {micro_batch_tokens: 100}", "set trainer.micro_batch_tokens: 1088 or more"),
        ("rollout: {num_pages: 2}", "set rollout.num_pages: 68 or more, or 0"),
        ("run: {steps: 1, steps: 2}", "run.steps: given twice, first on line 3; keep one"),
        ("1: 2", "the key 1 is not text; put quotes around it"),
        ("base: nope.yaml", "nope.yaml doesn't exist; a base is relative to the recipe that names it"),
        ("base: r.yaml", "recipes name each other in a circle"),
        ("base: [a]", "base: ['a'] given, expected the name of a recipe file"),
        ("task_2: &a [*a]", "task_2.0: an alias refers to a part that contains it"),
        ("run: !!python/name:os.system {}", "the tag tag:yaml.org,2002:python/name:os.system means nothing here"),
        ("run: {steps: !!python/name:os.system x}", "can't be read as tag:yaml.org,2002:python/name:os.system"),
    ],
)  # fmt: skip
def test_bad_lines_get_one_clear_sentence(tmp_path: Path, lines: str, expected: str) -> None:
    found = problems(write(tmp_path, MINIMAL + lines + "\n"))
    matching = [problem for problem in found if expected in problem]
    assert len(matching) == 1, found
    assert len(found) == (2 if lines.startswith("task_2") else 1), found
    assert "\n" not in found[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: [1", "r.yaml:1"),
        ("run:\n\tsteps: 3\n", "not YAML"),
        ("- a\n- b\n", "expected sections such as"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("run: {name: \x01}", "not YAML: special characters are not allowed (character 0x0001)"),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in only_problem(write(tmp_path, text))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    assert "r.yaml: can't be read as UTF-8 text" in only_problem(tmp_path / "r.yaml")


def test_every_problem_is_told_at_once_with_its_place(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        model: {pth: m}
        task: {name: 't:x', scorer: off}
        trainer:
          lr: 1e-5
          updates_per_rollout: 5
        rollout: {group_sise: 4, group_size: 1, sampling: {top_k: '7'}}
        lora: {rank: 64}
        """,
    )
    found = problems(path, "run.steps=x", "nonsense", "foo.bar=1", "run.name=a: b")
    told = sorted(p.split(":")[0].split(" ")[0] for p in found)
    assert told == sorted(
        ["model.pth", "model.path", "task.scorer", "trainer.lr", "rollout.group_sise", "rollout.sampling.top_k",
         "lora.rank", "rollout.prompts_per_step", "run.steps", "--set", "foo", "run.name"]
    )  # fmt: skip
    assert any(p.endswith("r.yaml:4)") for p in found if p.startswith("trainer.lr"))
    assert any(p.endswith("(--set)") for p in found if p.startswith("run.steps"))
    assert not any("group_size is 1" in p for p in found), "group_size is what the misspelt key may have meant"


def test_rules_are_judged_beside_other_problems(tmp_path: Path) -> None:
    found = problems(write(tmp_path, MINIMAL + "rollout: {group_size: 1, engin: x}\nrun: {seed: -1}\n"))
    assert len(found) == 3, found
    assert any("rollout.group_size is 1" in p for p in found)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("run..steps=3", "expected section.key=value"),
        ("run.steps=[", "not YAML"),
        ("run.steps=1e2", "write 100"),
        ("task.name.first=x", "task.name holds 'reasoning_gym:chain_sum', so nothing can be set below it"),
        ("base=x.yaml", "a base can only be named in a recipe file"),
        ("run.name=${", "holds a broken ${...}"),
        ("rollout=null", "expected a section of keys"),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in only_problem(write(tmp_path, MINIMAL), override)


def test_override_values_are_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    recipe = load_recipe(
        path,
        ["trainer.lr=2", "rollout.sampling.stop=[a, 'b: c']", "task.system_prompt='say: hi'", "run.name=n=1",
         "lora.init_from=", "rollout.max_lora_rank=${lora.rank}", "lora.rank=3"],
    ).recipe  # fmt: skip
    assert recipe.trainer.lr == 2.0
    assert isinstance(recipe.trainer.lr, float)
    assert recipe.rollout.sampling.stop == ("a", "b: c")
    assert recipe.task.system_prompt == "say: hi"
    assert recipe.run.name == "n=1"
    assert recipe.lora.init_from is None
    assert recipe.rollout.max_lora_rank == 3


def test_an_empty_section_changes_nothing(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, MINIMAL + "trainer:\n  # lr: 0.1\n")).recipe.trainer.lr == 1e-5


def test_unknown_names_list_or_suggest() -> None:
    with pytest.raises(ConfigError, match="did you mean tiny-cpu"):
        load_recipe("tiny-cpux")
    with pytest.raises(ConfigError, match=r"no such recipe; expected a YAML file, a run folder, or one of: base"):
        load_recipe("nope/x.yaml")


def test_a_moved_run_is_found_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    recipe = load_recipe("tiny-cpu").recipe
    (tmp_path / "moved" / "recipe.yaml").write_text(dump_resolved(recipe))
    moved = load_recipe(tmp_path / "moved").recipe
    assert (moved.run.folder, moved.run.name) == (str(tmp_path), "moved")
    assert moved.model_copy(update={"run": recipe.run}) == recipe


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "off",
        "no",
        "1e-5",
        "012",
        "1:30",
        "~",
        "null",
        "true",
        "${a}",
        "\\${a}",
        "\\\\${x",
        "${",
        "2024-01-01",
        "<<",
        "a: b",
        "=",
        "",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


TINY = load_recipe("tiny-cpu").recipe


@settings(max_examples=40, deadline=None)
@example(params={"a\u2028b": "\ufeff"}, lr=1e-5, prompt="a\x85b")
@example(params={"a": "\\${b}", "b": ["1e-5", "off"]}, lr=5e-324, prompt="\\\\${x}")
@given(params=st.dictionaries(TEXTS, VALUES, max_size=4), lr=st.floats(0, 100.0), prompt=TEXTS)
def test_a_dumped_recipe_reads_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, params: dict, lr: float, prompt: str
) -> None:
    task = TINY.task.model_copy(update={"params": params, "system_prompt": prompt})
    recipe = TINY.model_copy(update={"task": task, "trainer": TINY.trainer.model_copy(update={"lr": lr})})
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(dump_resolved(recipe), encoding="utf-8", newline="")
    again = load_recipe(path).recipe
    assert again == recipe
    assert repr(again) == repr(recipe)
    assert dump_resolved(again) == dump_resolved(recipe)


def test_reading_a_recipe_imports_no_torch() -> None:
    code = (
        "import sys; from miles_k3.recipe import load_recipe; load_recipe('tiny-cpu');"
        "bad = {'torch', 'transformers', 'megatron', 'matplotlib', 'wandb'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
