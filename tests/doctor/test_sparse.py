"""Pipeline stages of a model whose layers share the choices of indexers."""

from dataclasses import replace

from megarl.config import SFTConfig, TrainConfig, load_config
from megarl.config.resolve import resolve
from megarl.doctor.sparse import stage_problems
from megarl.models import read_model_config
from tests.fixtures.runs import REPOSITORY

DEEPSEEK = read_model_config(str(REPOSITORY / "recipes/models/deepseek-v3.2"))
SHARING = replace(
    DEEPSEEK, num_layers=4, indexer=replace(DEEPSEEK.indexer, layers=(0, 1, 3), topk=128)
)  # the third layer takes the second one's choice
LENGTHS = ("data.max_prompt_length=100", "data.max_response_length=29")
ACTOR = "actor_rollout_ref.actor.megatron"
EVEN = "num_layers_in_first_pipeline_stage=null", "num_layers_in_last_pipeline_stage=null"
TWO = f"{ACTOR}.pipeline_model_parallel_size=2"


def train(*overrides: str) -> TrainConfig:
    keys = [*LENGTHS, TWO, *(f"{ACTOR}.{key}" for key in EVEN), *overrides]
    return resolve(load_config(TrainConfig, REPOSITORY / "recipes/deepseek_v3.2_grpo.yaml", keys))


def test_stages_begin_with_a_layer_that_has_an_indexer() -> None:
    (line,) = stage_problems(train(), SHARING)
    assert line.startswith(f"{TWO}: a stage, or a chunk of it, begins with layer 2, which has no indexer")
    assert "129 tokens are more than index_topk=128" in line
    assert list(stage_problems(train("data.max_response_length=28"), SHARING)) == []
    assert list(stage_problems(train(f"{ACTOR}.num_layers_in_first_pipeline_stage=1"), SHARING)) == []
    assert list(stage_problems(train(), replace(DEEPSEEK, num_layers=4))) == []


def test_experts_may_be_split_over_data_parallel_ranks() -> None:
    """In this layout the ranks that share one copy of the other weights cannot hold all experts."""
    sizes = (
        f"{ACTOR}.tensor_model_parallel_size=4",
        f"{ACTOR}.expert_model_parallel_size=6",
        f"{ACTOR}.expert_tensor_parallel_size=2",
    )
    (line,) = stage_problems(train(*sizes), SHARING)
    assert line.startswith(f"{TWO}: a stage, or a chunk of it, begins with layer 2, which has no indexer")
    assert list(stage_problems(train(*sizes), replace(DEEPSEEK, num_layers=4))) == []


def test_in_fine_tuning() -> None:
    keys = ["data.max_length=129", "megatron.pipeline_model_parallel_size=2"]
    config = resolve(load_config(SFTConfig, REPOSITORY / "recipes/quickstart_sft.yaml", keys))
    (line,) = stage_problems(config, SHARING)
    assert line.startswith("megatron.pipeline_model_parallel_size=2: ")
