#!/usr/bin/env python3
"""Teach the tiny K3 to count, for a task with long answers to draft: "Count from 17 to 26." -> "17 18 ...".

The demo's answers have 2 to 4 tokens, too few for blocks of 7. This is a supervised warm-up by the trainer's own step:
right answers with advantage 1, at the trainer's own log-probabilities, make the policy gradient that of the likelihood.
FOLDER becomes what a run leaves: recipe.yaml and adapter/, so that every command takes it.

    python scripts/make_counting_run.py --out runs/counting          # minutes on two cores
    miles-k3 eval runs/counting
    miles-k3 draft train runs/counting --out runs/counting-draft --from assets/tiny-k3-draft
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from miles_k3.adapters.peft_io import save_peft
from miles_k3.assemble import load_model, make_trainer
from miles_k3.batch import make_batch
from miles_k3.config import Recipe
from miles_k3.recipe import dump_resolved, load_recipe
from miles_k3.rollout.tasks.registry import make_task
from miles_k3.types import Completion, FinishReason, Grade, Group, Prompt, Sample
from miles_k3.world import ALONE

LENGTHS = range(6, 13)
LAST = 99
WORDS = ("tree", "river", "stone", "cloud", "paper", "lamp", "green", "seven", "north", "glass")


def row(first: int, count: int) -> dict[str, str]:
    numbers = range(first, first + count)
    return {"question": f"Count from {first} to {numbers[-1]}.", "answer": " ".join(map(str, numbers))}


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def write_questions(folder: Path) -> Path:
    """All of them, in an order of their own; a tenth is held out by the task."""
    rows = [row(a, n) for n in LENGTHS for a in range(1, LAST - n + 2)]
    random.Random(0).shuffle(rows)
    return write_rows(folder / "counting.jsonl", rows)


def write_other_questions(folder: Path) -> None:
    """Nothing that it is taught: lengths.jsonl, very short and very long answers; bimodal.jsonl, every other question
    about nothing, which it answers with what no draft foresees."""
    rng = random.Random(1)
    lengths = [row(rng.randrange(1, LAST - n), n) for _ in range(160) for n in (2, 3, 14, 20)]
    rng.shuffle(lengths)
    both = []
    for _ in range(320):
        both.append(row(rng.randrange(1, 86), rng.randrange(6, 13)))
        question = f"Tell me about {' '.join(rng.sample(WORDS, 3))} {rng.randrange(1000)}?"
        both.append({"question": question, "answer": "no"})
    rng.shuffle(both)
    for name, rows in (("lengths", lengths), ("bimodal", both)):
        write_rows(folder / f"{name}.jsonl", list({r["question"]: r for r in rows}.values()))


def counting_recipe(folder: Path, steps: int, lr: float) -> Recipe:
    path = write_questions(folder)
    return load_recipe("tiny-cpu", [
        f"run.folder={folder.parent}", f"run.name={folder.name}", f"run.steps={steps}", f"task.name=jsonl:{path}",
        'task.params={"prompt_column": "question", "eval_fraction": 0.1}', "task.scorer=exact",
        "rollout.sampling.max_new_tokens=48", "rollout.prompts_per_step=32", "rollout.group_size=1",
        "algorithm.advantage=none", "algorithm.drop_equal_groups=false", f"trainer.lr={lr}", "lora.rank=16",
        "lora.alpha=32.0", "trainer.lr_warmup_steps=10", "eval.prompts=60",
    ]).recipe  # fmt: skip


def right_answers(prompts: list[Prompt], tokenizer, trainer, end: int) -> list[Group]:
    answers = [(*tokenizer.encode(p.answer, add_special_tokens=False), end) for p in prompts]
    scores = trainer.score([(*p.token_ids, *a) for p, a in zip(prompts, answers, strict=True)])
    return [
        Group(prompt=p, samples=(
            Sample(
                prompt=p, grade=Grade(reward=1.0), loss_mask=(True,) * len(a),
                completion=Completion(
                    token_ids=a, logprobs=tuple(s[-len(a) :].tolist()), text=p.answer, finish_reason=FinishReason.STOP,
                    adapter_version=trainer.version,
                ),
            ),
        ))
        for p, a, s in zip(prompts, answers, scores, strict=True)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    folder = args.out.absolute()
    folder.mkdir(parents=True)
    recipe = counting_recipe(folder, args.steps, args.lr)
    write_other_questions(folder)
    model = load_model(recipe, ALONE)
    trainer, task = make_trainer(recipe, model), make_task(recipe.task, model.tokenizer, seed=0)
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        groups = right_answers(
            task.next(recipe.rollout.prompts_per_step), model.tokenizer, trainer, model.config.eos_token_id
        )
        batch = make_batch(
            groups, recipe.algorithm, micro_batch_tokens=recipe.trainer.micro_batch_tokens, updates_per_rollout=1,
            temperature=1.0,
        )  # fmt: skip
        trainer.step(batch)
        if step % 10 == 0:
            logprobs = [x for g in groups for s in g.samples for x in s.completion.logprobs]
            seconds = time.perf_counter() - started
            print(f"step {step}: {-sum(logprobs) / len(logprobs):.4f} nats a token, {seconds:.0f} s", flush=True)
    save_peft(folder / "adapter", trainer.export_adapter(), recipe.model.path)
    (folder / "recipe.yaml").write_text(dump_resolved(recipe), encoding="utf-8")


if __name__ == "__main__":
    main()
