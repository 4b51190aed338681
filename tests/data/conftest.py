"""A small byte-level tokenizer with Qwen's chat template, made once."""

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.examples.arithmetic import arithmetic_texts
from megarl.examples.tiny_model import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(arithmetic_texts(500), 512)
