"""The model's own layers on the unified pool's views, while its blocks move."""

from __future__ import annotations

import dataclasses

import torch
from helpers.engines import make_engine, random_prompts
from helpers.pool_driver import CPU, poison
from helpers.tiny import tiny_config

from miles_k3.rollout.cache.blocks import Kind
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.cache.unified import UnifiedPool
from miles_k3.rollout.embedded.batch import CacheRows, Chunk, DecodeBatch, chunk_batch
from miles_k3.rollout.embedded.lora import StepAdapters


def decode(model, pool: BlockPool, tokens: list[int], contexts: list[int], slots: list[int], pages: list[list[int]]):
    """Logits of one more token a request."""
    size, longest = pool.page_size, max(map(len, pages))
    table_BP = pool.page_rows([[*held, *[0] * (longest - len(held))] for held in pages])
    at_B = torch.tensor(contexts)
    write_T = table_BP.gather(1, (at_B // size)[:, None]).squeeze(1) * size + at_B % size
    rows = CacheRows(slots=pool, pages=pool, slots_B=pool.slot_rows(slots), slot_range=None, write_T=write_T)  # type: ignore
    bias_BS = torch.zeros(len(slots), longest * size).masked_fill_(
        torch.arange(longest * size) > at_B[:, None], -torch.inf
    )
    batch = DecodeBatch(tokens_T=torch.tensor(tokens), cache=rows, table_BP=table_BP, bias_B1S=bias_BS.unsqueeze(1))
    return model.logits(model.hidden(batch, StepAdapters())[0])


def prefill(model, pool: BlockPool, prompt: list[int], slot: int, pages: list[int]) -> None:
    at_T = torch.arange(len(prompt))
    write_T = pool.page_rows(pages)[at_T // pool.page_size] * pool.page_size + at_T % pool.page_size
    rows = CacheRows(slots=pool, pages=pool, slots_B=pool.slot_rows([slot]), slot_range=None, write_T=write_T)  # type: ignore
    batch = chunk_batch([Chunk(tokens=prompt, context=0, slot=slot, version=0)], None, CPU)
    model.hidden(dataclasses.replace(batch, cache=rows), StepAdapters())


@torch.inference_mode()
def test_a_model_decodes_on_moving_blocks() -> None:
    """Requests decode while others leave, blocks move under them, and all free memory is NaN: as without caches."""
    model = make_engine().runner.model
    layout = Layout.for_model(tiny_config(), page_size=4, dtype=torch.float32)
    pool = UnifiedPool(layout, 8 * layout.slot_bytes + 60 * layout.page_bytes, CPU)
    prompts = random_prompts(6, low=5, high=20, seed=3)
    answers = random_prompts(6, low=9, high=9, seed=4)
    slots, pages = [], []
    for prompt in prompts:
        slots.append(pool.take_slot())
        pages.append(pool.take_pages(pool.pages_for(len(prompt) + 9)))
    pool.flush()
    poison(pool)
    for prompt, slot, held in zip(prompts, slots, pages, strict=True):
        prefill(model, pool, prompt, slot, held)
    live, out = list(range(6)), {i: [] for i in range(6)}
    for step in range(9):
        if step in (3, 5):
            gone = live.pop(0)
            pool.give_slots([slots[gone]])
            pool.give_pages(pages[gone])
        pool.flush()
        poison(pool)
        with pool.forward():
            logits = decode(
                model, pool, [answers[i][step] for i in live], [len(prompts[i]) + step for i in live],
                [slots[i] for i in live], [pages[i] for i in live],
            )  # fmt: skip
        for i, row in zip(live, logits, strict=True):
            out[i].append(row)
    assert pool.places.ends[Kind.SLOT].num_moved == 2
    assert pool.places.ends[Kind.PAGE].num_moved > 5
    for i in live:
        sequence = prompts[i] + answers[i]
        batch = chunk_batch([Chunk(tokens=sequence, context=0, slot=0, version=0)], None, CPU)
        cold = model.logits(model.hidden(batch, StepAdapters())[0])[len(prompts[i]) :]
        torch.testing.assert_close(torch.stack(out[i]), cold, rtol=0, atol=1e-4)
