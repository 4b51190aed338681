"""Numbers of layers that can be divided among pipeline stages."""

import pytest

from megarl.config import MegatronConfig
from megarl.config.pipeline_layout import layer_problems


def problems(layers: int, **sizes: int | None) -> list[str]:
    return list(layer_problems("megatron", MegatronConfig(**sizes), layers))


def test_layers_are_shared_out_evenly() -> None:
    assert problems(4, pipeline_model_parallel_size=3) == [
        "megatron.pipeline_model_parallel_size=3 does not divide num_layers=4; possible: 1,2,4, or others with num_layers_in_first_pipeline_stage or "
        "num_layers_in_last_pipeline_stage"
    ]
    assert problems(4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2) == [
        "megatron.pipeline_model_parallel_size=4 x virtual_pipeline_model_parallel_size=2 chunks does not divide "
        "num_layers=4; possible: 2, or others with num_layers_in_first_pipeline_stage or "
        "num_layers_in_last_pipeline_stage"
    ]


def test_uneven_stages() -> None:
    uneven = {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 1}
    assert problems(5, **uneven) == []
    assert problems(4, **uneven) == [
        "megatron.num_layers_in_last_pipeline_stage=1 leave 3 of num_layers=4 for the other 2 stages; "
        "they cannot be shared out evenly"
    ]


@pytest.mark.parametrize("chunks", [None, 2])
def test_a_stage_without_a_layer(chunks: int | None) -> None:
    ends = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2}
    (line,) = problems(4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=chunks, **ends)
    assert line.startswith(
        "megatron.num_layers_in_first_pipeline_stage=2 and num_layers_in_last_pipeline_stage=2 leave 0 of num_layers=4 for "
        "the other 2 stages"
    )
    assert line.endswith("; each needs at least one")
