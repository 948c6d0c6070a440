"""Names of tasks, and the real tokenizer's template."""

import pytest
from unit.rollout.tasks.fakes import CharTokenizer

from miles_k3.config import TaskSection
from miles_k3.errors import ConfigError
from miles_k3.rollout.tasks.registry import make_task


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gim:gcd", "expected one of reasoning_gym:<dataset>, jsonl:<path>; did you mean 'reasoning_gym'"),
        ("gsm8k", "task.name is 'gsm8k', expected one of"),
        ("jsonl", "expected one of"),
        ("jsonl:", "expected one of"),
        (":x", "expected one of"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ConfigError, match=message):
        make_task(TaskSection(name=name), CharTokenizer(), seed=0)


def test_a_tokenizer_without_template_is_refused():
    tokenizer = CharTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"tokenizer 'characters' has no chat template.*chat_template.jinja"):
        make_task(TaskSection(name="reasoning_gym:gcd"), tokenizer, seed=0)


def test_a_transformers_tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(i): i for i in [10, *range(32, 127)]}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="~"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="~",
        chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    )
    section = TaskSection(name="reasoning_gym:gcd", system_prompt="Short.", max_prompt_tokens=500)
    prompt = make_task(section, tokenizer, seed=0).next(1)[0]
    assert "".join(map(chr, prompt.token_ids)) == f"[system]Short.[user]{prompt.text}[assistant]"
    assert all(type(token) is int for token in prompt.token_ids)
