"""A real run of two engines, for tests that take steps and kill processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from examples.arithmetic import arithmetic_texts, write_arithmetic
from examples.tiny_model import make_tiny_model
from megarl.config import TrainConfig, load_config, resolve
from megarl.rewards.processes.scorer import Scorer, make_scorer
from megarl.trainer.roles.roles import start_roles
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_run
from megarl.trainer.stages.inputs import TrainInputs, load_train_inputs
from tests.cluster.processes import titled

STEPS = 9
# An engine answers four requests at a time: most are open when the first answers come.
OVERRIDES = [
    "trainer.n_gpus_per_node=3", "resource_pools.rollout.n_gpus_per_node=2", "actor_rollout_ref.rollout.num_engines=2",
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.max_num_seqs=4", "data.max_response_length=48",
    "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", f"trainer.total_training_steps={STEPS}",
    "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "actor_rollout_ref.actor.megatron.param_offload=true", "data.val_files=null", "trainer.test_freq=-1",
]  # fmt: skip
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)
"""


class Started(NamedTuple):
    config: TrainConfig
    run: Run
    roles: Roles
    inputs: TrainInputs
    scorer: Scorer


@contextmanager
def start(folder: Path, recipe: str, num_prompts: int, overrides: Sequence[str] = ()) -> Iterator[Started]:
    """A run of a recipe of the repository on a tiny model with random weights; no step was taken yet."""
    write_arithmetic(folder / "data", num_prompts, 64, 16, seed=3)
    make_tiny_model(folder / "model", arithmetic_texts(), hidden_size=64, ffn_hidden_size=128, num_layers=2)
    (folder / "reward.py").write_text(REWARD)
    files = [
        f"data.train_files={folder}/data/train.parquet", f"actor_rollout_ref.model.path={folder}/model",
        f"trainer.default_local_dir={folder}/run", f"custom_reward_function.path={folder}/reward.py",
    ]  # fmt: skip
    config = resolve(load_config(TrainConfig, f"recipes/{recipe}", [*OVERRIDES, *overrides, *files]))
    with make_scorer(config) as scorer, open_run(config, STEPS) as run:
        inputs = load_train_inputs(config, scorer)
        yield Started(config, run, start_roles(config, run, inputs.model, STEPS), inputs, scorer)


def scheduler(roles: Roles, engine: int) -> int:
    """The pid of an engine's SGLang scheduler."""
    family = psutil.Process(roles.engines.pids[engine]).children(recursive=True)
    pids = titled("sglang::scheduler", family)
    assert len(pids) == 1, f"the processes of engine {engine}: {family}"
    return pids[0]
