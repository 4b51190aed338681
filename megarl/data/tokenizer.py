"""Tokenizers and chat templates: loading them, and rendering messages to token ids."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from tokenizers import Regex, Tokenizer, normalizers

from megarl.data.chats import adapted, lost_call

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

# Used for tokenizers that bring no chat template: one line a message, tagged with its role; an assistant's line
# ends with the end token, and a prompt ends with the assistant's line opened.
PLAIN_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

DEFINITION_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
TOKENIZER_FILES = (
    DEFINITION_FILE,
    "tokenizer_config.json",
    SENTENCEPIECE_FILE,
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
# of the template itself, and of its operations on values of unexpected types
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, AttributeError)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# words, digits, punctuation, runs of white space, other scripts: where splitting rules differ
_PROBE = "Hello there, it's 1234 + 5.67 = x_9!\n\n  (Ça va? 漢字)  end"
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON may have one alone, and UTF-8 may not
_SENTENCEPIECE_BPE = 2  # TrainerSpec.ModelType.BPE in sentencepiece_model.proto


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder (or Hub id); it always has a chat template.

    A folder whose only tokenizer file is a SentencePiece `tokenizer.model` is read from that file alone. A
    tokenizer without chat template gets `PLAIN_CHAT_TEMPLATE`, with a warning.

    Raises:
        ValueError: the folder holds no tokenizer, or it cannot be read.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        present = tokenizer_files(folder)
        if present == [SENTENCEPIECE_FILE]:
            tokenizer = _from_sentencepiece(folder)
        else:
            tokenizer = _as_defined(_from_auto(str(folder), trust_remote_code), folder)
    elif str(path).startswith(("/", ".", "~")):
        raise ValueError(f"tokenizer folder {path} does not exist")
    else:
        tokenizer = _from_auto(str(path), trust_remote_code)
    if tokenizer.chat_template is None:
        warnings.warn(
            f"the tokenizer of {path} has no chat template: messages are rendered as plain lines "
            f'("user: ...", then "assistant:")',
            stacklevel=2,
        )
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def tokenizer_files(folder: Path) -> list[str]:
    """The TOKENIZER_FILES that a folder has.

    Raises:
        ValueError: it has none of them.
    """
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise ValueError(f"folder {folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    return present


def _from_auto(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    import transformers  # takes 1.5 s of a core: ranks that read no text do without

    try:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer could be loaded from {path}: {error}") from error


def _as_defined(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that tokenizer.json defines, if AutoTokenizer gave another.

    transformers 5 rebuilds a tokenizer from vocabulary and merges by the class that it has for the model's
    family: a Qwen2 model with a tokenizer of another kind gets Qwen's splitting rules, and other ids, without
    a word.
    """
    import transformers

    if not tokenizer.is_fast or not (folder / DEFINITION_FILE).is_file():
        return tokenizer
    defined = Tokenizer.from_file(str(folder / DEFINITION_FILE))
    found = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    if found == defined.encode(_PROBE, add_special_tokens=False).ids:
        return tokenizer
    warnings.warn(
        f"transformers loads the tokenizer of {folder} as {type(tokenizer).__name__}, which gives other ids "
        f"than its {DEFINITION_FILE}; that file is used",
        stacklevel=3,
    )
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


def _from_sentencepiece(folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer with the ids that SentencePiece itself gives.

    AutoTokenizer does not help: without a tokenizer_config.json transformers 5.12 builds a tokenizer from
    the SentencePiece pieces without the leading space ("▁") that the model was trained with. LlamaTokenizer
    has the space, but assumes the normalisation of Llama's own model, which is replaced by this file's.
    """
    import transformers
    from google.protobuf.message import DecodeError  # two packages that only such folders need
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString((folder / SENTENCEPIECE_FILE).read_bytes())
    except DecodeError as error:
        raise ValueError(f"{folder / SENTENCEPIECE_FILE} is not a SentencePiece model: {error}") from error
    if model.trainer_spec.model_type != _SENTENCEPIECE_BPE or not model.normalizer_spec.add_dummy_prefix:
        raise ValueError(
            f"{folder / SENTENCEPIECE_FILE} is not a SentencePiece BPE model with a dummy prefix, the one kind "
            "that can be read without a tokenizer_config.json; save the tokenizer with transformers "
            "(save_pretrained) first"
        )
    tokenizer = transformers.LlamaTokenizer.from_pretrained(str(folder))
    steps: list[normalizers.Normalizer] = []
    if model.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap))
    if model.normalizer_spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        # one leading space stays: it becomes the "▁" that would otherwise be put before the text
        steps.append(normalizers.Replace(Regex(r" \z"), ""))
    if steps:
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that the tokenizer's chat template makes of messages, in the forms that the template reads.

    Args:
        messages: with all their fields (see `megarl.data.chats`).
        template_kwargs: further keywords for the template, such as `tools` or enable_thinking.

    Raises:
        ValueError: the template refuses the messages (for example roles that do not alternate).
    """
    keywords = dict(template_kwargs or {})
    chat = adapted_messages(tokenizer, messages, keywords)
    try:
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt, **keywords
        )
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    if any(lost_call(message, text) is not None for message in chat):
        warnings.warn(
            "the chat template does not write the tool_calls of messages, so their answers have no question; use a "
            "template that does, or write calls into the content",
            stacklevel=2,
        )
    return text


def adapted_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Messages in the forms that the chat template reads."""
    template = _template(tokenizer, template_kwargs)
    if template is None:
        return [dict(message) for message in messages]
    return adapted(messages, template, tokenizer.special_tokens_map)


def _template(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str | None:
    """The chat template that these keywords choose; None: the tokenizer (mistral-common's) renders chats by code."""
    try:
        return tokenizer.get_chat_template(
            template_kwargs.get("chat_template"), tools=template_kwargs.get("tools")
        )
    except NotImplementedError:
        return None


def marked_generation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]] | None:
    """Token ids of a chat, and which of them the template marks as generated; None: it has no such marks.

    Raises:
        ValueError: the template refuses the messages.
    """
    keywords = dict(template_kwargs or {})
    template = _template(tokenizer, keywords)
    if template is None or not _GENERATION.search(template) or not tokenizer.is_fast:
        return None
    try:
        found = tokenizer.apply_chat_template(
            adapted_messages(tokenizer, messages, keywords),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **keywords,
        )
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    return list(found["input_ids"]), [bool(flag) for flag in found["assistant_masks"]]


ROWS_AT_ONCE = 256


def decode_texts(tokenizer: PreTrainedTokenizerBase, ids: pa.ChunkedArray) -> list[str]:
    """The texts of a column of token ids, without special tokens; a part at a time, since a token takes 36 bytes as Python has it."""
    texts: list[str] = []
    for start in range(0, len(ids), ROWS_AT_ONCE):
        part = ids.slice(start, ROWS_AT_ONCE).to_pylist()
        texts += tokenizer.batch_decode(part, skip_special_tokens=True)
    return texts


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts; the template has written all special tokens, so none is added.

    Raises:
        ValueError: a text is no Unicode.
    """
    try:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    except TypeError:
        for text in texts:
            check_unicode(text)
        raise


def check_unicode(text: str) -> None:
    """Raise ValueError if a text is no Unicode: no tokenizer and no table takes it."""
    if _SURROGATE.search(text):
        raise ValueError("a text has half of a surrogate pair, such as of an emoji that was cut in two")
