"""A small tokenizer and chat template as the Hub's are."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

# what templates on the Hub use: macros, namespaces, loop controls, filters, reversed slices
TEMPLATE = """
{%- macro say(role, text) %}{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{% endmacro %}
{%- if tools %}
    {{- say('system', tools | tojson) }}
{%- endif %}
{%- set seen = namespace(last='') %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set seen.last = message.content %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {% if message.role == 'assistant' %}
        {% generation %}
        {{- say(message.role, message.content.split('</think>')[-1].lstrip('\\n')) }}
        {% endgeneration %}
    {% else %}
        {{- say(message.role, message.content) }}
    {% endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
[{{ strftime_now('%Y')[:2] }}|{{ eos_token }}|{{ seen.last | trim }}]
"""

TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces\n\n\ttab",
    "It's 12+30=42, isn't it?",
    "naïve café — ½ ﬁ",
    "日本語のテキスト",
    "emoji 👩‍👩‍👧 and flags 🇩🇪",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|endoftext|>b",
    "\x00\x7f\ufeff",
    "e\u0301 vs é",
    "Copy: AB12",
    "x" * 500,
]


def build(directory: Path) -> Path:
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator(TEXTS * 3, trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
