"""An engine on two nodes loses one of them, in a real run: it comes back complete, with the current weights."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from megarl.trainer.roles.weight_sync import sync_weights
from tests.faults.test_engine_dies import OVERRIDES, Served, serving
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
TWO_NODES = [
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.num_engines=1",
    "actor_rollout_ref.rollout.nodes_per_engine=2",
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("nodes"), [*OVERRIDES, *TWO_NODES]) as found:
        yield found


def test_in_the_middle_of_a_generation(served: Served) -> None:
    engines, killed = served.roles.engines, []
    before = engines.pids
    assert (engines.world_size, engines.parts, len(before)) == (1, 2, 2)

    def finished(table: pa.Table) -> None:
        if not killed:
            killed.append(served.scheduler(1))
            os.kill(killed[0], signal.SIGKILL)

    answers = served.answer(finished)
    served.same(answers)
    assert set(answers["weight_version"].to_pylist()) == {1}
    assert served.roles.restarts.count == 1
    assert not set(engines.pids) & set(before)
    (report,) = Path(served.run.folder, "failures").iterdir()
    assert "rollout rank 0 part 1" in report.read_text()


def test_while_nobody_needs_it(served: Served) -> None:
    """The engine's process on the second node is killed itself; the next version comes to all ranks of the new engine."""
    engines = served.roles.engines
    os.kill(engines.pids[1], signal.SIGKILL)
    wait_for(lambda: engines.processes[1].is_dead)
    with served.roles.memory.phase("sync"):
        metrics = sync_weights(served.run, served.roles, 2)
    assert metrics["sync/bytes_written_max_per_rank"] > 0
    assert served.roles.restarts.count == 2
    answers = served.answer()
    served.same(answers)
    assert set(answers["weight_version"].to_pylist()) == {2}
    assert len(served.run.wait(engines.call("memory"))[0]) == 2
