"""The draft's forward against transformers' Qwen3 modules, and its folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers.drafts import random_examples, small_config, small_draft, small_weights
from helpers.tiny import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from miles_k3.errors import CheckpointError
from miles_k3.k3.draft_config import DraftConfig, Yarn
from miles_k3.rollout.speculative.draft import DraftModel, drawn
from miles_k3.rollout.speculative.draft_io import read_draft, write_draft
from miles_k3.rollout.speculative.rotary import Rotary
from miles_k3.rollout.speculative.serving_draft import ServingDraft

YARN = Yarn(factor=8.0, original_max_position_embeddings=64)


def qwen3_config(config: DraftConfig) -> Qwen3Config:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.yarn is not None:
        rope |= {"rope_type": "yarn", "factor": config.yarn.factor,
                 "original_max_position_embeddings": config.yarn.original_max_position_embeddings}  # fmt: skip
    published = Qwen3Config(
        hidden_size=config.hidden_size, num_hidden_layers=config.num_hidden_layers, head_dim=config.head_dim,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size, vocab_size=config.vocab_size, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings, rope_parameters=rope,
    )  # fmt: skip
    published._attn_implementation = "eager"
    return published


@torch.no_grad()
def oracle_block(model: DraftModel, taps_TW: Tensor, anchor_token: int, anchor: int) -> Tensor:
    """One block: transformers' attention over [context, block] put together, context rows not normed; [G, H]."""
    c = model.config
    published = qwen3_config(c)

    def norm(name: str) -> Qwen3RMSNorm:
        module = Qwen3RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        module.load_state_dict({"weight": model.weights[name]})
        return module

    context = norm("hidden_norm.weight")(taps_TW[:anchor] @ model.weights["fc.weight"].t())
    x = model.embed_VH[torch.tensor([anchor_token] + [c.mask_token_id] * (c.block_size - 1))]
    positions = torch.arange(anchor + c.block_size).unsqueeze(0)
    cos_sin = Qwen3RotaryEmbedding(published)(x, positions)
    for number in range(c.num_hidden_layers):
        layer, prefix = Qwen3DecoderLayer(published, number), f"layers.{number}."
        layer.load_state_dict(
            {n.removeprefix(prefix): w for n, w in model.weights.items() if n.startswith(prefix)}
        )  # fmt: skip
        rows = torch.cat([context, layer.input_layernorm(x)]).unsqueeze(0)
        see_all = torch.zeros(1, 1, rows.shape[1], rows.shape[1])
        out = layer.self_attn(rows, position_embeddings=cos_sin, attention_mask=see_all)[0]
        x = x + out[0, anchor:]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return norm("norm.weight")(x)


@pytest.mark.parametrize("yarn", [None, YARN])
def test_blocks_are_those_of_concatenated_attention(yarn: Yarn | None) -> None:
    model = small_draft(yarn=yarn)
    examples = random_examples([(4, 9), (7, 20)], model.config)
    longest = max(len(e.token_ids) for e in examples)
    taps = torch.full((2, longest, model.config.tap_width), 1e3)  # what lies behind a sequence is never seen
    for row, example in enumerate(examples):
        taps[row, : len(example.token_ids)] = example.states.taps_TW
    anchors = torch.tensor([[4, 9, 11], [7, 8, 25]])
    tokens = torch.stack([torch.tensor(e.token_ids)[a] for e, a in zip(examples, anchors, strict=True)])
    found = model.hidden(tokens, anchors, model.context(taps))
    for row, example in enumerate(examples):
        for block in range(3):
            anchor = int(anchors[row, block])
            wanted = oracle_block(model, example.states.taps_TW, int(tokens[row, block]), anchor)
            torch.testing.assert_close(found[row, block], wanted, atol=2e-5, rtol=2e-5)


def test_context_at_and_behind_the_anchor_is_not_seen() -> None:
    model = small_draft()
    taps = torch.randn(1, 12, model.config.tap_width, generator=torch.Generator().manual_seed(0))
    other = taps.clone()
    other[:, 6:] = 7.0
    tokens, anchors = torch.tensor([[5]]), torch.tensor([[6]])
    before = model.hidden(tokens, anchors, model.context(taps))
    assert torch.equal(before, model.hidden(tokens, anchors, model.context(other)))
    other[:, 5] = 7.0
    assert not torch.equal(before, model.hidden(tokens, anchors, model.context(other)))


def test_context_can_be_computed_piece_by_piece() -> None:
    model = small_draft()
    taps = torch.randn(1, 12, model.config.tap_width, generator=torch.Generator().manual_seed(0))
    whole, first, second = model.context(taps), model.context(taps[:, :5]), model.context(taps[:, 5:], 5)
    for layer in range(model.config.num_hidden_layers):
        torch.testing.assert_close(torch.cat([first.keys[layer], second.keys[layer]], 1), whole.keys[layer])
        torch.testing.assert_close(torch.cat([first.values[layer], second.values[layer]], 1), whole.values[layer])


