"""Checks of data: files that do not exist, and keys that do not fit each other."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.checks.values import given_keys, registered_problems
from megarl.config.schema.commands import TrainConfig
from megarl.config.schema.data import SAMPLERS, DataConfig
from megarl.util.files import check_url, is_url

_GLOB_CHARACTERS = "*?["
_STREAMED_SAMPLERS = (None, "random", "sequential")
# Arguments of apply_chat_template that megarl gives itself, or that would make it return something other than the text.
OWN_TEMPLATE_KEYS = (
    "tokenize", "add_generation_prompt", "continue_final_message", "conversation", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


def data_problems(config: TrainConfig, data_files: bool) -> Iterator[str]:
    """Problems of the section data in a resolved configuration.

    Args:
        data_files: whether it must name data files, and they must exist.
    """
    data = config.data
    if data_files:
        if data.train_files is None and data.mixture is None:
            yield (
                "data.train_files is required: the files of the training prompts (or data.mixture, for several data sets)"
            )
        yield from file_problems("data.train_files", data.train_files)
        for name, part in (data.mixture or {}).items():
            yield from file_problems(f"data.mixture.{name}.files", part.files)
        yield from file_problems("data.val_files", data.val_files)
    yield from _source_problems(data)
    yield from _ptx_problems(config)
    yield from _sampler_problems(config)
    yield from template_problems(data.apply_chat_template_kwargs, data.tools_key, data.prompt_key)


def _source_problems(data: DataConfig) -> Iterator[str]:
    """Where the training prompts come from."""
    if data.mixture is not None:
        if data.train_files is not None:
            yield "data.train_files and data.mixture: training prompts come from one of them; leave the other out"
        if not data.mixture:
            yield "data.mixture is empty; give at least one data set: <name>: {files: ..., weight: ...}"
        if data.train_max_samples != -1:
            yield f"data.train_max_samples={data.train_max_samples} counts rows of data.train_files; data.mixture has weights instead"
    if 0 < data.train_max_samples < data.train_batch_size:
        yield (
            f"data.train_max_samples={data.train_max_samples} is less than data.train_batch_size={data.train_batch_size}: "
            "not one batch"
        )


def _ptx_problems(config: TrainConfig) -> Iterator[str]:
    """The texts of the auxiliary language-model loss (PPO-ptx)."""
    texts, coef = config.data.ptx, config.actor_rollout_ref.actor.ptx_coef
    if texts is None:
        if coef > 0:
            yield f"actor_rollout_ref.actor.ptx_coef={coef:g} needs data.ptx: files, batch_size and max_length of texts"
        return
    if coef == 0:
        yield "data.ptx needs actor_rollout_ref.actor.ptx_coef over 0; nothing reads it otherwise"
    yield from file_problems("data.ptx.files", texts.files)
    if texts.text_key is not None and texts.response_key is not None:
        yield (
            f"data.ptx.text_key={texts.text_key!r} and data.ptx.response_key={texts.response_key!r}: texts are plain or "
            "chats; give one of them"
        )
    if texts.truncation == "split" and texts.text_key is None:
        yield "data.ptx.truncation=split needs data.ptx.text_key: only plain text can be learnt in pieces"


def _sampler_problems(config: TrainConfig) -> Iterator[str]:
    data, sampler = config.data, config.data.sampler
    if sampler.name is not None:
        yield from registered_problems(config, "data.sampler.name", sampler.name, SAMPLERS)
    if data.streaming and sampler.name not in _STREAMED_SAMPLERS:
        yield (
            f"data.sampler.name={sampler.name!r} needs all rows at once, which data.streaming=true does not have; "
            "it can be random or sequential"
        )
    if sampler.name == "curriculum":
        key = sampler.key
        if key is None or not (key == "prompt_length" or key.startswith("extra_info.")):
            yield f"data.sampler.key={key}: curriculum sorts by it; it must be prompt_length or extra_info.<name>"
    if sampler.name is None or sampler.name in SAMPLERS:
        own = () if sampler.name == "curriculum" else ("key", "descending", "warm_fraction")
        for name in given_keys(sampler, (*own, "options")):
            reader = "a sampler of a plugin" if name == "options" else "curriculum"
            yield f"data.sampler.{name}={getattr(sampler, name)} is read by {reader}, but data.sampler.name={sampler.name}"


def template_problems(
    template_kwargs: Mapping[str, Any] | None, tools_key: str | None, prompt_key: str | None = None
) -> Iterator[str]:
    """Arguments that a chat template must not be given, of section `data` (its keys apply_chat_template_kwargs, tools_key)."""
    key = "data.apply_chat_template_kwargs"
    for name in template_kwargs or {}:
        if name in OWN_TEMPLATE_KEYS:
            yield f"{key}.{name}: megarl says this to the tokenizer itself; leave it out"
    tools = (template_kwargs or {}).get("tools", [])
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        yield f"{key}.tools={tools!r}: it must be a list of JSON schemas of functions: [{{type: function, function: ...}}]"
    if tools_key is not None and (not tools_key or tools_key in (prompt_key, "messages")):
        yield f"data.tools_key={tools_key!r}: it must be the column of the rows' tools, not that of their messages; or null"


def file_problems(key: str, files: str | Sequence[str] | None) -> Iterator[str]:
    """Problems of `files`, a path, a glob, a URL or a list of them, each of which must lead to a file.

    Of a URL only the protocol is checked, which must be one that can be opened here: nothing is asked of a network.
    """
    if files is None:
        return
    patterns = [files] if isinstance(files, str) else list(files)
    if not patterns:
        yield f"{key} is an empty list; give at least one file"
    for pattern in patterns:
        if is_url(pattern):
            try:
                check_url(pattern)
            except ValueError as error:
                yield f"{key}: {error}"
            continue
        path = Path(pattern).expanduser()
        if path.is_file():
            continue
        if path.is_dir():
            yield f"{key}: {pattern} is a folder; give the files in it, for example {pattern.rstrip('/')}/*.parquet"
        elif not any(character in pattern for character in _GLOB_CHARACTERS):
            yield f"{key}: the file {pattern} does not exist (working directory {Path.cwd()})"
        elif not any(Path(match).is_file() for match in glob.iglob(str(path), recursive=True)):
            yield f"{key}: no file matches {pattern} (working directory {Path.cwd()})"
