"""The tiny model's tokenizer: byte-level BPE, which encodes any text, with Qwen's chat markers and template."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from . import english

VOCAB_SIZE = 512
PAD, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYSTEM = "You are a helpful assistant."
PHRASES = ("Remember:", "What is", "Copy:", "Sort:", "Complete:", "system", "user", "assistant", SYSTEM)

# A word takes the space before it. A capital that begins no word, a digit and a white space each stand alone: keys,
# codes and numbers are one token a character everywhere.
PIECES = r" ?\p{Lu}?\p{Ll}+|\p{Lu}|\p{N}| ?[^\s\p{Lu}\p{Ll}\p{N}]+|\s"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build() -> Tokenizer:
    """Train the tokenizer: bytes and merges first, the special tokens at the end, VOCAB_SIZE in all."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # every example holds some of the phrases: make them few tokens
    tokenizer.train_from_iterator([*english.vocabulary(), *PHRASES * 100], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """The tokenizer's files, by name, in a checkpoint whose context is `context` tokens."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START, END],
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode() + b"\n",
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }
