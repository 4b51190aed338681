"""Training whose memory leaves the device and comes back between steps: the same bits, and the memory is really freed."""

import threading
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from megarl.config.schema.commands import OptimConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron import offload
from megarl.megatron.build import build_model, local_parameters, runnable, wrap_for_training
from megarl.megatron.fsdp import gather
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.offload import Offloadable, frozen_of, gradients_of, optimizer_of, weights_of
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import arrange_trajectories
from megarl.megatron.parallel import coords, init_parallel
from megarl.megatron.step import forward_only, train_step
from tests.megatron.hf import make_table
from tests.megatron.test_build import CONFIG, EXPERTS
from tests.megatron.test_step import PLANS, weighted_loss
from tests.ranks import RankPool

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1)


def _train(rank: int, world: int, options: dict[str, Any], away: bool) -> dict[str, Any]:
    """Two steps and a forward pass; with `away` all memory leaves the device after each step.

    Returns: norms, this rank's weights, outputs, and the bytes of each part before leaving, while away and after coming back.
    """
    layout = ParallelLayout(world=world, **options.get("layout", {}))
    init_parallel(layout, rank, world)
    dtype = options.get("dtype", torch.float32)
    chunks = wrap_for_training(
        build_model(replace(CONFIG, moe=options.get("moe")), layout, dtype=dtype),
        use_distributed_optimizer=options.get("distributed", True),
        fsdp=options.get("fsdp"),
        matrices=options.get("muon", False),
    )
    optim = replace(OPTIM, optimizer="muon" if options.get("muon") else "adam")
    optimizer, scheduler = build_optimizer(chunks, optim, num_steps=2)
    parts = [weights_of(chunks), gradients_of(chunks), optimizer_of(chunks, optimizer)]
    head = lm_head(vocab_size=CONFIG.vocab_size, temperature=1.0, chunk_tokens=16, with_entropy=True)
    shape = {"tp": layout.tp, "cp": 1, "cp_rank": 0, "sequence_parallel": layout.sp}
    plan = PLANS[layout.dp][1][coords().dp]
    batches = [arrange_trajectories(make_table(), rows, ["advantages"], **shape).on_device() for rows in plan]
    norms, sizes = [], []
    for _ in range(2):
        norms.append(train_step(chunks, optimizer, scheduler, batches, head, weighted_loss).grad_norm)
        if away:
            sizes.append(_take_away_and_back(parts))
    outputs = [output for output in forward_only(runnable(chunks), batches, head) if output is not None]
    gather(chunks)
    weights = {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}
    return {"norms": norms, "weights": weights, "outputs": outputs, "sizes": sizes}


def _take_away_and_back(parts: list[Any]) -> list[list[int]]:
    """For each part: device bytes before, while away and after; host bytes while away."""
    before = [part.device_bytes() for part in parts]
    for part in parts:
        part.offload()
        with pytest.raises(AssertionError, match="reload"):
            part.require()
    away = [part.device_bytes() for part in parts]
    host = [part.host_bytes() for part in parts]
    for part in reversed(parts):
        part.reload()
        part.require()
    return [before, away, [part.device_bytes() for part in parts], host]


OPTIONS = [
    (1, {}),
    (2, {}),
    (2, {"distributed": False}),
    (2, {"dtype": torch.bfloat16}),
    (2, {"dtype": torch.bfloat16, "distributed": False}),
    (4, {"layout": {"tp": 2, "sp": True, "pp": 2, "vpp": 2}}),
]


SHARED = [
    (2, {"fsdp": "optim_grads"}),
    (2, {"fsdp": "optim_grads_params", "dtype": torch.bfloat16}),
]
# Experts have buffers and an optimizer of their own.
MIXTURE = (2, {"layout": {"ep": 2}, "moe": EXPERTS})
MUON = (2, {"muon": True, "dtype": torch.bfloat16, "moe": EXPERTS})


@pytest.mark.parametrize(("world", "options"), [*OPTIONS, *SHARED, MIXTURE, MUON])
def test_training_is_the_same_bit_for_bit(ranks: RankPool, world: int, options: dict[str, Any]) -> None:
    stayed = ranks.run(_train, options, False, world=world)
    for found, expected in zip(ranks.run(_train, options, True, world=world), stayed, strict=True):
        assert found["norms"] == expected["norms"]
        for name, tensor in expected["weights"].items():
            assert torch.equal(found["weights"][name], tensor), name
        for output, wanted in zip(found["outputs"], expected["outputs"], strict=True):
            assert torch.equal(output, wanted)
        for before, away, after, _ in found["sizes"]:
            assert min(before) > 0 and away == [0, 0, 0] and after == before


@pytest.mark.parametrize(("world", "options"), OPTIONS)
def test_the_bytes_are_those_of_the_tensors(ranks: RankPool, world: int, options: dict[str, Any]) -> None:
    """Adam has two states and, for bfloat16 weights, float32 copies; if distributed, only for the rank's part."""
    half = options.get("dtype") == torch.bfloat16
    shared = world // ParallelLayout(world=world, **options.get("layout", {})).dp if world > 1 else 1
    dp = world // shared if options.get("distributed", True) else 1
    for found in ranks.run(_train, options, True, world=world):
        count = sum(tensor.numel() for tensor in found["weights"].values())
        for before, _, _, host in found["sizes"]:
            weights, gradients, optimizer = before
            padding = 4096  # elements: buffers are padded to even shares
            assert 0 <= weights - count * (2 if half else 4) <= 4 * padding
            assert 0 <= gradients - count * 4 <= 4 * padding
            assert abs(optimizer * dp - count * (12 if half else 8)) <= 12 * dp * padding
            assert host == [weights, 0, optimizer]


