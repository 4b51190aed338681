"""`megatron.pipeline_model_parallel_layout`: which layers lie on which stage, in the notation of Megatron-core 0.19.2.

`E` is the embedding, `t` a layer, `L` the head; `|` ends a stage, `x*3` and `(...)*3` repeat, commas mean nothing. `Et|(tt|)*2t,L` are four stages
of 1, 2, 2 and 1 layers. With virtual stages the first chunks of all stages come before the second ones.
"""

import re
from collections.abc import Iterator

from megarl.config.schema.models import MegatronConfig

_REPEATED = (re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"([EtL|])\*(\d+)"))


def parse_layout(text: str) -> tuple[int, ...]:
    """The number of layers in each part between the bars.

    Raises:
        ValueError: another character, or embedding and head are not where a model begins and ends.
    """
    parts = text.replace(",", "").replace(" ", "")
    for pattern in _REPEATED:
        parts = pattern.sub(lambda found: found[1] * int(found[2]), parts)
    if wrong := sorted(set(parts) - set("EtL|")):
        advice = (
            "; m: multi-token prediction layers (model.mtp=train) are on the last stage and not written"
            if "m" in wrong
            else ""
        )
        raise ValueError(
            f"{text!r} has {' '.join(wrong)}: E, t, L and | are known, and *n after one of them or after (...){advice}"
        )
    if not re.fullmatch(r"E[t|]*L", parts):
        raise ValueError(
            f"{text!r}: it begins with E, the embedding, ends with L, the head, and has each once"
        )
    return tuple(part.count("t") for part in parts.split("|"))


def pipeline_layout_problems(key: str, megatron: MegatronConfig) -> Iterator[str]:
    """What is wrong with the layout of a section `megatron`, whose dotted key is `key`, as far as the model has no say in it."""
    text = megatron.pipeline_model_parallel_layout
    if text is None:
        return
    name = f"{key}.pipeline_model_parallel_layout"
    try:
        found = len(parse_layout(text))
    except ValueError as error:
        yield f"{name}={error}"
        return
    pp, vpp = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    if found != pp * vpp:
        yield (
            f"{name}={text!r} has {found} parts between bars; {key}.pipeline_model_parallel_size={pp} x virtual_pipeline_model_parallel_size="
            f"{vpp} needs {pp * vpp}"
        )
    for end in ("first", "last"):
        other = f"num_layers_in_{end}_pipeline_stage"
        if getattr(megatron, other) is not None:
            yield f"{name} and {key}.{other} both say how many layers a stage has; give one of them"
