"""Layouts from the configuration, and how layers are shared out.

tests/megatron/test_parallel.py and test_build.py check that ranks' places and layers agree with Megatron's.
"""

from typing import Any

import pytest

from megarl.config.schema.commands import MegatronConfig
from megarl.layout.grid import ParallelLayout, layers_of


def test_layers_are_shared_out_in_turns_between_virtual_stages() -> None:
    """The example in Megatron's documentation: 16 layers, 4 stages, 2 chunks each (layers are numbered from 0 here)."""
    layout = ParallelLayout(world=4, pp=4, vpp=2)
    assert layers_of(layout, 16, 0) == [[0, 1], [8, 9]]
    assert layers_of(layout, 16, 3) == [[6, 7], [14, 15]]
    assert layers_of(ParallelLayout(world=2, pp=2), 4, 1) == [[2, 3]]


def test_layers_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match=r"6 layers .*pipeline_model_parallel_size=2 x virtual.*=2"):
        layers_of(ParallelLayout(world=2, pp=2, vpp=2), 6, 0)


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"2 layers .*_size=3 with num_layers_in_first_\w+=1 and num_layers_in_last_\w+=1"
    ):
        layers_of(ParallelLayout(world=3, pp=3, first_layers=1, last_layers=1), 2, 1)


def test_a_layout_from_the_configuration() -> None:
    config = MegatronConfig(tensor_model_parallel_size=2, context_parallel_size=2)
    layout = ParallelLayout.from_config(config, world=8)
    assert layout == ParallelLayout(world=8, tp=2, cp=2, sp=True)
    assert (layout.dp, layout.num_chunks) == (2, 1)
    config = MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=False)
    assert not ParallelLayout.from_config(config, world=2).sp


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 6, "tp": 4}, r"6 devices .*tensor_model_parallel_size=4.*multiple of 4"),
        ({"world": 2, "tp": 0}, r"tensor_model_parallel_size is 0"),
        ({"world": 2, "vpp": 2}, r"virtual_pipeline_model_parallel_size=2.*pipeline_model_parallel_size=1"),
        (
            {"world": 2, "pp": 2, "chunk_layers": (1,)},
            r"pipeline_model_parallel_layout has 1 parts; 2 are needed",
        ),
        ({"world": 2, "pp": 2, "chunk_layers": (1, 1), "first_layers": 1}, r"both say how many layers"),
        ({"world": 2, "sp": True}, r"sequence_parallel=true needs"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_key(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**sizes)


def test_stages_of_a_layout_in_megatrons_notation() -> None:
    config = MegatronConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|t*3||ttL",
    )
    layout = ParallelLayout.from_config(config, world=2)
    assert layout.chunk_layers == (1, 3, 0, 2)
    assert layers_of(layout, 6, 0) == [[0], []]
    assert layers_of(layout, 6, 1) == [[1, 2, 3], [4, 5]]
    with pytest.raises(ValueError, match="has 6 layers, the model 7"):
        layers_of(layout, 7, 0)
