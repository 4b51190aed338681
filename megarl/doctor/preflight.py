"""Mistakes in a run's configuration, models and data, found before any process starts and raised in one message.

It takes about a second: neither torch nor transformers nor Ray is imported, and only the beginnings of files are read. Mistakes that
need a tokenizer, every row or another process are found when the run reads its inputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import (
    DataConfig,
    DPOConfig,
    EvalConfig,
    EvalDataConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
    TuningConfig,
    config_problems,
    fit_problems,
    learns_rankings,
    reference_key,
    resolve,
    taught_references,
)
from megarl.config.checks.data import file_problems
from megarl.config.checks.layout import split_sequences
from megarl.config.loading.hub import fetch_models, model_problems
from megarl.config.problems import raise_if_any
from megarl.config.schema.commands import rollout_section
from megarl.data.chats import ChatKeywords
from megarl.data.files import (
    Column,
    DataFile,
    iter_rows,
    lookup,
    missing_columns,
    num_rows,
    resolve_files,
    with_holders,
    without_filled_nulls,
)
from megarl.data.labels import LabelledKeys, read_labelled
from megarl.data.preferences import PreferenceKeys, read_ranking
from megarl.data.prompts import PromptReader, Row
from megarl.data.sft import chat_columns, chat_of_row, text_of_row
from megarl.data.tokenizer import tokenizer_files
from megarl.doctor.computation import check_computation
from megarl.doctor.sparse import stage_problems
from megarl.environments import find_environment
from megarl.environments.environment import ENVIRONMENTS
from megarl.gateway.call import find_function
from megarl.models import ModelConfig, read_model_config
from megarl.models.weight_files import stored_tensors
from megarl.trainer.roles.adapters import adapter_problems
from megarl.trainer.run.earlier_runs import likely_refusals
from megarl.trainer.stages.prompt_data import (
    labelled_keys,
    may_lack,
    preference_keys,
    reading,
    training_reading,
)
from megarl.util.gpus import gpus_here

Config = TrainConfig | TuningConfig | EvalConfig


def preflight(config: Config) -> None:
    """Check the keys of a configuration, resolved or not, and the models' configurations, data and checkpoints that they name.

    Models that are named by their id on the Hub are checked (and their configurations downloaded) once all keys are right.

    Raises:
        ValueError: one line for each key, file or layout that is wrong.
    """
    full = resolve(config)
    problems, config = config_problems(config, full), full
    problems += _weight_problems(config)
    if not problems:
        config = fetch_models(config, weights=False)
    models, unreadable = _read_models(config)
    taught = list(taught_references(config)) if isinstance(config, TrainConfig) else []
    own, teachers = models[: len(models) - len(taught)], models[len(models) - len(taught) :]
    by_role = dict(zip(taught, teachers, strict=True))
    fitting = fit_problems(config, *own, teachers=by_role)
    problems += [*unreadable, *fitting, *_vocabulary_problems(config, models[0])]
    problems += [*_tokenizer_problems(config), *_environment_problems(config), *data_problems(config)]
    problems += [*_attention_problems(config), *delta_net_problems(models[0])]
    if not unreadable and not isinstance(config, EvalConfig):
        problems += likely_refusals(config)
    if not problems and not isinstance(config, EvalConfig):  # what follows needs valid layouts
        problems += [*adapter_problems(config, *models[:2]), *stage_problems(config, *own, teachers=by_role)]
    raise_if_any("configuration", problems)


def _read_models(config: Config) -> tuple[list[ModelConfig | None], list[str]]:
    """The facts of the trained or evaluated model, the critic, the reward model and the teachers (None: none readable), and the problems."""
    facts: dict[str, ModelConfig | str] = {}  # by folder; a str is its problem
    models: list[ModelConfig | None] = []
    for key, path in _model_paths(config).items():
        # A missing folder is reported by config_problems; an id on the Hub is no folder yet.
        if path is None or list(model_problems(key, path)) or not Path(path).expanduser().is_dir():
            models.append(None)
            continue
        if path not in facts:
            try:
                facts[path] = read_model_config(path)
                check_computation(facts[path])
            except (ValueError, OSError) as error:
                facts[path] = f"{key}: {error}"
        found = facts[path]
        models.append(None if isinstance(found, str) else found)
    return models, [found for found in facts.values() if isinstance(found, str)]


def _model_paths(config: Config) -> dict[str, str | None]:
    """The keys of the trained or evaluated model, the critic, the reward model and the teachers, with their paths; None: there is none."""
    if not isinstance(config, TrainConfig):
        return {"model.path": config.model.path}
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    return {
        "actor_rollout_ref.model.path": policy.model.path,
        "critic.model.path": None if critic is None else critic.model.path,
        "reward_model.model.path": reward.model.path if reward.enable else None,
        **{
            f"{reference_key(role)}.model.path": ref.model.path
            for role, ref in taught_references(config).items()
        },
    }


def _weight_problems(config: Config) -> Iterator[str]:
    """Problems of models' weight files; models of the Hub are checked after they are fetched."""
    for path, key in {path: key for key, path in reversed(_model_paths(config).items())}.items():
        if path is not None and (Path(path).expanduser() / "config.json").is_file():
            try:
                stored_tensors(path)
            except (ValueError, OSError) as error:
                yield f"{key}: {error}"


