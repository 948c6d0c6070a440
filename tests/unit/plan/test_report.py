"""The command: every shipped recipe planned from its config alone, in words, as JSON and as a picture."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_k3 import check, cli
from miles_k3.check import check_recipe
from miles_k3.plan.planner import Machine, plan, read_config
from miles_k3.plan.report import gb
from miles_k3.plan.shapes import ITEMS, Phase
from miles_k3.recipe import load_recipe, shipped_recipes

NAMES = [name for name in shipped_recipes() if name != "base"]
WITHOUT_WEIGHTS = [name for name in NAMES if name.startswith("k3-")]


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["miles-k3", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_fits_its_machines(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "plan", name)
    assert code == 0, out
    assert out.startswith(f"{name}: ")
    assert " fits. Most in " in out
    assert "DOES NOT FIT" not in out


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_dry_run_without_weights_answers_what_it_can(name: str) -> None:
    found = {finding.name: finding for finding in check_recipe(load_recipe(name).recipe)}
    assert found["model"].ok
    assert found["sizes"].ok
    assert found["memory"].ok
    drawn = name == "k3-4layer"  # random weights and the demo's tokenizer: nothing is missing
    assert found["weights"].ok is drawn
    assert found["tokenizer"].ok is drawn


@pytest.mark.parametrize("name", ["tiny-2proc", "tiny-ray"])
def test_a_dry_run_of_several_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_check_reward", lambda *_: None)  # starts a grading process; tested in test_check
    findings = check_recipe(load_recipe(name, ["eval.prompts=4"]).recipe)
    assert [finding for finding in findings if not finding.ok] == []
    layout = next(finding.text for finding in findings if finding.name == "layout")
    assert "on 2 ranks (as cluster says): start with torchrun --nproc-per-node 2" in layout


def test_a_plan_that_does_not_fit_says_why_and_what_to_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "plan", "k3-4layer", "--set", "model.base_dtype=bf16")
    assert code == 1
    assert "GPU: DOES NOT FIT. Most in load" in out
    assert "does not fit because load takes" in out
    assert "most of it is base" in out
    assert "smallest change that fits: --set model.base_dtype=mxfp4" in out
    code, out, _ = run(capsys, monkeypatch, "plan", "k3-4layer", "--set", "cluster.gpu_memory_gb=8")
    assert code == 1
    assert "no change of up to three that were tried makes it fit" in out


def test_what_a_launch_refuses_is_said_beside_a_plan_that_fits(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "plan", "k3-64xgb300", "--set", "rollout.sglang.nodes=2")
    assert code == 0
    assert "memory aside, miles-k3 launch refuses it: rollout.sglang.nodes is 2, but rollout.engine_tp 16" in out
    code, out, _ = run(capsys, monkeypatch, "plan", "k3-64xgb300", "--set", "rollout.sampling.top_p=0.9")
    assert code == 0
    assert "memory aside, miles-k3 launch refuses it: rollout.sampling.top_p is 0.9 and top_k 0, but SGLang's" in out
    for recipe in ("k3-64xgb300", "k3-16xgb300", "tiny-cpu"):
        code, out, _ = run(capsys, monkeypatch, "plan", recipe)
        assert (code, "launch refuses" in out) == (0, False), recipe


def test_the_json_holds_every_rank_phase_and_item(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "plan", "k3-64xgb300", "--json")
    told = json.loads(out)
    assert (code, told["fits"], told["world"], len(told["ranks"])) == (0, True, 64, 8)
    for rank in told["ranks"]:
        assert rank["count"] == 8
        for side in (rank["device"], rank["host"]):
            assert set(side) == set(Phase)
            for items in side.values():
                assert items.keys() <= ITEMS.keys()
                assert all(size > 0 for size in items.values())
    worst = told["worst"][0]
    assert worst["needed_bytes"] == sum(worst["items"].values())


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.png"
    code, _, err = run(capsys, monkeypatch, "plan", "tiny-cpu", "--picture", str(target))
    assert code == 0
    assert f"written: {target}" in err
    assert target.read_bytes().startswith(b"\x89PNG")


def test_ranks_of_a_cpu_share_the_machine() -> None:
    one, two = (load_recipe("tiny-cpu", [f"cluster.ranks_per_node={n}"]).recipe for n in (1, 2))
    plans = [plan(recipe, read_config(recipe), Machine(host_bytes=10**10)) for recipe in (one, two)]
    alone, both = (found.verdicts[0] for found in plans)
    assert [verdict.pool.ranks for verdict in (alone, both)] == [1, 2]
    assert both.items["activations"] == 2 * alone.items["activations"]
    assert plans[0].fits
    assert not plan(two, read_config(two), Machine(host_bytes=2 * 10**9)).fits


def test_an_engine_in_a_process_of_its_own_has_its_own_base() -> None:
    recipe = load_recipe("tiny-ray").recipe
    config = read_config(recipe)
    together, apart = (plan(recipe, config, Machine(apart=apart)).ranks[0] for apart in (False, True))
    more = {name: size - together.device[Phase.TRAIN].get(name, 0) for name, size in apart.device[Phase.TRAIN].items()}
    assert more == {name: apart.device[Phase.TRAIN]["base"] if name == "engine base" else 0 for name in more}
    assert apart.host_bytes(Phase.TRAIN) > together.host_bytes(Phase.TRAIN) + 900_000_000


def test_the_whole_model_is_planned_in_seconds_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['miles-k3', 'plan', 'k3-64xgb300']\n"
        "from miles_k3.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert time.perf_counter() - started < 20, "about 1.5 s on an idle machine"


@pytest.mark.parametrize(("size", "said"), [(1.56e12, "1.6 TB"), (91e9, "91.0 GB"), (54e6, "54 MB"), (27648, "28 kB")])
def test_sizes_read_well(size: float, said: str) -> None:
    assert gb(size) == said
