"""Adam's states on the host: the same bits as on the device, in any layout; checkpoints fit states on the host and on the device."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.tiny_model import make_tiny_model
from megarl.megatron.checkpoint.checkpoint import load_states, save_states
from megarl.megatron.checkpoint.states import parts_of
from megarl.megatron.cpu.adam import FusedAdam
from megarl.megatron.host_adam import SLOTS, HostAdam, Slots
from megarl.megatron.offload import HostStates, optimizer_of
from megarl.megatron.optimizer import optimizer_step, zero_gradients
from tests.megatron.clocks import Races, Streams
from tests.megatron.parity import VOCAB
from tests.megatron.states import Setting, Trainee
from tests.ranks import RankPool

FAMILIES = {"dense": {"family": "qwen2", "tie_word_embeddings": True}, "mixture": {"family": "deepseek_v3"}}
BUCKET = 4096  # elements: a tiny model's weights are split, and slots used several times


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """From a name in FAMILIES to the folder of its tiny model."""

    @cache
    def make(name: str) -> str:
        sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": VOCAB}
        return str(make_tiny_model(tmp_path_factory.mktemp(name), ["two words"], **sizes, **FAMILIES[name]))

    return make


def _train(rank: int, world: int, model: str, setting: Setting) -> tuple[Any, ...]:
    """Two steps, one that is skipped, one more. Returns: hashes, history, whether states are on the host, buckets, bytes of the states."""
    trainee = Trainee(rank, world, model, setting)
    history = trainee.steps(2)
    part = optimizer_of(trainee.chunks, trainee.optimizer)
    before = trainee.hashes()
    zero_gradients(trainee.chunks, trainee.optimizer)
    for chunk in trainee.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(float("nan"))
    assert not optimizer_step(trainee.optimizer, trainee.scheduler)[1]
    assert trainee.hashes() == before
    sizes = [part.device_bytes(), part.host_bytes()]
    part.offload()
    sizes.append(part.device_bytes())
    part.reload()
    history += trainee.steps(1)
    buckets = [len(own.optimizer.buckets) for own in parts_of(trainee.optimizer) if setting.on_host]
    kept = [fragment.nbytes for fragment in _states(trainee)]
    return trainee.hashes(), history, isinstance(part, HostStates), buckets, sizes, sum(kept)


def _states(trainee: Trainee) -> list[torch.Tensor]:
    """Adam's states on the host, with its float32 copies of weights."""
    found = []
    for part in parts_of(trainee.optimizer):
        for parameter, _, main, state in part.optimizer.fragments() if _on_host(part) else ():
            found += [*state.values(), *([main] if main.dtype != parameter.dtype else [])]
    return found


def _on_host(part: Any) -> bool:
    return isinstance(part.optimizer, HostAdam)


