from dataclasses import replace

import pytest
import torch

from miles_k3.adapters.layout import adapter_layout, by_module, join_expert, tensor_name
from miles_k3.adapters.merge import MERGE_MARKER, merge_into, merge_metadata, merge_stream, merged_delta
from miles_k3.errors import AdapterError

LAYER = "language_model.model.layers.1."
O_PROJ = LAYER + "self_attn.o_proj"
W2 = LAYER + "block_sparse_moe.experts.w2"


@pytest.fixture
def weights(config, adapter):
    """One expert a tensor, and one tensor that has no adapter."""
    generator = torch.Generator().manual_seed(1)
    out = {LAYER + "input_layernorm.weight": torch.randn(48, generator=generator)}
    for module, (a, b) in by_module(adapter_layout(config, adapter)).items():
        names = [module] if a.kind == "dense" else [join_expert(module, e) for e in range(config.num_experts)]
        for name in names:
            out[f"{name}.weight"] = torch.randn(b.shape[-2], a.shape[-1], generator=generator)
    return out


@pytest.fixture
def update(new_update):
    return new_update(7)


def double_delta(update, module, expert=None):
    a, b = (update.tensors[tensor_name(module, f)].double() for f in ("A", "B"))
    if expert is not None:
        a, b = a[expert if len(a) > 1 else 0], b[expert if len(b) > 1 else 0]
    return update.config.alpha / update.config.rank * torch.einsum("...or,...ri->...oi", b, a)


def test_delta_is_scaled_once(update, config):
    torch.testing.assert_close(
        merged_delta(update, O_PROJ).double(), double_delta(update, O_PROJ), rtol=1e-5, atol=1e-6
    )
    stacked = merged_delta(update, W2)
    assert stacked.shape == (config.num_experts, config.routed_expert_hidden_size, config.moe_intermediate_size)
    for expert in range(config.num_experts):
        torch.testing.assert_close(stacked[expert].double(), double_delta(update, W2, expert), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(merged_delta(update, W2, expert), stacked[expert])


def test_delta_of_what_is_not_there(update):
    with pytest.raises(AdapterError, match=r"no tensor .*q_proj"):
        merged_delta(update, LAYER + "self_attn.q_proj")
    for module, expert in ((W2, 5), (W2, -1), (O_PROJ, 0)):
        with pytest.raises(AdapterError, match="experts in"):
            merged_delta(update, module, expert)


def test_every_target_changes_and_nothing_else(weights, update):
    before = {n: t.clone() for n, t in weights.items()}
    merged = merge_into(weights, update)
    assert list(merged) == list(weights)
    for name, weight in weights.items():
        assert torch.equal(weight, before[name])
        assert torch.equal(merged[name], weight) == name.endswith("input_layernorm.weight")
    expert = merged[f"{join_expert(W2, 3)}.weight"].double() - weights[f"{join_expert(W2, 3)}.weight"].double()
    torch.testing.assert_close(expert, double_delta(update, W2, 3), rtol=0, atol=1e-6)


def test_stacked_experts(weights, update, config):
    modules = {m for m, (a, _) in by_module(adapter_layout(config, update.config)).items() if a.kind == "expert"}
    names = {m: [f"{join_expert(m, e)}.weight" for e in range(config.num_experts)] for m in modules}
    stacked = {n: t for n, t in weights.items() if not any(n in group for group in names.values())}
    stacked |= {f"{m}.weight": torch.stack([weights[n] for n in group]) for m, group in names.items()}
    one_by_one, together = merge_into(weights, update), merge_into(stacked, update)
    for m, group in names.items():
        torch.testing.assert_close(together[f"{m}.weight"], torch.stack([one_by_one[n] for n in group]))


def test_bfloat16_weights_are_rounded_once(weights, update):
    half = {n: t.bfloat16() for n, t in weights.items()}
    merged = merge_into(half, update)
    exact = half[f"{O_PROJ}.weight"].double() + double_delta(update, O_PROJ)
    assert merged[f"{O_PROJ}.weight"].dtype == torch.bfloat16
    assert (merged[f"{O_PROJ}.weight"] == exact.bfloat16()).float().mean() > 0.999


def test_zero_b_gives_the_base(weights, new_update):
    update = new_update(0)
    for name, t in update.tensors.items():
        if ".lora_B." in name:
            t.zero_()
    assert all(torch.equal(t, weights[n]) for n, t in merge_into(weights, update).items())


def test_merging_twice_is_refused(weights, update, new_update):
    merged = merge_into(weights, update)
    assert merged.metadata == merge_metadata(update)
    assert merged.metadata[MERGE_MARKER].startswith("v7 ")
    for other in (update, new_update(8)):
        with pytest.raises(AdapterError, match="already hold adapter v7"):
            merge_into(merged, other)
        with pytest.raises(AdapterError, match="already hold adapter v7"):
            merge_stream(merged.items(), other, metadata=merged.metadata)  # at once, not at the first tensor
    merge_stream(weights.items(), update, metadata={"format": "pt"})


def test_a_target_that_never_comes(weights, update):
    name = f"{join_expert(W2, 4)}.weight"
    left = {n: t for n, t in weights.items() if n != name}
    with pytest.raises(AdapterError, match=r"no weight came for 1 modules.*experts\.4\.w2"):
        merge_into(left, update)


def test_packed_and_misshapen_targets(weights, update):
    name = f"{join_expert(W2, 0)}.weight"
    packed = {(n + "_packed" if n == name else n): t for n, t in weights.items()}
    with pytest.raises(AdapterError, match="packed MXFP4; dequantise"):
        merge_into(packed, update)
    with pytest.raises(AdapterError, match="another model's adapter"):
        merge_into({**weights, name: weights[name][:-1]}, update)


def test_stream_holds_one_tensor_at_a_time(weights, update):
    pulled = []

    def source():
        for item in weights.items():
            pulled.append(item[0])
            yield item

    for count, (name, _) in enumerate(merge_stream(source(), update), start=1):
        assert pulled[-1] == name
        assert len(pulled) == count


def test_alpha_scales_the_delta(update):
    stronger = replace(update, config=replace(update.config, alpha=2 * update.config.alpha))
    torch.testing.assert_close(merged_delta(stronger, O_PROJ), 2 * merged_delta(update, O_PROJ))
