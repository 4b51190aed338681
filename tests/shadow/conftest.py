"""Shadow ranks of tiny models, run once for all tests of a process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.shadow import device, dry_run
from megarl.shadow.dry_run import run_ranks
from tests.shadow.warm import WarmStarts

COLD = dry_run.start
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart_ppo.yaml"


@pytest.fixture(scope="session")
def machine() -> Iterator[None]:
    """Skips the test, with the reason, where no shadow can run. `run_ranks` starts forks of processes that have done their imports."""
    problem = device.missing()
    if problem is not None:
        pytest.skip(problem)
    starts = WarmStarts()
    dry_run.start = starts.start
    yield
    dry_run.start = COLD
    starts.close()


@pytest.fixture
def cold(machine: None) -> Iterator[None]:
    """Shadow ranks run in processes of their own, as a user's command starts them."""
    warm = dry_run.start
    dry_run.start = COLD
    yield
    dry_run.start = warm


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shadow") / "model"
    make_tiny_model(folder, ["two words"], hidden_size=128, ffn_hidden_size=384, num_layers=4)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("shadow-small") / "model", ["two words"], num_layers=2)


def overrides(model: Path) -> list[str]:
    """Keys over the recipe: actor and reference have TP2 x PP2, the critic PP2 x DP2."""
    return [f"actor_rollout_ref.model.path={model}", "trainer.test_freq=-1", "data.val_files=null"]


@pytest.fixture(scope="session")
def reports(machine: None, model: Path) -> Iterator[dict[tuple[str, int], dict]]:
    """Reports by role and rank: of all four ranks of the actor, and of one rank of each stage of the critic."""
    ranks = [*(("actor", rank) for rank in range(4)), ("critic", 0), ("critic", 2)]
    found = run_ranks(str(RECIPE), overrides(model), ranks, micro_batches=3, num_processes=1)
    yield {(report["role"], report["rank"]): report for report in found}


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 whose values are narrower than its queries, as in the published model."""
    return make_experts(tmp_path_factory.mktemp("shadow-experts") / "model")


@pytest.fixture(scope="session")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `experts` with a layer of multi-token prediction."""
    return make_experts(
        tmp_path_factory.mktemp("shadow-predicting") / "model", num_layers=2, num_mtp_layers=1
    )


@pytest.fixture(scope="session")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3.2 whose queries attend to 16 keys."""
    folder = tmp_path_factory.mktemp("shadow-choosing") / "model"
    return make_experts(folder, num_layers=2, family="deepseek_v32", index_topk=16, index_n_heads=4)


def make_experts(
    folder: Path,
    num_layers: int = 4,
    num_mtp_layers: int = 0,
    family: str = "deepseek_v3",
    **more_fields: int,
) -> Path:
    fields = {
        **{"q_lora_rank": 64, "kv_lora_rank": 64},
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
        **more_fields,
    }
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": num_layers, "num_attention_heads": 8}
    more = {"fields": fields, "num_mtp_layers": num_mtp_layers}
    make_tiny_model(folder, ["two words"], family=family, **more, **sizes)
    return folder


@pytest.fixture(scope="session")
def delta_nets(
    request: pytest.FixtureRequest, machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny Qwen3-Next, with experts, or a tiny dense Qwen3.5."""
    if not (device.PACKAGES / "fla").is_dir():
        pytest.skip("its shadow needs fla-core (requirements/shadow.txt)")
    folder = tmp_path_factory.mktemp("shadow-delta-nets") / "model"
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 4, "num_attention_heads": 8}
    return make_tiny_model(folder, ["two words"], family=request.param, num_mtp_layers=1, **sizes)


def expert_overrides(model: Path) -> list[str]:
    """Keys for GRPO with TP2 EP2."""
    megatron = "actor_rollout_ref.actor.megatron"
    return [
        *overrides(model),
        *("critic=null", "algorithm.adv_estimator=grpo"),
        *(f"{megatron}.pipeline_model_parallel_size=1", f"{megatron}.expert_model_parallel_size=2"),
    ]
