from dataclasses import replace

import pytest
import torch
from helpers.tiny import tiny_adapter, tiny_config

from miles_k3.adapters.layout import adapter_layout, gate_up_pairs
from miles_k3.adapters.update import adapter_sha256, make_update, update_bytes, verify_update
from miles_k3.errors import AdapterError
from miles_k3.types import AdapterConfig, AdapterUpdate

O_PROJ = "language_model.model.layers.0.self_attn.o_proj.lora_A.weight"
W2_A = "language_model.model.layers.1.block_sparse_moe.experts.w2.lora_A.weight"


def rehash(update: AdapterUpdate, **changes) -> AdapterUpdate:
    """The update with other fields and a hash that fits them, so that only the fault itself can be found."""
    u = replace(update, **changes)
    return replace(u, sha256=adapter_sha256(u.version, u.config, u.tensors))


@pytest.fixture
def verify(config, adapter):
    def check(update, *, max_rank=8, expected_version: int | None = 3):
        verify_update(
            update, adapter_layout(config, update.config), max_rank=max_rank, expected_version=expected_version
        )

    return check


@pytest.fixture
def update(new_update):
    return new_update(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_good_update_passes(verify, new_update, dtype):
    update = new_update(3, dtype=dtype)
    verify(update)
    verify(update, expected_version=None)
    assert {t.dtype for t in update.tensors.values()} == {dtype}


def test_an_update_owns_its_memory(new_tensors, adapter, verify):
    live = {name: t.requires_grad_() for name, t in new_tensors().items()}
    flat = torch.cat([t.detach().reshape(-1) for t in live.values()])
    views, start = {}, 0
    for name, t in live.items():
        views[name] = flat[start : start + t.numel()].view(t.shape)
        start += t.numel()
    for source in (live, views):
        update = make_update(3, adapter, source)
        verify(update)
        before = {name: t.clone() for name, t in update.tensors.items()}
        with torch.no_grad():
            for t in source.values():
                t.add_(1.0)
        assert all(torch.equal(update.tensors[name], before[name]) for name in before)
        verify(update)


def test_bytes(new_tensors, new_update):
    numbers = sum(t.numel() for t in new_tensors().values())
    assert update_bytes(new_update(0)) == 4 * numbers
    assert update_bytes(new_update(0, dtype=torch.bfloat16)) == 2 * numbers


def test_hash_covers_everything_and_not_the_order(update, adapter):
    tensors = dict(update.tensors)
    reference = adapter_sha256(3, adapter, tensors)
    assert adapter_sha256(3, adapter, dict(reversed(tensors.items()))) == reference
    assert adapter_sha256(3, replace(adapter, alpha=6), tensors) == reference  # 6 and 6.0 are one alpha
    bits = tensors[O_PROJ].clone()
    bits.view(torch.int32)[0, 0] ^= 1
    others = {
        "version": adapter_sha256(4, adapter, tensors),
        "rank": adapter_sha256(3, replace(adapter, rank=5), tensors),
        "alpha": adapter_sha256(3, replace(adapter, alpha=7.0), tensors),
        "share": adapter_sha256(3, replace(adapter, share_gate_up_a=False), tensors),
        "name": adapter_sha256(3, adapter, {("x" + n if n == O_PROJ else n): t for n, t in tensors.items()}),
        "missing": adapter_sha256(3, adapter, {n: t for n, t in tensors.items() if n != O_PROJ}),
        "shape": adapter_sha256(3, adapter, {**tensors, O_PROJ: tensors[O_PROJ].view(2, -1)}),
        "dtype": adapter_sha256(3, adapter, {**tensors, O_PROJ: tensors[O_PROJ].view(torch.int32)}),
        "one bit": adapter_sha256(3, adapter, {**tensors, O_PROJ: bits}),
    }
    assert reference not in others.values()
    assert len(set(others.values())) == len(others)


def test_rank_above_the_slots(new_update, verify):
    update = new_update(7, adapter=AdapterConfig(rank=32, alpha=64.0))
    with pytest.raises(AdapterError) as e:
        verify(update, max_rank=16, expected_version=7)
    assert str(e.value) == "adapter v7 has rank 32, slots hold 16; set rollout.max_lora_rank: 32"


@pytest.mark.parametrize(("expected", "text"), [(4, "v4"), (2, "v2"), (2, "current v1")])
def test_wrong_version(update, verify, expected, text):
    with pytest.raises(AdapterError, match=text):
        verify(update, expected_version=expected)


def test_first_version_may_not_be_negative(update, verify):
    with pytest.raises(AdapterError, match="negative"):
        verify(rehash(update, version=-1), expected_version=None)


def test_missing_key(update, verify):
    tensors = {n: t for n, t in update.tensors.items() if n != W2_A}
    with pytest.raises(AdapterError, match=rf"lacks 1 of \d+ tensors: {W2_A}"):
        verify(rehash(update, tensors=tensors))


def test_extra_key(update, verify):
    extra = "language_model.model.layers.1.self_attn.q_proj.lora_A.weight"
    with pytest.raises(AdapterError, match=f"1 keys that match nothing in this model: {extra}"):
        verify(rehash(update, tensors={**update.tensors, extra: torch.zeros(4, 48)}))


def test_renamed_key_names_both(update, verify):
    renamed = W2_A.replace("w2", "w_2")
    tensors = {(renamed if n == W2_A else n): t for n, t in update.tensors.items()}
    with pytest.raises(AdapterError) as e:
        verify(rehash(update, tensors=tensors))
    assert f"{renamed} (did you mean {W2_A}?)" in str(e.value)
    assert "lacks 1 of" in str(e.value)


def test_long_lists_are_counted(update, verify):
    tensors = {n.replace("language_model", "model"): t for n, t in update.tensors.items()}
    with pytest.raises(AdapterError, match=f"and {len(tensors) - 12} more"):
        verify(rehash(update, tensors=tensors))


@pytest.mark.parametrize("name", [O_PROJ, W2_A])
def test_wrong_shape(update, verify, name):
    wrong = update.tensors[name][..., :-1].clone()
    with pytest.raises(AdapterError, match=r"of shape \[.*\], expected \[.*\]: an adapter for another model"):
        verify(rehash(update, tensors={**update.tensors, name: wrong}))


def test_wrong_dtype(update, verify):
    with pytest.raises(AdapterError, match=r"torch\.float16, expected torch\.float32 or torch\.bfloat16"):
        verify(rehash(update, tensors={**update.tensors, O_PROJ: update.tensors[O_PROJ].half()}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite(new_update, verify, value, dtype):
    update = new_update(3, dtype=dtype)
    bad = update.tensors[W2_A].clone()
    bad[-1, -1, -1] = value
    with pytest.raises(AdapterError, match=rf"has 1 non-finite of \d+ values in {W2_A}"):
        verify(rehash(update, tensors={**update.tensors, W2_A: bad}))


def test_nan_everywhere_is_not_called_a_difference_between_gate_and_up(update, verify):
    """NaN differs from itself: one A shared by both isn't two because of that."""
    with pytest.raises(AdapterError, match="non-finite") as e:
        verify(rehash(update, tensors={n: torch.full_like(t, torch.nan) for n, t in update.tensors.items()}))
    assert "has different" not in str(e.value)


@pytest.mark.parametrize("field", ["tensors", "version", "config", "sha256"])
def test_tampered(update, verify, field):
    if field == "tensors":
        update.tensors[W2_A][0, 0, 0] += 1e-6
    else:
        other = {"version": 4, "config": replace(update.config, alpha=12.0), "sha256": "0" * 64}
        update = replace(update, **{field: other[field]})
    with pytest.raises(AdapterError, match=r"sha256.*export it again"):
        verify(update, expected_version=update.version)


def test_shared_storage(update, verify):
    gate, up = gate_up_pairs(dict.fromkeys(update.tensors))[0]
    with pytest.raises(AdapterError, match=f"{up} in the same memory as {gate}"):
        verify(rehash(update, tensors={**update.tensors, up: update.tensors[gate]}))


def test_view_of_a_buffer(update, verify):
    t = update.tensors[O_PROJ]
    with pytest.raises(AdapterError, match=f"{O_PROJ} as a view"):
        verify(rehash(update, tensors={**update.tensors, O_PROJ: torch.cat([t, t])[: len(t)]}))
    with pytest.raises(AdapterError, match=f"{O_PROJ} as a view"):
        verify(rehash(update, tensors={**update.tensors, O_PROJ: t.t().contiguous().t()}))


def test_live_parameter(update, verify):
    with pytest.raises(AdapterError, match="live parameter"):
        verify(rehash(update, tensors={**update.tensors, O_PROJ: update.tensors[O_PROJ].clone().requires_grad_()}))


@pytest.mark.parametrize("value", [[1.0], torch.eye(4).to_sparse()])
def test_not_a_tensor(update, verify, value):
    with pytest.raises(AdapterError, match="expected a plain dense tensor"):
        verify(replace(update, tensors={**update.tensors, O_PROJ: value}))


def test_gate_and_up_a_must_be_equal_when_shared(update, verify):
    _, up = gate_up_pairs(dict.fromkeys(update.tensors))[2]
    tensors = {**update.tensors, up: update.tensors[up] + 0.5}
    with pytest.raises(AdapterError, match=r"export one A twice or set lora\.share_gate_up_a: false"):
        verify(rehash(update, tensors=tensors))
    verify(rehash(update, tensors=tensors, config=replace(update.config, share_gate_up_a=False)))


def test_all_findings_at_once(update, verify):
    tensors = {n: t for n, t in update.tensors.items() if n != W2_A}
    tensors[O_PROJ] = torch.full_like(tensors[O_PROJ], float("nan"))
    tensors["surprise"] = torch.zeros(1)
    with pytest.raises(AdapterError) as e:
        verify(replace(update, tensors=tensors), max_rank=2, expected_version=9)
    text = str(e.value)
    for part in ("slots hold 2", "expected to be v9", "lacks 1 of", "surprise", "non-finite", "sha256"):
        assert part in text
    assert all(line.startswith("adapter v3 ") for line in text.splitlines())


# --- hashes of what lies on a GPU -------------------------------------------------------------------------------------
def test_memory_that_was_hashed_here_is_not_hashed_again_until_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, that is; a host tensor may have been changed by anybody."""
    from miles_k3.adapters import update as module

    config, adapter = tiny_config(), AdapterConfig(rank=2, alpha=4.0)
    layout, tensors = adapter_layout(config, adapter), tiny_adapter(config, adapter)
    asked: list[int] = []
    original = module.adapter_sha256
    monkeypatch.setattr(module, "adapter_sha256", lambda *a: asked.append(0) or original(*a))

    def hashes_of_a_check(update: AdapterUpdate) -> int:
        asked.clear()
        verify_update(update, layout, max_rank=2, expected_version=None)
        return len(asked)

    assert hashes_of_a_check(make_update(0, adapter, tensors)) == 1
    monkeypatch.setattr(module, "on_gpu", lambda _: True)
    update = make_update(0, adapter, tensors)
    assert hashes_of_a_check(update) == 0
    copied = replace(update, tensors={name: t.clone() for name, t in update.tensors.items()})
    assert hashes_of_a_check(copied) == 1
    next(iter(update.tensors.values())).add_(1)
    with pytest.raises(AdapterError, match="sha256"):
        verify_update(update, layout, max_rank=2, expected_version=None)
    other = replace(make_update(0, adapter, tensors), version=1)
    with pytest.raises(AdapterError, match="sha256"):
        verify_update(other, layout, max_rank=2, expected_version=None)


def test_what_was_judged_here_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for NaN nor for one A of gate and up: a device would be waited for. What was wrong is still refused."""
    from miles_k3.adapters import update as module

    config, adapter = tiny_config(), AdapterConfig(rank=2, alpha=4.0)
    layout, tensors = adapter_layout(config, adapter), tiny_adapter(config, adapter)
    monkeypatch.setattr(module, "on_gpu", lambda _: True)
    gate, up = gate_up_pairs(layout)[0]
    good = make_update(0, adapter, tensors)
    bad = make_update(0, adapter, {**tensors, O_PROJ: torch.full_like(tensors[O_PROJ], float("nan"))})
    apart = make_update(0, adapter, {**tensors, up: tensors[gate] + 1})

    def refused(*_: object) -> None:
        raise AssertionError("a tensor was read again")

    for name in ("finite_names", "is_finite"):
        monkeypatch.setattr(module, name, refused)
    monkeypatch.setattr(module.torch, "equal", refused)
    verify_update(good, layout, max_rank=2, expected_version=None)
    monkeypatch.undo()
    monkeypatch.setattr(module, "on_gpu", lambda _: True)
    with pytest.raises(AdapterError, match="non-finite"):
        verify_update(bad, layout, max_rank=2, expected_version=None)
    with pytest.raises(AdapterError, match="export one A twice"):
        verify_update(apart, layout, max_rank=2, expected_version=None)
