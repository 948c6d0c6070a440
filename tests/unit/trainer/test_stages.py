"""A pipeline cut anywhere after layer 0 gives the same outputs and gradients, through every bank row."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import random_tokens
from helpers.tiny import tiny_base
from helpers.trainers import ADAPTER, CONFIG, adapter_tensors, tiny_trainer, weights

from miles_k3.config import TrainerSection
from miles_k3.trainer import lora
from miles_k3.trainer.adapter_shards import exported_pieces
from miles_k3.trainer.build import transformer_config
from miles_k3.trainer.distributed import Ranks
from miles_k3.trainer.model.stage import K3Stage
from miles_k3.trainer.model.stream import Stream, Wanted

LENGTHS = (9, 17, 5)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7])
def test_two_stages_equal_one(cut: int) -> None:
    trainer = tiny_trainer(calm=True)  # brings megatron's groups up
    factory = lora.Factory(
        CONFIG, ADAPTER, seed=0, dtype=torch.float32, device=torch.device("cpu"), ranks=trainer.ranks
    )
    config = transformer_config(CONFIG, TrainerSection(), torch.float32)
    base = tiny_base(CONFIG, weights(True))
    stages = [K3Stage(config, CONFIG, base, factory, layers) for layers in (range(cut), range(cut, 8))]
    stream = Stream.of(torch.cat(random_tokens(LENGTHS)), LENGTHS, CONFIG)
    places = torch.arange(0, 31, 2)
    wanted = Wanted.of(stream.layout, places, stream.tokens_L[places], 1.0)
    for model in (trainer.model, *stages):
        with torch.no_grad():
            for name, piece in exported_pieces([model], Ranks()).items():
                piece.tensor.copy_(adapter_tensors()[name])

    stages[0].set_input_tensor([None])
    sent = stages[0](stream)
    assert sent.shape == (31, 1, (1 + CONFIG.bank_rows(cut)) * CONFIG.hidden_size)
    received = sent.detach().requires_grad_()
    stages[1].set_input_tensor([received])
    found = stages[1](stream, wanted)
    found[0].sum().backward()
    assert received.grad is not None
    sent.backward(received.grad)
    rows = received.grad.squeeze(1).chunk(1 + CONFIG.bank_rows(cut), dim=-1)
    assert all(row.any() for row in rows)

    whole = trainer.model(stream, wanted)
    whole[0].sum().backward()
    torch.testing.assert_close(found, whole)
    reference = _gradients(trainer.model)
    pieces = {**_gradients(stages[0]), **_gradients(stages[1])}
    assert pieces.keys() == reference.keys()
    for name, gradient in reference.items():
        torch.testing.assert_close(pieces[name], gradient)


def _gradients(model: K3Stage) -> dict[str, torch.Tensor]:
    """Megatron's wrapper moves a gradient to `main_grad`; a bare stage keeps it in `grad`."""
    found = {n: getattr(p, "main_grad", p.grad) for n, p in model.named_parameters() if p.requires_grad}
    return {name: g.clone() for name, g in found.items() if g is not None}
