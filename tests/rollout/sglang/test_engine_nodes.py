"""An engine whose TP ranks have two owners, as on two nodes: real SGLang on the CPU, against Hugging Face."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from megarl.cluster.hosts import reserve_port
from megarl.rollout.engine import EngineConfig, NoValidWeightsError, WeightSyncError
from tests.rollout.conftest import TP, Model
from tests.rollout.manifests import rank_slices
from tests.rollout.planned import assert_as_planned
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import Sender, sync_state
from tests.rollout.sglang.test_engine import GREEDY, PROMPTS, UIDS, assert_serves

FEW_SECONDS = 60


@pytest.fixture(scope="module")
def owners(model_a: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """The owners, by node; the first one answers calls of the engine."""
    folder = tmp_path_factory.mktemp("nodes")
    with reserve_port() as holder:
        port = holder.getsockname()[1]
    processes = [
        EngineProcess(
            EngineConfig(
                str(model_a.path),
                tensor_parallel_size=TP,
                max_num_seqs=8,
                max_total_tokens=1024,
                enable_memory_saver=True,
                nodes=2,
                node=node,
                address=f"127.0.0.1:{port}",
            ),
            folder / f"node-{node}.log",
        )
        for node in range(2)
    ]
    for process in processes:
        process.begin("start")
    for process in processes:
        process.end()
    yield processes
    for process in processes:
        process.process.kill()


@pytest.fixture
def head(owners: list[EngineProcess]) -> EngineProcess:
    return owners[0]


def sync(head: EngineProcess, model: Model, version: int, folder: Path):
    return sync_state(head, folder, model.state, model.hf.config, TP, version)


def test_each_owner_has_its_nodes_ranks_and_they_meet_on_loopback_alone(owners: list[EngineProcess]) -> None:
    assert [len(owner.call("pids")) for owner in owners] == [1, 1]
    pids = {owner.process.pid for owner in owners} | {pid for owner in owners for pid in owner.call("pids")}
    assert len(pids) == 4
    listening = [
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) == {"127.0.0.1"}


def test_versions_are_verified_on_all_nodes_and_served(
    head: EngineProcess, model_a: Model, model_b: Model, tmp_path: Path
) -> None:
    with pytest.raises(NoValidWeightsError, match="before a sync"):
        head.call("generate", PROMPTS, UIDS, GREEDY)
    report = sync(head, model_a, 1, tmp_path / "a")
    num_elements = sum(value.numel() for value in model_a.state.values())
    replicated = sum(value.numel() for name, value in model_a.state.items() if "norm" in name)
    assert sum(report.bytes_written) == 4 * (num_elements + (TP - 1) * replicated)
    assert len(report.bytes_written) == TP
    assert_serves(head, model_a, 1)
    sync(head, model_b, 2, tmp_path / "b")
    assert_serves(head, model_b, 2)
    assert_as_planned(head)


def test_what_the_other_nodes_rank_refuses_is_not_served(
    head: EngineProcess, model_a: Model, tmp_path: Path
) -> None:
    slices = [rank_slices(model_a.state, model_a.hf.config, TP, rank) for rank in range(TP)]
    sender = Sender(tmp_path / "sender", slices)

    def flip(token, packet):
        if packet.targets == (1,):
            next(packet.places())[1].view(torch.int32).view(-1)[-1] ^= 1

    try:
        sender.outbox.tamper = flip
        head.call("connect", sender.inboxes)
        head.call("begin_update", 3)
        sent = sender.send(3)
        with pytest.raises(WeightSyncError, match=r"version 3.*: checksum .*\(TP rank 1\)"):
            head.call("receive_weights")
        sent.result()
    finally:
        sender.close()
    with pytest.raises(NoValidWeightsError):
        head.call("generate", PROMPTS, UIDS, GREEDY)


def test_memory_of_all_nodes_is_released_and_comes_back(
    head: EngineProcess, model_a: Model, tmp_path: Path
) -> None:
    sync(head, model_a, 4, tmp_path / "first")
    held = head.call("memory")
    head.call("release_memory", ["kv_cache", "weights"])
    assert [(rank["weights"], rank["kv_cache"]) for rank in head.call("memory")] == [(0, 0)] * TP
    head.call("resume_memory", ["weights"])
    sync(head, model_a, 5, tmp_path / "second")
    head.call("resume_memory", ["kv_cache"])
    found = head.call("memory")
    assert [rank["weights"] for rank in found] == [rank["weights"] for rank in held]
    assert_serves(head, model_a, 5)


def test_an_engine_ends_whole_when_a_rank_of_another_node_does(owners: list[EngineProcess]) -> None:
    """Also while the engine idles. The last test that uses this engine."""
    head, other = owners
    family = [psutil.Process(pid) for owner in owners for pid in owner.call("pids")]
    (rank,) = other.call("pids")
    begun = time.monotonic()
    psutil.Process(rank).send_signal(signal.SIGKILL)
    other.process.join(FEW_SECONDS)
    assert other.process.exitcode == 1
    assert "TP rank 1" in other.log.read_text()
    head.process.join(FEW_SECONDS)
    assert head.process.exitcode == 1
    assert time.monotonic() - begun < FEW_SECONDS
    _, alive = psutil.wait_procs(family, timeout=FEW_SECONDS)
    assert not alive
