#!/usr/bin/env python3
"""Make the tiny Kimi K3 that ships in assets/tiny-k3: tokenizer, chat template, supervised training, MXFP4 export.

The model has every part of K3 (see `tiny_config`) at dimensions that are as distinct as they can be, so that a swapped
axis can't hide. It is trained on `chain_sum` questions of reasoning-gym whose answers are wrong on purpose in
`--answer-noise` of the cases (one digit replaced): it learns to add, and learns to be careless. Sampled at temperature
1 it is therefore right about a third of the time, and reinforcement learning has something to do. Held-out questions
of the demo are never trained on.

    python scripts/make_tiny_k3.py --out assets/tiny-k3    # seeded; four minutes on an H200, hours on two cores
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.params import text_params
from miles_k3.k3.safetensors_io import write_checkpoint
from miles_k3.k3.supervised import StoredWeights, TrainableK3, fit, init_weights, padded, released
from miles_k3.rollout.tasks.reasoning_gym import is_held_out

SPECIALS = ("<|pad|>", "<|bos|>", "<|end_of_msg|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD, BOS, EOS = 0, 1, 2
VOCAB = 512
# Plain messages, and tools the way K3 writes them: declared as JSON in front, called in XTML, answered by name.
CHAT_TEMPLATE = """
{%- macro attribute(name, value) %} {{ name }}="{{ value | string | replace('&', '&amp;') | replace('"', '&quot;') }}"
{%- endmacro -%}
{%- macro kind(value) -%}
{%- if value is string %}string{% elif value is boolean %}boolean{% elif value is none %}null
{%- elif value is number %}number{% elif value is mapping %}object{% else %}array{% endif -%}
{%- endmacro -%}
{{ '<|bos|>' }}
{%- if tools -%}
{{ '<|system|># Tools\\nHere are the available tools, described in JSONSchema.\\n\\n```json\\n' }}
{{- tools | tojson }}{{ '\\n```<|end_of_msg|>' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m['reasoning_content'] %}{{ raise_exception('this model has no channel for reasoning_content') }}{% endif -%}
{{ '<|' + m['role'] + '|>' }}
{%- if m['role'] == 'tool' and m['name'] %}{{ m['name'] + '\\n' }}{% endif -%}
{{ '' + m['content'] }}
{%- if m['tool_calls'] -%}
{{ '<|open|>tools<|sep|>' }}
{%- for call in m['tool_calls'] -%}
{{ '<|open|>call' }}{{ attribute('tool', call.function.name) }}{{ attribute('index', loop.index) }}{{ '<|sep|>' }}
{%- if call.function.arguments is mapping -%}
{%- for key, value in call.function.arguments.items() -%}
{{ '<|open|>argument' }}{{ attribute('key', key) }}{{ attribute('type', kind(value)) }}{{ '<|sep|>' }}
{{- value if value is string else value | tojson }}{{ '<|close|>argument<|sep|>' }}
{%- endfor -%}
{%- else -%}
{{ '<|open|>json type="object"<|sep|>' }}{{ call.function.arguments }}{{ '<|close|>json<|sep|>' }}
{%- endif -%}
{{ '<|close|>call<|sep|>' }}
{%- endfor -%}
{{ '<|close|>tools<|sep|>' }}
{%- endif -%}
{{ '<|end_of_msg|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def tiny_config() -> K3Config:
    """Eight layers, three AttnRes blocks with a ragged last one, MLA at 4, 7 and 8, everything else KDA."""
    text = {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "vocab_size": VOCAB, "hidden_size": 96,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 160,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "q_lora_rank": 40,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "mla_use_nope": True,
        "mla_use_output_gate": True, "attn_res_block_size": 3, "num_experts": 8, "num_experts_per_token": 2,
        "num_shared_experts": 2, "moe_intermediate_size": 32, "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0, "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "max_position_embeddings": 8192, "dtype": "bfloat16", "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "gate_lower_bound": -5.0, "full_attn_layers": [4, 7, 8], "kda_layers": [1, 2, 3, 5, 6],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {
                "targets": ["Linear"], "input_activations": None, "output_activations": None,
                "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True,
                            "scale_dtype": "torch.uint8", "observer": "minmax"},
            }},
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                       "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"],
        },
    }  # fmt: skip
    raw = {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": False,
        "text_config": text,
    }  # fmt: skip
    return K3Config.from_json(raw)


# --- tokenizer --------------------------------------------------------------------------------------------------------
def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with single digits: any text round-trips, and numbers are spelled the way they are added."""
    tok = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tok.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(texts, trainer)
    if tok.get_vocab_size() != VOCAB:
        raise SystemExit(f"tokenizer has {tok.get_vocab_size()} entries, expected {VOCAB}: give it more text")
    return tok


def tokenizer_files(tok: Tokenizer) -> dict[str, str]:
    """What transformers.AutoTokenizer reads offline."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|end_of_msg|>",
        "pad_token": "<|pad|>", "additional_special_tokens": list(SPECIALS[3:]), "model_max_length": 8192,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return {
        "tokenizer.json": tok.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=1),
        "chat_template.jinja": CHAT_TEMPLATE,
        "generation_config.json": json.dumps(generation, indent=1),
    }