def _tokenizer_problems(config: Config) -> Iterator[str]:
    """Problems of tokenizers' folders; a missing folder is reported by config_problems."""
    if isinstance(config, TrainConfig):
        paths = {"actor_rollout_ref.model.tokenizer_path": config.actor_rollout_ref.model.tokenizer_path}
        if config.reward_model.enable:
            paths["reward_model.model.input_tokenizer"] = config.reward_model.model.input_tokenizer
    else:
        paths = {"model.tokenizer_path": config.model.tokenizer_path}
    for key, path in paths.items():
        if path is not None and Path(path).expanduser().is_dir():
            try:
                tokenizer_files(Path(path).expanduser())
            except ValueError as error:
                yield f"{key}: {error}"


def check_environment(config: TrainConfig | EvalConfig) -> None:
    """Check that the environment exists and takes the options, or that agents are there; users' plugins have been imported.

    Raises:
        ValueError: see `find_environment` and `find_function`.
    """
    _, rollout = rollout_section(config)
    gateway, multi_turn = rollout.gateway, rollout.multi_turn
    if gateway.enable:
        for key, name in (("agent", gateway.agent), ("score", gateway.score)):
            if name is not None and (key == "score" or gateway.python is None):
                find_function(name, f"rollout.gateway.{key}")
    if multi_turn.enable and multi_turn.environment is not None:
        find_environment(multi_turn.environment, multi_turn.options or {})


def _environment_problems(config: Config) -> Iterator[str]:
    """Problems of an environment's options; an unknown name is reported by config_problems, or is of a plugin imported later."""
    if (
        isinstance(config, TuningConfig)
        or rollout_section(config)[1].multi_turn.environment not in ENVIRONMENTS
    ):
        return
    try:
        check_environment(config)
    except ValueError as error:
        yield str(error)


def _attention_problems(config: Config) -> Iterator[str]:
    """Without Transformer Engine (megarl/megatron/cpu/attention.py) each context parallel rank would hold the full attention scores of a sequence."""
    if isinstance(config, EvalConfig) or importlib.util.find_spec("transformer_engine") is not None:
        return
    if (keys := split_sequences(config)) and gpus_here():
        yield (
            f"{keys[0]}: context parallelism on GPUs needs Transformer Engine, which is not installed (requirements/gpu.txt): without "
            "its kernels attention has no place for long sequences; install it, or set context_parallel_size to 1"
        )


