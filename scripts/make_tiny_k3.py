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
import math
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
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.ops.kda import kda_chunk
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.params import DType, Param, Part, expert_prefix, text_params
from miles_k3.k3.safetensors_io import write_checkpoint
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
        """tokens [B, T] right-padded, and the mask [B, T-1] of positions whose next token is trained on."""
        rows = []
        for _ in range(size):
            i = self.rng.randrange(len(self.pairs))
            answer = self.pairs[i][1]
            if self.rng.random() < self.noise:
                answer = spoil(answer, self.rng)
            rows.append((self.prompts[i], [*self.answer_ids(answer), EOS]))
        width = max(len(p) + len(a) for p, a in rows)
        tokens = torch.full((size, width), PAD)
        mask = torch.zeros(size, width - 1)
        for b, (p, a) in enumerate(rows):
            tokens[b, : len(p) + len(a)] = torch.tensor(p + a)
            mask[b, len(p) - 1 : len(p) + len(a) - 1] = 1.0
        return tokens.to(device), mask.to(device)


def prompt_ids(tok: Tokenizer, question: str) -> list[int]:
    return tok.encode(f"<|bos|><|user|>{question}<|end_of_msg|><|assistant|>", add_special_tokens=False).ids


# --- model ------------------------------------------------------------------------------------------------------------
class TrainableK3(NaiveK3):
    """The oracle with two parts made fast enough to train: the delta rule in chunks, all experts in one product."""

    @staticmethod
    def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        packed = Packed.from_lengths([q.shape[1]] * q.shape[0], q.device)
        streams = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
        out, _ = kda_chunk(streams[0], streams[1], streams[2], streams[3], streams[4], packed)
        return out.unflatten(0, q.shape[:2])

    def experts(self, z: Tensor, weights: Tensor, i: int) -> Tensor:
        w1, w3, w2 = (self.stacked(i, n) for n in ("w1", "w3", "w2"))
        hidden = self.situ(torch.einsum("btz,eiz->btei", z, w1), torch.einsum("btz,eiz->btei", z, w3))
        return torch.einsum("btei,ezi->btz", hidden * weights.unsqueeze(-1), w2)

    def stacked(self, layer: int, which: str) -> Tensor:
        return torch.stack(
            [self.weight(f"{expert_prefix(layer, e)}{which}.weight") for e in range(self.config.num_experts)]
        )


def init_weights(config: K3Config, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Trainable fp32 masters by checkpoint name (experts under `...wN.weight`), spread so that no part is idle."""
    gen = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for p in text_params(config):
        if p.is_scale:
            continue
        shape, leaf = p.logical_shape or p.shape, p.name.removesuffix("_packed").rsplit(".", 2)[-2:]
        out[p.name.removesuffix("_packed")] = _initial(config, leaf, shape, gen).to(device)
    return out


def _initial(c: K3Config, leaf: list[str], shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    def normal(std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=gen) * std + mean

    if leaf[-1] == "A_log":
        values = torch.zeros(shape)
        values[: c.kda_num_heads] = torch.rand(c.kda_num_heads, generator=gen) * 1.5
        return values
    if leaf[-1] == "dt_bias":
        return normal(1.0, -1.0)
    if leaf[-1] == "e_score_correction_bias":
        return normal(0.05)
    if leaf[0].endswith(("norm", "layernorm")):
        return normal(0.05, 1.0)
    if leaf[0].endswith("conv1d"):
        return normal(0.3)
    if leaf[0].endswith("res_proj"):
        return normal(0.05)
    if leaf[0] == "embed_tokens":
        return normal(0.5)
    gain = {"o_proj": 0.5, "down_proj": 0.5, "w2": 0.7, "routed_expert_up_proj": 0.5}.get(leaf[0], 1.0)
    return normal(gain * shape[-1] ** -0.5)


FROZEN = ("A_log", "e_score_correction_bias")


def as_stored(p: Param, master: Tensor) -> Tensor:
    """The value the checkpoint will hold, with a straight-through gradient: BF16, or MXFP4 for experts."""
    with torch.no_grad():
        if p.part is Part.EXPERT:
            stored = mxfp4.dequantize(*mxfp4.quantize(master))
        elif p.dtype is DType.BF16:
            stored = master.bfloat16().float()
        else:
            return master
    return master + (stored - master).detach()


class QuantisedExperts:
    """All experts of the model rounded to MXFP4 together: one call a step instead of one per expert."""

    def __init__(self, config: K3Config, masters: dict[str, Tensor]) -> None:
        self.names = [
            p.name.removesuffix("_packed") for p in text_params(config) if p.part is Part.EXPERT and not p.is_scale
        ]
        self.dense = {p.name: p for p in text_params(config) if p.part is not Part.EXPERT}
        self.masters = masters

    def weights(self) -> dict[str, Tensor]:
        out = {name: as_stored(p, self.masters[name]) for name, p in self.dense.items()}
        flat = torch.cat([self.masters[n].reshape(-1, 32) for n in self.names])
        with torch.no_grad():
            delta = mxfp4.dequantize(*mxfp4.quantize(flat)) - flat
        rounded = flat + delta
        at = 0
        for n in self.names:
            rows = self.masters[n].numel() // 32
            out[n] = rounded[at : at + rows].view_as(self.masters[n])
            at += rows
        return out


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
    leaves = [t.requires_grad_() for n, t in masters.items() if not n.endswith(FROZEN)]
    drawn = list(dict.fromkeys(questions("chain_sum", args.questions, seed=args.seed, **TASK)))
    pairs = [x for x in drawn if not is_held_out(x[0])]
    held_out = [x for x in drawn if is_held_out(x[0])][:512]
    print(f"{len(pairs)} distinct training questions; measured on {len(held_out)} held-out ones", flush=True)
    corpus = Corpus(tok, pairs, args.answer_noise, args.seed)
    optimizer = torch.optim.AdamW(leaves, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _lr_factor(s, args.steps))
    experts = QuantisedExperts(config, masters)
    started = time.time()
    for step in range(args.steps + 1):
        if step % args.eval_every == 0 or step == args.steps:
            model = TrainableK3(config, experts.weights())
            sampled, greedy = (accuracy(model, tok, held_out, t, device) for t in (1.0, 0.0))
            print(
                f"step {step:5d}  accuracy at temperature 1 {sampled:.3f}, greedy {greedy:.3f}  "
                f"{time.time() - started:.0f} s",
                flush=True,
            )
        if step == args.steps:
            break
        tokens, mask = corpus.batch(args.batch, device)
        logits = TrainableK3(config, experts.weights())(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (loss * mask).sum() / mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.time() - started:.0f} s", flush=True)
    return config, {n: t.detach().cpu() for n, t in masters.items()}


def _lr_factor(step: int, total: int) -> float:
    warm = min(1.0, (step + 1) / 100)
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total)))


def export(out: Path, config: K3Config, masters: dict[str, Tensor], files: dict[str, str]) -> None:
    """Write the Hugging Face folder."""

    def get(p: Param) -> Tensor:
        if p.part is Part.EXPERT:
            packed, scale = mxfp4.quantize(masters[p.name.removesuffix("_packed").removesuffix("_scale")])
            return scale if p.is_scale else packed
        return masters[p.name].to(torch.float32 if p.dtype is DType.F32 else torch.bfloat16)

    texts = {"config.json": json.dumps(config.to_json(), indent=1), **files}
    shutil.rmtree(out, ignore_errors=True)
    write_checkpoint(out, list(text_params(config)), get, extra_files=texts)


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