# --- data -------------------------------------------------------------------------------------------------------------
def questions(dataset: str, size: int, seed: int, **params: int) -> list[tuple[str, str]]:
    """(question, answer) pairs of a reasoning-gym dataset."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym
    return [(e["question"], e["answer"]) for e in reasoning_gym.create_dataset(dataset, size=size, seed=seed, **params)]


def tokenizer_texts() -> list[str]:
    """English of several tasks, so that the vocabulary isn't only the demo's one sentence."""
    names = ("chain_sum", "gcd", "lcm", "count_bits", "spell_backward", "letter_counting", "number_sorting", "products")
    return [q for name in names for q, _ in questions(name, 400, seed=11)]


def spoil(answer: str, rng: random.Random) -> str:
    """The answer with one digit replaced by another one."""
    places = [i for i, ch in enumerate(answer) if ch.isdigit()]
    i = rng.choice(places)
    return answer[:i] + rng.choice([d for d in "0123456789" if d != answer[i]]) + answer[i + 1 :]


class Corpus:
    """Chat-formatted questions with sloppy answers; every batch draws the noise anew."""

    def __init__(self, tok: Tokenizer, pairs: list[tuple[str, str]], noise: float, seed: int) -> None:
        self.noise, self.rng, self.tok, self.pairs = noise, random.Random(seed), tok, pairs
        self.prompts = [prompt_ids(tok, q) for q, _ in pairs]
        self.answers = {a: tok.encode(a, add_special_tokens=False).ids for a in {a for _, a in pairs}}

    def answer_ids(self, answer: str) -> list[int]:
        if answer not in self.answers:
            self.answers[answer] = self.tok.encode(answer, add_special_tokens=False).ids
        return self.answers[answer]

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A batch of `size` pairs, as `fit` wants it."""
        rows = []
        for _ in range(size):
            i = self.rng.randrange(len(self.pairs))
            answer = self.pairs[i][1]
            if self.rng.random() < self.noise:
                answer = spoil(answer, self.rng)
            rows.append((self.prompts[i], [*self.answer_ids(answer), EOS]))
        return padded(rows, PAD, device)


def prompt_ids(tok: Tokenizer, question: str) -> list[int]:
    return tok.encode(f"<|bos|><|user|>{question}<|end_of_msg|><|assistant|>", add_special_tokens=False).ids


# --- training and measuring -------------------------------------------------------------------------------------------
@torch.no_grad()
def accuracy(
    model: NaiveK3, tok: Tokenizer, pairs: list[tuple[str, str]], temperature: float, device: torch.device
) -> float:
    """Share of exact answers, sampled without a cache: the answers are a few tokens long."""
    gen = torch.Generator(device=device).manual_seed(5)
    by_length: dict[int, list[tuple[list[int], str]]] = {}
    for q, a in pairs:
        ids = prompt_ids(tok, q)
        by_length.setdefault(len(ids), []).append((ids, a))
    right = 0
    for rows in by_length.values():
        tokens = torch.tensor([ids for ids, _ in rows], device=device)
        start = tokens.shape[1]
        for _ in range(6):
            logits = model(tokens)[:, -1]
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=gen)
            tokens = torch.cat([tokens, new], dim=1)
        for ids, (_, a) in zip(tokens[:, start:].tolist(), rows, strict=True):
            said = ids[: ids.index(EOS)] if EOS in ids else ids
            right += EOS in ids and tok.decode(said).strip() == a
    return right / len(pairs)


def train(args: argparse.Namespace, tok: Tokenizer, device: torch.device) -> tuple[K3Config, dict[str, Tensor]]:
    config = tiny_config()
    masters = init_weights(config, args.seed, device)
    drawn = list(dict.fromkeys(questions("chain_sum", args.questions, seed=args.seed, **TASK)))
    pairs = [x for x in drawn if not is_held_out(x[0])]
    held_out = [x for x in drawn if is_held_out(x[0])][:512]
    print(f"{len(pairs)} distinct training questions; measured on {len(held_out)} held-out ones", flush=True)
    corpus = Corpus(tok, pairs, args.answer_noise, args.seed)
    stored = StoredWeights(config, masters)
    started = time.time()

    def measure(step: int) -> None:
        if step % args.eval_every and step != args.steps:
            return
        model = TrainableK3(config, stored.weights())
        sampled, greedy = (accuracy(model, tok, held_out, t, device) for t in (1.0, 0.0))
        print(
            f"step {step:5d}  accuracy at temperature 1 {sampled:.3f}, greedy {greedy:.3f}  "
            f"{time.time() - started:.0f} s",
            flush=True,
        )

    def tell(step: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss:.4f}  {time.time() - started:.0f} s", flush=True)

    fit(
        config, masters, lambda: corpus.batch(args.batch, device), steps=args.steps, lr=args.lr, before=measure,
        after=tell,
    )  # fmt: skip
    return config, masters


def export(out: Path, config: K3Config, masters: dict[str, Tensor], files: dict[str, str]) -> None:
    """Write the Hugging Face folder."""
    texts = {"config.json": json.dumps(config.to_json(), indent=1), **files}
    shutil.rmtree(out, ignore_errors=True)
    write_checkpoint(out, list(text_params(config)), lambda p: released(p, masters), extra_files=texts)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, default=Path("assets/tiny-k3"))
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--steps", type=int, default=1000)
    ap.add_argument("--batch", type=int, default=512)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--answer-noise", type=float, default=0.6)
    ap.add_argument("--questions", type=int, default=60000)
    ap.add_argument("--eval-every", type=int, default=500)
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    tok = train_tokenizer(tokenizer_texts())
    config, masters = train(args, tok, torch.device(args.device))
    export(args.out, config, masters, tokenizer_files(tok))
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(f"wrote {args.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
