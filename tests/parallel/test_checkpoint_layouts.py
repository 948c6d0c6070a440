"""A checkpoint of any layout, resumed at any other: the same state bit for bit, the same next steps within rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_runs import Resumed, load_errors, load_run, save_run, start_run, whole_state
from helpers.parity import Case
from helpers.ranks import RankPool
from safetensors.torch import load_file

# Sums in another order. A loss is a mean of terms about 1 that cancel, so its error is not relative to what is left.
LOSS_BOUND, ADAPTER_BOUND = 1e-6, 1e-5

CASES = [
    Case(name="one"),
    Case(name="tp2", ranks=2, parallel={"tp": 2}),
    Case(name="pp2", ranks=2, parallel={"pp": 2}),
    Case(name="pp2_vpp2", ranks=2, parallel={"pp": 2, "vpp": 2}),
    Case(name="ep2", ranks=2, parallel={"ep": 2}),
    Case(name="dp2", ranks=2),
    Case(name="dp2_plain", ranks=2, section={"distributed_optimizer": False}),
    Case(name="cp2", ranks=2, parallel={"cp": 2}),
    Case(name="tp2_cp2", ranks=4, parallel={"tp": 2, "cp": 2}),
    Case(name="ep2_dp4", ranks=4, parallel={"ep": 2}),
]
BY_NAME = {case.name: case for case in CASES}
SAVERS = ("one", "tp2", "pp2", "ep2", "dp2", "dp2_plain", "cp2", "tp2_cp2", "ep2_dp4")
LOADERS = ("one", "tp2", "pp2_vpp2", "ep2", "dp2", "cp2", "tp2_cp2", "ep2_dp4")
QUICK = [("ep2", "pp2_vpp2")]
Saved = Callable[[Case], tuple[Path, list[Resumed]]]


def in_bf16(case: Case) -> Case:
    return Case(name=f"{case.name}_bf16", ranks=case.ranks, parallel=case.parallel, section=case.section,
                dtype="bfloat16")  # fmt: skip


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder that a case has saved into, and how its run went on; one for each case."""
    kept: dict[str, tuple[Path, list[Resumed]]] = {}

    def save(case: Case) -> tuple[Path, list[Resumed]]:
        if case.name not in kept:
            folder = tmp_path_factory.mktemp(case.name)
            kept[case.name] = folder, pool.run(case.ranks, save_run, case, folder)
        return kept[case.name]

    return save


def check_resume(pool: RankPool, saved: Saved, saver: Case, loader: Case, tmp_path: Path) -> None:
    folder, wanted = saved(saver)
    found = pool.run(loader.ranks, load_run, loader, folder, tmp_path / "again")
    assert {outcome.version for outcome in found} == {2}
    before, after = whole_state(folder / "trainer"), whole_state(tmp_path / "again/trainer")
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
    assert found[0].peft == wanted[0].peft
    assert len(found[0].peft) == 2
    if (saver.ranks, saver.parallel) == (loader.ranks, loader.parallel):
        assert [outcome.draws for outcome in found] == [outcome.draws for outcome in wanted]
    else:
        assert {outcome.draws for outcome in found} == {wanted[0].draws}  # all have rank 0's
    if saver is loader:
        for ours, theirs in zip(found, wanted, strict=True):
            check_same(ours, theirs)
    elif loader.dtype == "float32":
        check_close(found[0], wanted[0])


def check_same(found: Resumed, wanted: Resumed) -> None:
    assert found.stats == wanted.stats
    assert [n for n, t in wanted.adapter.items() if not torch.equal(t, found.adapter[n])] == []


def check_close(found: Resumed, wanted: Resumed) -> None:
    for ours, theirs in zip(found.stats, wanted.stats, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=LOSS_BOUND, abs=LOSS_BOUND)
    apart = {n: float((found.adapter[n] - t).norm() / t.norm()) for n, t in wanted.adapter.items()}
    assert max(apart.values()) < ADAPTER_BOUND, max(apart, key=lambda n: apart[n])