def delta_net_problems(model: ModelConfig | None) -> Iterator[str]:
    """Problems of gated delta nets, which beside Transformer Engine's layers have flash-linear-attention's kernels
    (`megarl.megatron.transformer_config`)."""
    there = importlib.util.find_spec
    if model is None or model.delta_net is None or there("transformer_engine") is None or there("fla"):
        return
    if gpus_here():
        yield (
            f"{model.family}: gated delta nets need flash-linear-attention's kernels on GPUs, which are not installed; install fla-core "
            "(requirements/gpu.txt)"
        )


def _vocabulary_problems(config: Config, model: ModelConfig | None) -> Iterator[str]:
    """Engines on GPUs have equal shares of the vocabulary, padded to a multiple of 64; on a CPU SGLang (0.5.21) pads further."""
    if model is None or isinstance(config, TuningConfig):
        return
    key, rollout = rollout_section(config)
    cutting, ranks = f"{key}.tensor_model_parallel_size", rollout.tensor_model_parallel_size
    if rollout.data_parallel_lm_head:  # the ranks of a group of data parallel attention share the head
        cutting += " / attention_data_parallel_size"
        ranks //= max(rollout.attention_data_parallel_size, 1)
    padded = -(-model.vocab_size // 64) * 64
    if ranks > 0 and padded % ranks and gpus_here():
        yield (
            f"{cutting}={ranks} does not divide the model's {model.vocab_size} tokens, padded to {padded}, "
            "as SGLang needs it on GPUs; a power of two up to 64 does"
        )


ROWS = 16  # rows of each file that are checked


class _Rows(NamedTuple):
    """The requirements on the rows of a file.

    Attributes:
        columns: columns that are read.
        needed: maps the columns of a file to those that it must have.
        check: raises a ValueError for a row that cannot be used.
    """

    columns: Sequence[str]
    needed: Callable[[Sequence[str]], Sequence[Column]]
    check: Callable[[Row], object]


class _Source(NamedTuple):
    """The files that a key names.

    Attributes:
        batch: (key, rows) of a batch, which the files must fill at least once; None: any number of rows is enough.
    """

    key: str
    files: str | tuple[str, ...] | None
    rows: _Rows
    batch: tuple[str, int] | None = None


def data_problems(config: TrainConfig | TuningConfig | EvalConfig) -> Iterator[str]:
    """Problems of the data of a resolved configuration, a line for each file: its first wrong row of the first `ROWS`.

    Remote files are not checked; missing files are reported by `check_config`.
    """
    sources = {
        TrainConfig: _of_training,
        EvalConfig: _of_evaluation,
        SFTConfig: _of_sft,
        RMConfig: _of_rankings,
        DPOConfig: _of_rankings,
    }[type(config)]
    for source in sources(config):
        if source.files is None or list(file_problems(source.key, source.files)):
            continue
        names = [source.files] if isinstance(source.files, str) else list(source.files)
        try:
            files = [file for file in resolve_files(names) if not file.is_remote]
        except ValueError as error:  # of a server, or a file that is given twice
            yield f"{source.key}: {error}"
            continue
        wrong = [f"{source.key}: {text}" for file in files for text in _file_problems(file, source)]
        yield from wrong or _few_rows(files, source)


def _file_problems(file: DataFile, source: _Source) -> Iterator[str]:
    rows = source.rows
    try:
        problem = missing_columns(file, rows.needed)
        if problem is not None:
            yield f"{file}: {problem}"
            return
        for number, values in islice(iter_rows(file, rows.columns), ROWS):
            try:
                rows.check(Row(file, number, "", values))
            except ValueError as error:
                yield f"{file} row {number}: {error}"
                return
    except (ValueError, OSError) as error:  # they name the file
        yield str(error)


def _few_rows(files: Sequence[DataFile], source: _Source) -> Iterator[str]:
    counts = [num_rows(file) for file in files]
    if source.batch is None or not counts or None in counts:
        return
    key, size = source.batch
    if sum(counts) < size:
        yield f"{source.key}: {sum(counts)} rows, too few for one batch of {key}={size}: lower it or give more data"


def _prompts(config: TrainConfig | EvalConfig, further: Mapping[str, Any] | None = None) -> _Rows:
    reader = PromptReader(None, may_lack=may_lack(config), **reading(config.data), **(further or {}))
    return _Rows(reader.columns, reader.needed, reader.fields)


def _of_training(config: TrainConfig) -> Iterator[_Source]:
    data, rows = config.data, _prompts(config, training_reading(config))
    if config.trainer.train_only is None:
        batch = ("data.train_batch_size", data.train_batch_size)
        yield _Source("data.train_files", data.train_files, rows, batch)
        for name, part in (data.mixture or {}).items():
            yield _Source(f"data.mixture.{name}.files", part.files, rows)
        yield from _held_out(data, _prompts(config))
    if data.ptx is not None:
        yield _Source("data.ptx.files", data.ptx.files, _examples(data.ptx, "data.ptx"))


def _of_evaluation(config: EvalConfig) -> Iterator[_Source]:
    yield from _held_out(config.data, _prompts(config))


def _held_out(data: DataConfig | EvalDataConfig, rows: _Rows) -> Iterator[_Source]:
    yield _Source("data.val_files", data.val_files, rows)
    for name, val_set in (data.val_sets or {}).items():
        yield _Source(f"data.val_sets.{name}.files", val_set.files, rows)


def _examples(data: Any, section: str) -> _Rows:
    """`data`: a section with the keys of a text's or a chat's columns."""
    if data.text_key is not None:
        text = Column(data.text_key, f"{section}.text_key")
        return _Rows(
            with_holders([text.name]), lambda _: [text], lambda row: text_of_row(row.values, data.text_key)
        )
    keywords = ChatKeywords(data.tools_key, data.apply_chat_template_kwargs)
    columns = chat_columns(data.prompt_key, data.response_key, section)
    keys = [*(column.name for column in columns), *keywords.columns]

    def check(row: Row) -> None:
        values = without_filled_nulls(row.values, keys, row.file)
        chat_of_row(values, data.prompt_key, data.response_key)
        keywords.of_row(values)

    return _Rows(with_holders(keys), lambda _: [*columns, *keywords.needed], check)


def _of_sft(config: SFTConfig) -> Iterator[_Source]:
    data = config.data
    # A text may be split into several examples.
    batch = None if data.truncation == "split" else ("data.train_batch_size", data.train_batch_size)
    yield _Source("data.train_files", data.train_files, _examples(data, "data"), batch)
    yield _Source("data.val_files", data.val_files, _examples(data, "data"))


def _of_rankings(config: RMConfig | DPOConfig) -> Iterator[_Source]:
    data = config.data
    keys: PreferenceKeys | LabelledKeys
    read: Callable[[dict[str, Any]], object]
    if isinstance(config, RMConfig) or learns_rankings(config):
        keys = preference_keys(data, data.margin_key if isinstance(config, RMConfig) else None)
        read = partial(read_ranking, keys=keys)
    else:
        keys = labelled_keys(data)
        read = partial(read_labelled, keys=keys)
    keywords = ChatKeywords(data.tools_key, data.apply_chat_template_kwargs)
    chats = [*keys.chats(), *keywords.columns]

    def check(row: Row) -> None:
        values = without_filled_nulls(row.values, chats, row.file)
        read(values)
        keywords.of_row(values)

    rows = _Rows(
        with_holders([*keys.columns(), *keywords.columns]),
        lambda present: [*keys.needed(present), *keywords.needed],
        check,
    )
    # A pair is two examples of KTO.
    batch = ("data.train_batch_size", data.train_batch_size) if learns_rankings(config) else None
    yield _Source("data.train_files", data.train_files, rows, batch)
    yield _Source("data.val_files", data.val_files, rows)
    if isinstance(config, RMConfig) and data.normalize != "none":
        answer = data.normalize_response_key
        if answer is not None:
            column = Column(answer, "data.normalize_response_key")
            rows = _Rows(with_holders([answer]), lambda _: [column], lambda row: lookup(row.values, answer))
        yield _Source("data.normalize_files", data.normalize_files, rows)