def test_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor and a view of it, in several chunks; memory that is shared with an excluded tensor stays.

    Chunks of more than 32 MiB: glibc keeps no freed memory of that size (mallopt(3), M_MMAP_THRESHOLD).
    """
    monkeypatch.setattr(offload, "CHUNK_BYTES", 44_000_003)
    whole, kept = torch.arange(40 << 20, dtype=torch.float32), torch.ones(1000)
    view = whole[5:-5].view(-1, 2)
    tensors = Offloadable(lambda: [whole, view, kept[10:]], excluded=lambda: [kept])
    expected = view.sum()
    before = psutil.Process().memory_info().rss
    tensors.offload()
    assert len(tensors.host) == 1 and len(next(iter(tensors.host.values()))) == 4
    assert (tensors.device_bytes(), tensors.host_bytes()) == (0, 160 << 20)
    tensors.host.clear()  # on a CPU the copy takes the place of the freed memory
    assert before - psutil.Process().memory_info().rss > 140 << 20
    whole.untyped_storage().resize_(160 << 20)
    torch.arange(40 << 20, dtype=torch.float32, out=whole)
    tensors.resident = True
    tensors.offload()
    tensors.reload()
    assert torch.equal(view.sum(), expected) and tensors.host_bytes() == 0
    assert kept.sum() == 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none")
def test_a_gpus_memory_is_free_for_other_processes() -> None:
    tensors = [torch.randn(64 << 20, device="cuda"), torch.randn(1000, device="cuda")]
    view = tensors[0][1:]
    part = Offloadable(lambda: [*tensors, view])
    expected = [tensor.cpu() for tensor in tensors]
    for _ in range(2):
        free, _ = torch.cuda.mem_get_info()
        part.offload()
        assert torch.cuda.mem_get_info()[0] - free > 200 << 20
        addresses = [copy.data_ptr() for copies in part.host.values() for copy in copies if copy.is_pinned()]
        part.reload()
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.cpu(), wanted)
    assert addresses == [copy.data_ptr() for copies in part.host.values() for copy in copies]


def test_shared_gradients_that_leave_alone_are_free_for_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch keeps freed memory of a GPU until it is told to give it back; Megatron tells it of gradients that are not shared."""
    gradient, found = torch.ones(1000), list[int]()
    monkeypatch.setattr(offload, "is_sharded", lambda chunk: True)
    monkeypatch.setattr(offload, "gradient_buffers", lambda chunk: [gradient])
    part = gradients_of([torch.nn.Module()])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(part.device_bytes()))
    part.offload()
    assert found == [0]


class Driver:
    """A stand-in for CUDA's driver that page-locks memory by address and bytes."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.num_calls = 0
        self.goes_on = threading.Event()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert self.goes_on.wait(60)
        self.locked[address] = nbytes
        self.num_calls += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_the_hosts_room_is_locked_once_and_in_one_piece_while_the_process_goes_on(driver: Driver) -> None:
    tensors = [torch.arange(1000.0), torch.arange(77, dtype=torch.int16)]
    wanted = [tensor.clone() for tensor in tensors]
    part = Offloadable(lambda: tensors, keeps=True)
    part.reserve()  # returns before anything is locked
    assert driver.num_calls == 0
    driver.goes_on.set()
    for _ in range(2):
        part.offload()
        assert part.device_bytes() == 0
        part.reload()
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, wanted, strict=True))
    assert (driver.num_calls, list(driver.locked.values())) == (1, [4000 + 154])
    tensors.append(torch.ones(5))  # such as a state that the first step creates
    part.offload()
    assert list(driver.locked.values()) == [4000 + 154 + 20]  # the earlier memory was unlocked
    part.reload()
    del part
    assert driver.locked == {}


def test_tensors_that_are_on_the_host_keep_their_room(driver: Driver) -> None:
    """`reserve` is called again after a rank's first step, while the reference is on the host."""
    driver.goes_on.set()
    tensor = torch.arange(10.0)
    part = Offloadable(lambda: [tensor], constant=True, keeps=True)
    part.reserve()
    part.offload()
    part.reserve()
    part.reload()
    assert tensor.tolist() == list(range(10))
    assert driver.num_calls == 1


def test_what_never_changes_is_copied_out_once(driver: Driver) -> None:
    driver.goes_on.set()
    for constant, expected in ((True, 1.0), (False, 2.0)):
        tensor = torch.ones(10)
        part = Offloadable(lambda tensor=tensor: [tensor], constant=constant, keeps=True)
        part.offload()
        part.reload()
        tensor.fill_(2.0)
        part.offload()
        part.reload()
        assert tensor.tolist() == [expected] * 10


def test_frozen_weights_are_copied_out_once(driver: Driver) -> None:
    """They are most of a model with adapters, which leaves its GPU in each step."""
    driver.goes_on.set()
    model = torch.nn.Linear(4, 4)
    part, weight = frozen_of([model], [model.bias]), model.weight.detach().clone()
    part.keeps = True
    for _ in range(2):
        part.offload()
        part.reload()
        assert torch.equal(model.weight, weight)
        model.weight.data.fill_(2.0)  # as nothing does: shows what is copied


def test_memory_that_cannot_be_locked_is_told(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cudaHostRegister", lambda *args: 2)
    tensor = torch.ones(10)
    part = Offloadable(lambda: [tensor], keeps=True)
    with pytest.raises(RuntimeError, match=r"cannot be page-locked \(CUDA error 2\)"):
        part.offload()
