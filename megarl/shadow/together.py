"""All ranks of a role at the same time, each in a fork of this process: a rank receives the integers that its peers send.

Data are uneven: trajectories of data parallel ranks have lengths of their own, and each rank's routers prefer other experts.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe

from megarl.config import TrainConfig, TuningConfig
from megarl.plan.inputs import PlanInputs, model_use
from megarl.shadow.peers import StoppedError, Together, end, serve
from megarl.shadow.rank import Runner


def run(
    runner: Runner,
    config: TrainConfig | TuningConfig,
    inputs: PlanInputs,
    ranks: Sequence[tuple[str, int]],
    micro_batches: int | None,
) -> Iterator[dict]:
    """The reports of ranks (`rank.RankReport` as JSON), role by role.

    Args:
        micro_batches: None: as many as the pipeline has stages, at least two.

    A rank that did not come to its end has "role", "rank", "log" and "error", and "stopped": whether it waited for its peers.
    """
    for role in dict.fromkeys(role for role, _ in ranks):
        of_role = [rank for other, rank in ranks if other == role]
        count = micro_batches or max(2, model_use(config, inputs, role).layout.pp)

        def work(rank: int, connection: Connection, role: str = role, count: int = count) -> dict:
            runner.peers = Together(connection, rank)
            try:
                return asdict(runner.run(config, inputs, role, rank, count))
            except Exception as error:  # told with the log, which shows the others' part in it
                told = str(error) if isinstance(error, StoppedError) else traceback.format_exc()
                return {
                    "role": role,
                    "rank": rank,
                    "log": runner.log.calls(),
                    "error": told,
                    "stopped": isinstance(error, StoppedError),
                }

        ends = run_forked(of_role, work)
        for rank in of_role:
            lost = {"role": role, "rank": rank, "log": [], "error": "its process died", "stopped": False}
            yield json.loads(ends[rank]) if rank in ends else lost


def run_forked(ranks: Sequence[int], work: Callable[[int, Connection], dict]) -> dict[int, bytes]:
    """The results of `work`, as JSON, in a process for each rank; without those whose process died.

    This process must have no threads: it is forked.
    """
    connections: dict[int, Connection] = {}
    children = []
    gc.freeze()  # ranks collect garbage often, and none of it is older than they are
    for rank in ranks:
        mine, theirs = Pipe()
        child = os.fork()
        if child == 0:
            for connection in (mine, *connections.values()):
                connection.close()
            end(theirs, json.dumps(work(rank, theirs)).encode())
            sys.stdout.flush()
            os._exit(0)
        theirs.close()
        connections[rank] = mine
        children.append(child)
    ends = serve(connections)
    for child in children:
        os.waitpid(child, 0)
    return ends
