"""Sparse attention over pipeline stages: layers that take the choice of an earlier layer's indexer must have it on their stage."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megarl.config import EvalConfig, MegatronConfig, TrainConfig, TuningConfig, reference_key
from megarl.config.resolve import megatron_sections
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.models import ModelConfig


def stage_problems(
    config: TrainConfig | TuningConfig | EvalConfig,
    model: ModelConfig | None,
    critic: ModelConfig | None = None,
    reward_model: ModelConfig | None = None,
    teachers: Mapping[str, ModelConfig | None] = MappingProxyType({}),
) -> Iterator[str]:
    """Problems of a resolved configuration with valid layouts: stages that begin with a layer without an indexer, for texts that indexers
    choose from.

    The models are as of `fit_problems`, but for `critic`, which is not the policy's where it is None.
    """
    if isinstance(config, EvalConfig):
        return
    if isinstance(config, TuningConfig):
        sections = [("megatron", config.megatron, model, config.data.max_length)]
    else:
        longest = config.data.max_prompt_length + config.data.max_response_length
        if config.data.ptx is not None:
            longest = max(longest, config.data.ptx.max_length)
        models = {"critic": critic, "reward_model": reward_model}
        models |= {reference_key(role): facts for role, facts in teachers.items()}
        sections = [
            (f"{key}.megatron", section.megatron, models.get(key, model), longest)
            for key, section in megatron_sections(config).items()
        ]
    told = set()
    for key, megatron, facts, tokens in sections:
        if facts is None or megatron is None or facts.indexer is None or tokens <= facts.indexer.topk:
            continue
        for number in _without_indexer(facts, megatron):
            if (number, facts.indexer) not in told:
                told.add((number, facts.indexer))
                yield (
                    f"{key}.pipeline_model_parallel_size={megatron.pipeline_model_parallel_size}: a stage, or a chunk of it, begins with layer {number}, "
                    f"which has no indexer, and texts of {tokens} tokens are more than index_topk={facts.indexer.topk}; have it begin with one of the "
                    f"layers that have an indexer ({key}.pipeline_model_parallel_layout)"
                )


def _without_indexer(model: ModelConfig, megatron: MegatronConfig) -> Iterator[int]:
    """The numbers of layers that come first on a stage, or in a chunk of one, and have no indexer."""
    assert model.indexer is not None
    pp = megatron.pipeline_model_parallel_size
    world = pp * megatron.tensor_model_parallel_size * megatron.context_parallel_size
    # Experts may be split over data parallel ranks. On any number of devices that fits the stages have the same layers.
    world *= megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    layout = ParallelLayout.from_config(megatron, world)
    for stage in range(pp):
        for layers in layers_of(layout, model.num_layers, stage):
            if layers and layers[0] not in model.indexer.layers:
                yield layers[0]
