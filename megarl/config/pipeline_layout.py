"""Which layers lie on which pipeline stage: by numbers of layers, or by `megatron.pipeline_model_parallel_layout` in Megatron-core's notation (0.19.2).

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
    """What is wrong with the layout of a section `megatron`, whose dotted key is `key`, whatever the model."""
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


def layer_problems(key: str, megatron: MegatronConfig, layers: int) -> Iterator[str]:
    """Why the stages of a section `megatron`, whose dotted key is `key`, cannot share out the layers of a model that has `layers`."""
    pp, vpp = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    if megatron.pipeline_model_parallel_layout is not None:
        if list(pipeline_layout_problems(key, megatron)):
            return  # reported with the keys alone
        counts = parse_layout(megatron.pipeline_model_parallel_layout)
        if sum(counts) != layers:
            yield (
                f"{key}.pipeline_model_parallel_layout={megatron.pipeline_model_parallel_layout!r} has {sum(counts)} layers (t), the model "
                f"num_layers={layers}"
            )
        return
    given = {
        name: getattr(megatron, name)
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if getattr(megatron, name) is not None
    }
    chunks = f" x virtual_pipeline_model_parallel_size={vpp} chunks" if vpp > 1 else ""
    left, stages = layers - sum(given.values()), pp - len(given)
    for name, count in given.items():
        if count % vpp:
            yield f"{key}.{name}={count} is no multiple of virtual_pipeline_model_parallel_size={vpp}"
    if not given and layers % (pp * vpp):
        sizes = range(1 if vpp == 1 else 2, layers + 1)
        possible = ",".join(str(size) for size in sizes if layers % (size * vpp) == 0) or "none"
        yield (
            f"{key}.pipeline_model_parallel_size={pp}{chunks} does not divide num_layers={layers}; "
            f"possible: {possible}, or others with num_layers_in_first_pipeline_stage or "
            "num_layers_in_last_pipeline_stage"
        )
    elif given and (left < stages or (left % (stages * vpp) if stages > 0 else left)):
        ends = " and ".join(f"{name}={count}" for name, count in given.items())
        wanted = "each needs at least one" if 0 <= left < stages else "they cannot be shared out evenly"
        yield (
            f"{key}.{ends} leave {left} of num_layers={layers} for the other {max(stages, 0)} stages{chunks}; {wanted}"
        )