SETTINGS = [
    ("dense", Setting(1, {})),
    ("dense", Setting(2, {}, dtype=torch.bfloat16)),
    ("dense", Setting(2, {}, distributed=False, dtype=torch.bfloat16)),
    ("dense", Setting(2, {}, distributed=False)),
    ("dense", Setting(1, {}, dtype=torch.float16)),
    ("dense", Setting(4, {"pp": 2, "vpp": 2}, dtype=torch.bfloat16)),
    ("mixture", Setting(4, {"tp": 2, "sp": True, "ep": 2}, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize(("family", "setting"), SETTINGS, ids=str)
def test_the_same_bits_as_on_the_device(
    ranks: RankPool, model_of: Callable[[str], str], family: str, setting: Setting
) -> None:
    """Weights, states, norms and losses after steps; one step in the middle has gradients that are not finite, and changes nothing."""
    model = model_of(family)
    usual = ranks.run(_train, model, setting, world=setting.world)
    found = ranks.run(_train, model, replace(setting, on_host=BUCKET), world=setting.world)
    rows = 2 if setting.dtype == torch.float32 else 3
    for (hashes, history, *_), (theirs, steps, on_host, buckets, sizes, kept) in zip(
        usual, found, strict=True
    ):
        assert history == steps
        assert hashes == theirs
        assert on_host and max(buckets) > 2 * SLOTS
        assert sizes[0] == SLOTS * rows * BUCKET * 4 and sizes[2] == 0
        assert kept <= sizes[1] < 1.2 * kept  # with alignment


def _save(rank: int, world: int, model: str, setting: Setting, folder: str) -> tuple[Any, ...]:
    trainee = Trainee(rank, world, model, setting)
    trainee.steps(2)
    save_states(folder, trainee.states)
    saved = trainee.hashes()
    return saved, trainee.steps(2), trainee.hashes()


def _load(rank: int, world: int, model: str, setting: Setting, folder: str) -> tuple[Any, ...]:
    trainee = Trainee(rank, world, model, setting, seed=5)
    trainee.steps(1)  # the checkpoint replaces its results
    load_states(folder, trainee.states)
    return trainee.hashes(), trainee.steps(2), trainee.hashes()


@pytest.mark.parametrize(
    ("family", "there"),
    [("dense", Setting(2, {})), ("mixture", Setting(2, {"ep": 2}, dtype=torch.bfloat16))],
    ids=["float32", "bfloat16-experts"],
)
def test_saved_and_loaded_with_and_without(
    ranks: RankPool, model_of: Callable[[str], str], tmp_path: Path, family: str, there: Setting
) -> None:
    """From the device to the host and back: bit for bit in the layout that saved, with the same losses in another layout."""
    model, here = model_of(family), replace(there, on_host=BUCKET)
    folders = {name: str(tmp_path / name) for name in ("there", "here")}
    expected = ranks.run(_save, model, there, folders["there"], world=2)
    assert ranks.run(_save, model, here, folders["here"], world=2) == expected
    for name, setting in (("there", here), ("here", there), ("here", here)):
        assert ranks.run(_load, model, setting, folders[name], world=2) == expected, (name, setting)
    other = replace(here, sizes={"pp": 2}, distributed=False)
    for _, steps, _ in ranks.run(_load, model, other, folders["here"], world=2):
        for step, wanted in zip(steps, expected[0][1], strict=True):
            assert step == pytest.approx(wanted, rel=1e-5 if there.dtype == torch.float32 else 1e-2)


def _before_a_step(rank: int, world: int, model: str, folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """Save before a step, and load after it. Returns: hashes at the save, and after loading."""
    trainee = Trainee(rank, world, model, Setting(world, {}, dtype=torch.bfloat16, on_host=BUCKET))
    save_states(folder, trainee.states)
    saved = trainee.hashes()
    trainee.steps(1)
    assert trainee.hashes() != saved
    load_states(folder, trainee.states)
    return saved, trainee.hashes()


def test_before_the_first_step(ranks: RankPool, model_of: Callable[[str], str], tmp_path: Path) -> None:
    for saved, loaded in ranks.run(_before_a_step, model_of("dense"), str(tmp_path / "new"), world=2):
        assert saved == loaded
        assert not any("exp_avg" in name for name in saved)


def _placeholder(rank: int, world: int, model: str) -> tuple[bool, str]:
    trainee = Trainee(rank, world, model, Setting(world, {}, dtype=torch.bfloat16, on_host=BUCKET))
    main = next(held.main for held in parts_of(trainee.optimizer)[0].optimizer.held if held.copied)
    with pytest.raises(RuntimeError) as caught:
        main.detach().copy_(torch.zeros(main.shape))
    return bool(main.isnan().all()), str(caught.value)


def test_a_copy_on_the_host_is_not_mistaken_for_one_on_the_device(
    ranks: RankPool, model_of: Callable[[str], str]
) -> None:
    """The device's placeholder of a copy on the host is NaN when read, and refuses to be written."""
    reads_nan, error = ranks.run(_placeholder, model_of("dense"), world=1)[0]
    assert reads_nan and "single memory location" in error


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"),
]


def _adam(weights: list[torch.Tensor], on_host: bool, bucket: int) -> Any:
    """Adam on float32 copies of bfloat16 weights, with states on the host or on the device; and the copies."""
    mains = [weight.detach().float().clone() for weight in weights]
    inner = FusedAdam(mains, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    if not on_host:
        return inner, mains
    updated = [(weight, 0, main) for weight, main in zip(weights, mains, strict=True)]
    return HostAdam(inner, updated, Slots(3, bucket)), mains


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_weights_are_cut_wherever_buckets_end(device: str) -> None:
    """With sizes that neither a vector's width nor a bucket divides; on a GPU, memory is page-locked, and copies overlap."""
    torch.manual_seed(0)
    bucket = 4 << 20 if device == "cuda" else 256
    shapes = [(bucket * 9 + 5,), (3,), (7, 33), (bucket,), (bucket // 4, 11)]
    start = [torch.randn(shape).to(device, torch.bfloat16) for shape in shapes]
    usual, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    (expected, mains), (found, copies) = _adam(usual, False, bucket), _adam(theirs, True, bucket)
    for step in range(4):
        for index, (main, copy) in enumerate(zip(mains, copies, strict=True)):
            # The second weight has no gradient in the first step.
            main.grad = torch.randn_like(main) if index != 1 or step else None
            copy.grad = None if main.grad is None else main.grad.clone()
        expected.step()
        found.step()
        for weight, main in zip(usual, mains, strict=True):
            weight.data.copy_(main)
    by_parameter = {id(parameter): (main, state) for parameter, _, main, state in found.fragments()}
    for weight, own, main in zip(usual, theirs, mains, strict=True):
        copy, state = by_parameter[id(own)]
        assert torch.equal(weight, own)
        assert torch.equal(main.cpu().view(-1), copy)
        for kind, values in state.items():
            assert values.device.type == "cpu"
            assert torch.equal(expected.state[main][kind].cpu().view(-1), values)
    assert found.param_groups[0]["step"] == 4
    if device == "cuda":
        assert found.copies.is_pinned() and all(moment.is_pinned() for moment in found.moments)
        assert found.slots.nbytes == SLOTS * 3 * bucket * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="the streams are stand-ins")
@pytest.mark.parametrize("broken", [None, "fetching", "storing", "wait"])
def test_copies_that_overlap_never_meet(monkeypatch: pytest.MonkeyPatch, broken: str | None) -> None:
    """The order that streams and events promise prevents races, and if any one of the waits is missing, it does not."""
    streams = Streams()
    for name, value in streams.patches().items():
        monkeypatch.setattr(torch.cuda, name, value)
    weights = [torch.nn.Parameter(torch.randn(size, dtype=torch.bfloat16)) for size in (2600, 70)]
    adam, copies = _adam(weights, True, 256)
    slots = adam.slots
    if broken == "wait":  # the wait for fetched states
        monkeypatch.setattr(streams.current, "wait_event", lambda event: None)
    if broken == "fetching":  # the wait for a free slot
        monkeypatch.setattr(slots.fetching, "wait_event", lambda event: None)
    if broken == "storing":  # the wait for computed states
        monkeypatch.setattr(slots.storing, "wait_stream", lambda stream: None)
    with Races(streams) as races:
        for _ in range(2):
            for copy in copies:
                copy.grad = torch.randn(copy.shape)
            adam.step()
            for moment in adam.moments:  # as a checkpoint reads them
                moment.sum()
    assert len(races.seen) > 100
    assert bool(races.found) == (broken is not None), races.found[:3]
