"""`megarl doctor model FOLDER`: whether a Hugging Face folder holds a model that can be trained, and if not, by which field or tensor."""

from collections.abc import Callable, Iterator
from pathlib import Path

from megarl.checkpoints.hf.load import HFReader
from megarl.data.tokenizer import tokenizer_files
from megarl.doctor.computation import check_computation
from megarl.doctor.nodes import FAILURE, OK, Finding
from megarl.models import FAMILIES, ModelConfig, read_model_config
from megarl.trainer.run.facts import model_text


def examine_model(path: str) -> list[Finding]:
    """Findings about the model in the folder `path`, up to the first failure."""
    found = []
    for finding in _findings(path):
        found.append(finding)
        if finding.level == FAILURE:
            break
    return found


def _findings(path: str) -> Iterator[Finding]:
    try:
        config = read_model_config(path)
    except (ValueError, OSError) as error:
        yield Finding(
            FAILURE, "config.json", str(error), "docs/models.md says what is supported of each family"
        )
        return
    yield Finding(OK, "config.json", f"{model_text(path, config)}; every field is supported")
    yield _finding("computation", lambda: _computation(config))
    yield _finding("weights", lambda: _weights(path, config))
    yield _finding("tokenizer", lambda: ", ".join(tokenizer_files(Path(path).expanduser())))


def _finding(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(OK, what, look())
    except (ValueError, OSError) as error:
        return Finding(FAILURE, what, str(error), "a run would end with the same message")


def _weights(path: str, config: ModelConfig) -> str:
    with HFReader(path) as reader:
        reader.check(config, "value" if config.architecture.endswith("ForSequenceClassification") else "lm")
        return f"{len(reader.tensors):,} tensors, those of the config"


def _computation(config: ModelConfig) -> str:
    check_computation(config)
    kind = config.hf["model_type"]
    if kind in FAMILIES:
        return f"{kind} is a family that megarl has"
    return f"{kind} is read as Llama's architecture; small models of both have the same logits"
