"""Chat templates of published models from the installed package trl. It keeps them as they were published, and for some also a variant for training,
which has the same text and marks what is generated."""

import copy
import re
from functools import cache
from importlib import metadata

import pytest
from transformers import PreTrainedTokenizerBase

_TAG = re.compile(
    r"<\|[^<>\s]+\|>|<\uff5c[^<>\s]+\uff5c>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[gMASK\]|<end_of_utterance>"
)
_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@cache
def published_template(name: str) -> str:
    """A template by its name in trl, such as "qwen3" or "qwen3_training"; a skipped test without trl."""
    try:
        files = metadata.files("trl") or []
    except metadata.PackageNotFoundError:
        pytest.skip(
            "trl, which brings the published chat templates, is not installed (requirements/dev_no_deps.txt)"
        )
    (path,) = [file for file in files if file.match(f"chat_templates/{name}.jinja")]
    return path.read_text()


def tokenizer_with(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer with a published template, whose tags are tokens as they are in the model's own."""
    template = published_template(name)
    made = copy.deepcopy(tokenizer)
    made.add_tokens(list(_WORDS))
    tags = {*_TAG.findall(template)} - {*made.all_special_tokens}
    made.add_special_tokens({"additional_special_tokens": sorted(tags)})
    if made.bos_token is None:
        made.bos_token = made.eos_token
    made.chat_template = template
    return made
