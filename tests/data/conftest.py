"""A small byte-level tokenizer with Qwen's chat template, made once."""

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.arithmetic import arithmetic_texts
from megarl.models.tiny import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(arithmetic_texts(500), 512)
