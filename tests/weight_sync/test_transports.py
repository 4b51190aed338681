"""Weight syncs between real processes: memory as the kernel counts it, and ranks that die."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoints.hf.load import load_hf_weights
from megarl.layout import RankPlace
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.weight_sync.layouts import EngineLayout, megatron_layout, sglang_layout
from megarl.weight_sync.links import LinkError
from megarl.weight_sync.nixl_transport import NixlTransport
from megarl.weight_sync.packets import NIXL
from megarl.weight_sync.receiver import InboxFile, Receiver
from megarl.weight_sync.sender import Outbox
from megarl.weight_sync.sync_plan import APART, COLOCATED, MAPPED, P2P, SHARED_MEMORY, SyncPlan
from megarl.weight_sync.transport import Part
from tests.ranks import RankError
from tests.weight_sync.fusions import Rank, expected_sglang
from tests.weight_sync.shards import empty_shards
from tests.weight_sync.transfer import Shard

BUCKET, MIB = 2 << 20, 1 << 20
SOURCES = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A Llama of 47 MB in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=1536, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_sync(folder: str, way: str, network: str = P2P) -> SyncPlan:
    """From two trainer ranks, each with a pipeline stage, into an engine of two ranks; apart: into two engines of one rank."""
    config = read_model_config(folder)
    engines = EngineLayout(1, num_engines=2) if way == APART else EngineLayout(2)
    places = tuple(RankPlace("node", str(rank)) for rank in range(2)) if way == COLOCATED else None
    transport = SHARED_MEMORY if way == MAPPED else network
    parallel = ParallelLayout(world=SOURCES, pp=SOURCES)
    sync = SyncPlan(config, parallel, engines, torch.float32, BUCKET, places, places, transport=transport)
    assert sync.way == way
    return sync


def memory(kind: str) -> int:
    """Resident bytes of this process; `kind`: "Anon" (its own) or "Shmem" (shared)."""
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"Rss{kind}")
    ]
    return int(line.split()[1]) * 1024


def ends(rank: int, folder: str, sync: SyncPlan, scratch: str, timeout: float):
    """This rank's Outbox and parameters, or its Receiver and the engine's tensors."""
    sources, targets = sync.shares()
    outbox = Outbox(sources[rank], scratch, "127.0.0.1", "cpu", timeout) if rank < SOURCES else None
    addresses: list = [None] * (SOURCES + 2)
    torch.distributed.all_gather_object(addresses, outbox.address if outbox else None)
    hub = addresses[0].hub
    if outbox is not None:
        if hub is not None:
            outbox.join(hub)
        parameters = empty_shards(megatron_layout(sync.config, sync.parallel))[rank]
        load_hf_weights(folder, sync.config, sync.parallel, rank, parameters)
        return outbox, parameters
    tensors = empty_shards(sglang_layout(sync.config, sync.engines))[rank - SOURCES]
    share = replace(targets[rank - SOURCES], padding={})
    return InboxFile(share, dict(enumerate(addresses[:SOURCES])), hub, timeout), tensors


def _syncs(rank, world, folder, way, scratch, network=P2P):
    """Sync two versions. Returns: by how many bytes this process's own and shared memory grew, and its buffers' bytes."""
    if network == NIXL:
        os.environ["UCX_TLS"] = "tcp"  # no transport that needs both ends on one machine
    sync = make_sync(folder, way, network)
    end, tensors = ends(rank, folder, sync, scratch, 30.0)
    torch.distributed.barrier()
    own, shared = memory("Anon"), memory("Shmem")
    if rank < SOURCES:
        buffers = [end.send(version, tensors).buffer_bytes for version in (1, 2)]
    else:
        receiver = Receiver(Shard(tensors), end, "session")
        buffers = [receiver.receive(version).buffer_bytes for version in (1, 2)]
    taken = memory("Anon") - own, memory("Shmem") - shared, buffers
    if rank >= SOURCES:
        state = load_file(f"{folder}/model.safetensors")
        tp = sync.engines.tp
        expected = expected_sglang(state, sync.config.hf, Rank((rank - SOURCES) % tp, tp))
        assert all(torch.equal(tensors[name], values) for name, values in expected.items())
    return taken


@pytest.mark.parametrize("way", [MAPPED, COLOCATED, APART])
def test_two_buckets_of_memory_as_the_kernel_counts_it(ranks, model, tmp_path, way):
    results = ranks.run(_syncs, model, way, str(tmp_path))
    slack = 3 * MIB  # for Python and gloo; the model is 10 times as large as two buckets
    slots = 2 * BUCKET + 64 * 1024
    if way == COLOCATED:
        slots *= 2  # trainer ranks receive for engine ranks
    for rank, (own, shared, buffers) in enumerate(results):
        assert buffers[0] == buffers[1] <= slots
        taken_here = buffers[0] if rank >= SOURCES else 0
        assert own <= taken_here + slack, (rank, own)
        # an engine rank maps the slots of all trainer ranks that send to it
        assert shared <= slots * (SOURCES if way == MAPPED and rank >= SOURCES else 1), (rank, shared)


@pytest.mark.parametrize("way", [COLOCATED, APART])
def test_by_nixl_over_tcp(ranks, model, tmp_path, way):
    pytest.importorskip("nixl", reason="needs the package nixl (requirements/dev_no_deps.txt)")
    for _, _, buffers in ranks.run(_syncs, model, way, str(tmp_path), NIXL):
        assert buffers[0] == buffers[1]


class DyingOutbox(Outbox):
    def _complete(self, token, sent):
        if token[1] == 2:
            os._exit(1)
        super()._complete(token, sent)


def _source_dies(rank, world, folder, way, scratch, network=P2P):
    sync = make_sync(folder, way, network)
    end, tensors = ends(rank, folder, sync, scratch, 60.0)
    if rank < SOURCES:
        end.__class__ = DyingOutbox if rank == 1 else Outbox
        end.send(1, tensors)
    else:
        Receiver(Shard(tensors), end, "session").receive(1)


def _target_dies(rank, world, folder, way, scratch, network):
    sync = make_sync(folder, way, network)
    end, tensors = ends(rank, folder, sync, scratch, 60.0)
    if rank < SOURCES:
        end.send(1, tensors)
    else:
        receiver = Receiver(Shard(tensors), end, "session")
        if rank == SOURCES:
            os._exit(1)
        receiver.receive(1)


# Only some combinations: a pool whose rank died has to start again, which takes long.
@pytest.mark.parametrize(
    ("dies", "way", "network", "message"),
    [
        (_source_dies, MAPPED, P2P, r"LinkError: trainer rank 1 "),
        (_source_dies, COLOCATED, P2P, r"LinkError: trainer rank 1 "),
        (_source_dies, APART, NIXL, r"LinkError: trainer rank 1 "),
        (_target_dies, APART, P2P, r"LinkError: engine rank 0 "),
    ],
)
def test_an_end_that_dies_is_named_by_those_that_wait_for_it(
    ranks, model, tmp_path, dies, message, way, network
):
    if network == NIXL:
        pytest.importorskip("nixl", reason="needs the package nixl (requirements/dev_no_deps.txt)")
    with pytest.raises(RankError, match=message):
        ranks.run(dies, model, way, str(tmp_path), network, timeout=40)  # shorter than the ends' own timeout


def test_a_peer_that_registers_no_slots_is_named():
    """On GPUs slots are registered again for each version, which an engine that hangs never does."""
    pytest.importorskip("nixl", reason="needs the package nixl (requirements/dev_no_deps.txt)")

    def nobody(key):
        raise LinkError("not all members of the weight sync came within 5 s")

    member = SimpleNamespace(
        number=0, timeout=5.0, problem=None, name=lambda peer: f"engine rank {peer}", get=nobody, close=lambda: None
    )  # fmt: skip
    transport = NixlTransport(member, "cpu")
    try:
        with pytest.raises(LinkError, match=r"engine rank 1 said nothing for 5 s"):
            transport.move([Part(1, torch.zeros(4, dtype=torch.uint8), 0, 0, 0)], []).wait()
    finally:
        transport.close()


class OneTakes:
    """An agent of NIXL to which member 1 says that it has taken all packets, and no other member anything."""

    def __init__(self) -> None:
        self._said = {"member-1": [b"taken 1"]}

    def add_remote_agent(self, told: bytes) -> None:
        pass

    def send_notif(self, name: str, message: bytes) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        said, self._said = self._said, {}
        return said


def test_by_nixl_the_peer_that_does_not_take_its_packets_is_named():
    pytest.importorskip("nixl", reason="needs the package nixl (requirements/dev_no_deps.txt)")
    member = SimpleNamespace(
        number=0, timeout=0.2, problem=None, name=lambda peer: f"engine rank {peer}", close=lambda: None,
        get=lambda key: b'{"agent": "", "slots": []}',
    )  # fmt: skip
    transport = NixlTransport(member, "cpu")
    transport._agent = OneTakes()
    try:
        sends = [Part(peer, torch.zeros(4, dtype=torch.uint8), 0, 0, 0) for peer in (1, 2)]
        with pytest.raises(LinkError, match=r"engine rank 2 said nothing for 0.2 s"):
            transport.move(sends, []).wait()
    finally:
        transport.close()


def _disconnect(*_):
    from nixl._bindings import nixlRemoteDisconnectError

    raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")


@pytest.mark.parametrize("call", ["transfer", "check_xfer_state", "send_notif"])
def test_an_end_that_nixl_finds_disconnected_is_named(call):
    pytest.importorskip("nixl", reason="needs the package nixl (requirements/dev_no_deps.txt)")
    member = SimpleNamespace(
        number=0, timeout=5.0, problem=None, wait_for_word=lambda: None, name=lambda peer: f"trainer rank {peer}",
        set=lambda key, value: None, close=lambda: None,
    )  # fmt: skip
    transport = NixlTransport(member, "cpu")
    answers = {"transfer": "PROC", "check_xfer_state": "DONE", "get_new_notifs": {"member-1": [b"ready 1"]}}
    agent = {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    others = ("initialize_xfer", "get_xfer_descs", "release_xfer_handle", "send_notif")
    transport._agent = SimpleNamespace(
        **{**dict.fromkeys(others, lambda *_: None), **agent, call: _disconnect}
    )
    transport._slots, transport._places = [(0, 4, 0)], {1: [(0, 4, 0)]}
    part = Part(1, torch.zeros(4, dtype=torch.uint8), 0, 0, 0)
    try:
        with pytest.raises(LinkError, match=r"trainer rank 1 could not be read from by NIXL"):
            transport.move(*(([part], []) if call == "send_notif" else ([], [part]))).wait()
    finally:
        transport.close()


def _send_from_gpu(share, folder, address, tensors):
    """A trainer rank in a process of its own, which holds `tensors` on the first GPU and sends two versions."""
    outbox = Outbox(share, folder, "127.0.0.1", "cuda", 120.0)
    if outbox.address.hub is not None:
        outbox.join(outbox.address.hub)
    address.put(outbox.address)
    parameters = {name: tensor.cuda() for name, tensor in tensors.items()}
    for version in (1, 2):
        outbox.send(version, parameters)
        parameters = {name: tensor + 1 for name, tensor in parameters.items()}


@pytest.fixture
def gpu_of_engine(request: pytest.FixtureRequest) -> Iterator[int]:
    if torch.cuda.device_count() <= request.param:
        pytest.skip(f"needs {request.param + 1} CUDA devices, this machine has {torch.cuda.device_count()}")
    with torch.cuda.device(request.param):
        yield request.param


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none")
@pytest.mark.parametrize(
    ("gpu_of_engine", "way"), [(0, MAPPED), (1, APART)], indirect=["gpu_of_engine"], ids=["same", "nccl"]
)
def test_from_device_memory_into_an_engine_on_a_gpu(model, tmp_path, gpu_of_engine, way):
    """On the same GPU, and over a communicator to another GPU."""
    source_place, target_place = ((RankPlace("node", str(gpu)),) for gpu in (0, gpu_of_engine))
    config, alone = read_model_config(model), ParallelLayout(world=1)
    sync = SyncPlan(
        config, alone, EngineLayout(1), torch.bfloat16, BUCKET, source_place, target_place, device="cuda"
    )
    assert sync.way == way
    (source,), (target,) = sync.shares()
    context = torch.multiprocessing.get_context("spawn")
    address, (parameters,) = context.Queue(), empty_shards(megatron_layout(config, alone))
    load_hf_weights(model, config, alone, 0, parameters)
    process = context.Process(target=_send_from_gpu, args=(source, str(tmp_path), address, parameters))
    process.start()
    (tensors,) = empty_shards(sglang_layout(config, sync.engines))
    tensors = {name: tensor.cuda().bfloat16() for name, tensor in tensors.items()}
    found = address.get(timeout=180)
    told = InboxFile(replace(target, padding={}), {0: found}, found.hub, 120.0)
    receiver = Receiver(Shard(tensors), told, "session")
    state = load_file(f"{model}/model.safetensors")
    for version in (1, 2):
        assert (receiver.receive(version).buffer_bytes == 0) == (way == MAPPED)
        expected = expected_sglang(state, config.hf, Rank(0, 1))
        assert all(torch.equal(tensors[name].cpu(), values.bfloat16()) for name, values in expected.items())
        state = {name: tensor + 1 for name, tensor in state.items()}
    process.join(60)