@pytest.mark.parametrize(("saver", "loader"), QUICK)
def test_chosen_layouts_resume_each_other(
    pool: RankPool, saved: Saved, tmp_path: Path, saver: str, loader: str
) -> None:
    check_resume(pool, saved, BY_NAME[saver], BY_NAME[loader], tmp_path)


@pytest.mark.parallel
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("saver", SAVERS)
def test_every_layout_resumes_every_other(
    pool: RankPool, saved: Saved, tmp_path: Path, saver: str, loader: str
) -> None:
    check_resume(pool, saved, BY_NAME[saver], BY_NAME[loader], tmp_path)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("saver", "loader"),
    [("one", "tp2_cp2"), ("dp2", "one"), ("dp2", "dp2"), ("ep2_dp4", "ep2_dp4"), ("tp2", "ep2_dp4"), ("pp2", "dp2")],
)
def test_masters_of_bf16_models_are_fp32_at_every_layout(
    pool: RankPool, saved: Saved, tmp_path: Path, saver: str, loader: str
) -> None:
    case = in_bf16(BY_NAME[saver])
    check_resume(pool, saved, case, case if loader == saver else in_bf16(BY_NAME[loader]), tmp_path)
    state = whole_state(saved(case)[0] / "trainer")
    assert any(not torch.equal(t, t.bfloat16().float()) for n, t in state.items() if n.endswith("/master"))


@pytest.mark.parallel
@pytest.mark.parametrize("loader", LOADERS)
def test_every_layout_starts_from_a_peft_folder(pool: RankPool, saved: Saved, loader: str) -> None:
    folder, wanted = saved(BY_NAME["one"])
    found = pool.run(BY_NAME[loader].ranks, start_run, BY_NAME[loader], folder / "peft")
    assert found[0].stats[0].loss == pytest.approx(wanted[0].stats[0].loss, rel=LOSS_BOUND, abs=LOSS_BOUND)
    assert found[0].peft["adapter_model.safetensors"] == wanted[0].peft["adapter_model.safetensors"]


@pytest.mark.parallel
@pytest.mark.parametrize("name", ["dp2", "dp2_plain", "cp2", "ep2_dp4", "tp2_cp2"])
def test_ranks_share_the_writing(saved: Saved, name: str) -> None:
    """No element is written twice (the reader would refuse that), and no rank writes much more than its share."""
    case = BY_NAME[name]
    folder, _ = saved(case)
    sizes = [
        sum(t.numel() for key, t in load_file(path).items() if not key.startswith("rng/"))
        for path in sorted((folder / "trainer").glob("*.safetensors"))
    ]
    assert len(sizes) == case.ranks
    assert max(sizes) < 1.6 * sum(sizes) / len(sizes), sizes


def rename_run(path: Path) -> str:
    """As from another checkpoint of the same shapes."""
    data = path.read_bytes()
    id_ = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["id"]
    path.write_bytes(data.replace(id_.encode(), b"0" * len(id_), 1))
    return f"{path.name} belongs to checkpoint 00000000"


def remove(path: Path) -> str:
    path.unlink()
    return f"{path.name}: shard is missing"


def tear(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path.name}: the file is truncated"


def test_a_damaged_part_is_refused_by_all_ranks(pool: RankPool, saved: Saved, tmp_path: Path) -> None:
    good = saved(BY_NAME["dp2"])[0] / "trainer"
    words = []
    for number, damage in enumerate((rename_run, remove, tear)):
        folder = Path(shutil.copytree(good, tmp_path / str(number)))
        words.append(damage(folder / "trainer-00001-of-00002.safetensors"))
    folders = [tmp_path / str(number) for number in range(len(words))]
    for errors, unchanged in pool.run(2, load_errors, BY_NAME["dp2"], folders):
        for expected, error in zip(words, errors, strict=True):
            assert expected in error
        assert unchanged
