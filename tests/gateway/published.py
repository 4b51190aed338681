"""Tokenizers with published templates, made once."""

from functools import cache

from transformers import PreTrainedTokenizerBase

from examples.tiny_model import train_tokenizer
from tests.data.published_templates import tokenizer_with

TEXTS = ["What is the weather in Paris? It rains 3 times."]


@cache
def published(name: str) -> PreTrainedTokenizerBase:
    """A small tokenizer with a published template."""
    return tokenizer_with(train_tokenizer(TEXTS, 400), name)