@pytest.mark.parametrize("yarn", [None, YARN])
def test_rows_of_single_tokens_are_the_context(yarn: Yarn | None) -> None:
    """In any order of positions; the engine's draft holds keys' and values' weights once."""
    model = small_draft(yarn=yarn)
    serving = ServingDraft(model.config, model.weights, model.embed_VH, model.head_VH)
    taps = torch.randn(1, 12, model.config.tap_width, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    rows = torch.empty(1, 12, model.config.context_width)
    rows[0, order] = serving.context_rows(taps[0, order], order)
    found, wanted = serving.context_of(rows), model.context(taps)
    torch.testing.assert_close((found.keys, found.values), (wanted.keys, wanted.values), atol=1e-5, rtol=1e-5)
    k, v = (serving.weights[f"layers.1.self_attn.{kind}_proj.weight"] for kind in "kv")
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert torch.equal(k, model.weights["layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize("yarn", [None, YARN, Yarn(factor=16.0, original_max_position_embeddings=65536)])
def test_rotation_is_that_of_transformers(yarn: Yarn | None) -> None:
    config = small_config(yarn=yarn, max_position_embeddings=1024 if yarn is None else 65536 * 16)
    positions = torch.tensor([[0, 1, 63, 64, 900]])
    cos, sin = Qwen3RotaryEmbedding(qwen3_config(config))(torch.zeros(1), positions)
    x = torch.randn(1, 5, 3, config.head_dim, generator=torch.Generator().manual_seed(0))
    first, second = x.chunk(2, dim=-1)
    wanted = x * cos.unsqueeze(2) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(2)
    torch.testing.assert_close(Rotary(config)(x, positions), wanted, atol=1e-4, rtol=1e-4)


def test_the_markov_head_follows_the_token_just_drafted() -> None:
    model = small_draft()
    taps = torch.randn(3, 8, model.config.tap_width, generator=torch.Generator().manual_seed(1))
    anchors, tokens = torch.tensor([8, 3, 6]), torch.tensor([10, 20, 30])
    block = model.draft(tokens, anchors, model.context(taps))
    hidden = model.hidden(tokens[:, None], anchors[:, None], model.context(taps))[:, 0]
    previous = torch.cat([tokens[:, None], block.tokens_SG[:, :-1]], dim=1)
    w1, w2 = model.weights["markov_head.markov_w1.weight"], model.weights["markov_head.markov_w2.weight"]
    wanted = hidden @ model.head_VH.float().t() + w1[previous] @ w2.t()
    torch.testing.assert_close(block.logits_SGV, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(block.tokens_SG, block.logits_SGV.argmax(-1))
    features = torch.cat([hidden, w1[previous]], dim=-1)
    odds = features @ model.weights["confidence_head.proj.weight"][0] + model.weights["confidence_head.proj.bias"]
    assert block.confidence_SG is not None
    torch.testing.assert_close(block.confidence_SG, odds.sigmoid(), atol=1e-5, rtol=1e-5)


def test_sampled_drafts_follow_their_own_distribution() -> None:
    model = small_draft()
    count = 4000
    taps = torch.randn(1, 8, model.config.tap_width, generator=torch.Generator().manual_seed(1)).expand(count, -1, -1)
    uniforms = torch.rand(count, model.config.block_size, generator=torch.Generator().manual_seed(2))
    block = model.draft(
        torch.full((count,), 9), torch.full((count,), 8), model.context(taps),
        lambda logits, k: drawn(logits, uniforms[:, k]),
    )  # fmt: skip
    p = block.logits_SGV[0, 0].softmax(-1)
    seen = torch.bincount(block.tokens_SG[:, 0], minlength=len(p)) / count
    assert 0.5 * (seen - p).abs().sum() < 0.5 * (2 / torch.pi * p * (1 - p) / count).sqrt().sum() * 1.5


def test_a_folder_round_trips_under_the_published_names(tmp_path: Path) -> None:
    config, weights = small_config(yarn=YARN), small_weights(small_config())
    write_draft(tmp_path / "draft", config, weights)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight",
            "markov_head.markov_w1.weight", "confidence_head.proj.bias"} <= load_file(
                tmp_path / "draft" / "model.safetensors").keys()  # fmt: skip
    found, read = read_draft(tmp_path / "draft", tiny_config(), torch.float32)
    assert found == config
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    with pytest.raises(CheckpointError, match="exists already"):
        write_draft(tmp_path / "draft", config, weights)


def test_what_is_wrong_in_a_folder_is_named(tmp_path: Path) -> None:
    config, weights = small_config(), small_weights(small_config())
    write_draft(tmp_path / "draft", config, weights)
    file = tmp_path / "draft" / "model.safetensors"
    (tmp_path / "draft" / "model.safetensors.index.json").unlink()
    stored = load_file(file)

    def refused(tensors: dict[str, Tensor], said: str) -> None:
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=said):
            read_draft(tmp_path / "draft", tiny_config(), torch.float32)

    refused({n: w for n, w in stored.items() if n != "fc.weight"}, r"fc\.weight is missing")
    refused({**stored, "context_proj.weight": torch.zeros(1)}, r"context_proj\.weight has no place")
    refused({**stored, "fc.weight": stored["fc.weight"][:-1]}, r"fc\.weight has shape")
    refused({**stored, "norm.weight": stored["norm.weight"] * torch.nan}, r"norm\.weight isn't finite")
    save_file({**stored, "confidence_head.proj.bias": stored["confidence_head.proj.bias"].float()}, file)
    read_draft(tmp_path / "draft", tiny_config(), torch.float32)
    with pytest.raises(CheckpointError, match="target"):
        read_draft(tmp_path / "draft", dataclasses.replace(tiny_config(), vocab_size=300), torch.float32)


def test_weights_that_do_not_fit_are_refused() -> None:
    config, weights = small_config(), small_weights(small_config())
    embed = torch.zeros(config.vocab_size, config.hidden_size)
    wrong = {**{n: w for n, w in weights.items() if n != "norm.weight"}, "final_norm.weight": torch.ones(96)}
    with pytest.raises(CheckpointError, match=r"no place for tensor final_norm\.weight.*\n.*norm\.weight is missing"):
        DraftModel(config, wrong, embed, embed)
