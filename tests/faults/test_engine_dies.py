"""Engines are really killed or stopped in a real run: they come back with the current weights, and nothing is lost.

Memory is released and resumed between phases here, and a restarted engine has to fit into that, too.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest

from examples.arithmetic import arithmetic_texts, write_arithmetic
from examples.tiny_model import make_tiny_model
from megarl.cluster import WorkerDied
from megarl.config import TrainConfig, load_config, resolve
from megarl.data.trajectories import expand_prompts, ragged
from megarl.rewards.processes.scorer import make_scorer
from megarl.rollout.engine import SamplingParams
from megarl.trainer.loops.driver import epochs
from megarl.trainer.roles.roles import start_roles
from megarl.trainer.roles.types import Roles
from megarl.trainer.roles.weight_sync import sync_weights
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_run
from megarl.trainer.stages.inputs import load_train_inputs
from megarl.trainer.stages.rollouts import generate
from tests.cluster.processes import titled
from tests.waiting import wait_for

# Each engine gets 16 requests and answers 4 at a time: most are open when the first answers come.
SAMPLING = SamplingParams(max_new_tokens=64, seed=7, ignore_eos=True)
OVERRIDES = [
    "critic=null", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.sync_transport=p2p",  # so that trainer ranks exchange slices, as on GPUs
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.param_offload=true", "actor_rollout_ref.rollout.free_cache_engine=true",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.num_engines=2",
    "actor_rollout_ref.rollout.max_num_seqs=4", "data.max_response_length=64", "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1",
]  # fmt: skip


@dataclass
class Served:
    """A run that has synced version 1, its requests, and the answers to them without a disturbance."""

    run: Run
    roles: Roles
    requests: pa.Table
    undisturbed: pa.Table

    def scheduler(self, engine: int) -> int:
        """The pid of an engine's SGLang scheduler; where engines are on several nodes, `engine` counts their processes."""
        family = psutil.Process(self.roles.engines.pids[engine]).children(recursive=True)
        (pid,) = titled("sglang::scheduler", family)
        return pid

    def answer(self, finished=lambda table: None) -> pa.Table:
        with self.roles.memory.phase("generate"):
            return generate(self.run, self.roles.engines, self.requests, SAMPLING, finished)

    def same(self, table: pa.Table) -> None:
        """Assert that the tokens equal the undisturbed run's, and the log-probs up to rounding."""
        for name in ("uid", "response_ids"):
            assert table[name].to_pylist() == self.undisturbed[name].to_pylist()
        ours, theirs = (ragged(one, "rollout_log_probs")[0] for one in (table, self.undisturbed))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("engines"), OVERRIDES) as found:
        yield found


@contextmanager
def serving(folder: Path, overrides: Sequence[str]) -> Iterator[Served]:
    """A run with these overrides."""
    write_arithmetic(folder / "data", 16, 16, 16, seed=3)
    make_tiny_model(folder / "model", arithmetic_texts(), hidden_size=64, ffn_hidden_size=128, num_layers=2)
    files = [
        f"data.train_files={folder}/data/train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={folder}/model",
        f"trainer.default_local_dir={folder}/run",
    ]
    config = resolve(load_config(TrainConfig, "recipes/quickstart_ppo.yaml", [*overrides, *files]))
    with make_scorer(config) as scorer, open_run(config, 1) as run:
        inputs = load_train_inputs(config, scorer)
        roles = start_roles(config, run, inputs.model, 1)
        with roles.memory.phase("sync"):
            sync_weights(run, roles, 1)
        found = Served(run, roles, expand_prompts(next(epochs(inputs.loader)), 2), pa.table({}))
        found.undisturbed = found.answer()
        yield found


def test_in_the_middle_of_a_generation(served: Served) -> None:
    pids, handed, killed = served.roles.engines.pids, [], []

    def finished(table: pa.Table) -> None:
        handed.extend(table["uid"].to_pylist())
        if not killed:
            killed.append(served.scheduler(1))
            os.kill(killed[0], signal.SIGKILL)

    answers = served.answer(finished)
    served.same(answers)
    assert sorted(handed) == sorted(served.requests["uid"].to_pylist())  # none lost, none twice
    assert set(answers["weight_version"].to_pylist()) == {1}
    assert served.roles.restarts.count == 1
    assert served.roles.engines.pids[0] == pids[0] and served.roles.engines.pids[1] != pids[1]
    (report,) = Path(served.run.folder, "failures").iterdir()
    text = report.read_text()
    assert "role: rollout\nrank: 1\n" in text and "phase: generate\n" in text
    assert "actor rank 0 (process" in text and "exit code -9" in text


def test_while_nobody_needs_it(served: Served) -> None:
    """As in an update: the death is found when the next version is to be sent, and the new engine gets that version like the others."""
    engines, actor = served.roles.engines, served.roles.actor.group
    before = served.roles.restarts.count
    os.kill(served.scheduler(0), signal.SIGKILL)
    wait_for(lambda: engines.processes[0].is_dead)
    assert served.run.wait(actor.call("memory"))
    with served.roles.memory.phase("sync"):
        sync_weights(served.run, served.roles, 2)
    assert served.roles.restarts.count == before + 1
    answers = served.answer()
    served.same(answers)
    assert set(answers["weight_version"].to_pylist()) == {2}


def test_between_two_generations_of_a_step(served: Served) -> None:
    """The death is found when the engine's memory is asked for, as at the end of a step's first round of answers: the new engine joins the next."""
    restarts, engines = served.roles.restarts, served.roles.engines
    before, version = restarts.count, restarts.version
    os.kill(served.scheduler(1), signal.SIGKILL)
    wait_for(lambda: engines.processes[1].is_dead)
    restarts.replace_lost()
    assert restarts.count == before + 1 and restarts.lacks_weights
    answers = served.answer()
    served.same(answers)
    assert set(answers["weight_version"].to_pylist()) == {version} and not restarts.lacks_weights


@pytest.mark.slow
def test_in_the_middle_of_a_sync_it_is_stopped(served: Served) -> None:
    """No process has died: the stopped one is found by its state, within 90 s."""
    begun = time.monotonic()
    served.roles.restarts.max_restarts = served.roles.restarts.count + 1
    with served.roles.memory.phase("sync"):
        os.kill(served.scheduler(1), signal.SIGSTOP)
        sync_weights(served.run, served.roles, 3)
    assert time.monotonic() - begun < 90
    answers = served.answer()
    served.same(answers)
    assert set(answers["weight_version"].to_pylist()) == {3}


def test_too_many(served: Served) -> None:
    restarts, killed = served.roles.restarts, []
    restarts.max_restarts = restarts.count

    def finished(table: pa.Table) -> None:
        if not killed:
            killed.append(served.scheduler(0))
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(WorkerDied, match=r"rollout rank 0 .* died") as caught:
        served.answer(finished)
    assert str(caught.value.report) in str(caught.value)
    # The same error where the death is found before a call: `trainer.max_restarts` starts a run again after each lost process.
    with pytest.raises(
        WorkerDied, match=r"(?s)rollout rank 0 .* died.*engines were started anew already"
    ) as caught:
        restarts.replace_lost()
    assert str(caught.value.report) in str(caught.value)
