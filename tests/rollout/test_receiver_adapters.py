"""The receiver's rules for adapters that arrive first with weights and then without them, on a module of two parameters."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megarl.weight_sync.links import LinkError
from megarl.weight_sync.receiver import Receiver, ReceiveReport
from megarl.weight_sync.served_model import RefusedError, named_weights
from megarl.weight_sync.sync_plan import APART, MAPPED
from tests.rollout.manager import Manager
from tests.rollout.manifests import Slices
from tests.rollout.sender import Sender
from tests.weight_sync.test_receiver import BIAS, WEIGHT, Tiny

A, B = torch.arange(24.0).view(6, 4) + 100, torch.arange(16.0).view(8, 2) + 200
ADAPTER_BYTES = 4 * (24 + 16)
# One bucket for each slice; the other layer's slot gets no adapters.
SLICES = [
    ("w", "weight", [0, 0], WEIGHT), ("bias", "bias", [0], BIAS),
    ("a", "0.qkv.lora_A", [0, 0], A), ("b", "0.qkv.lora_B", [0, 0], B),
]  # fmt: skip
PADDING = {"1.o.lora_A": 8, "1.o.lora_B": 8}


class Ends:
    """A trainer rank and a receiver in an engine with a slot for adapters."""

    def __init__(self, folder: Path, way: str = MAPPED, scaling: float | None = 1.5) -> None:
        frozen = 2 if scaling is not None else 0
        self.sender = Sender(folder, [Slices(SLICES, PADDING)], 4, way, 5.0, frozen, scaling)
        self.model = Tiny()
        self.manager = Manager(self.model)
        sending = self.sender.send(1)
        self.receiver = Receiver(self.model, self.sender.told[0], "session")
        self._first = sending

    def run(self, version: int, complete: bool) -> ReceiveReport:
        sending = self._first if version == 1 else self.sender.send(version, complete=complete)
        try:
            return self.receiver.receive(version, complete)
        finally:
            sending.exception()

    def add(self, number: float) -> None:
        for name, tensor in self.sender.parameters.items():
            self.sender.parameters[name] = tensor + number

    @property
    def slot(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.manager.lora_modules[0]["0.qkv"]
        return layer.A_buffer_qkv[0], layer.B_buffer_qkv[0]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(*args: object, **kwargs: object) -> Ends:
        made.append(Ends(tmp_path / str(len(made)), *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.sender.close()


@pytest.mark.parametrize("way", [MAPPED, APART])
def test_adapters_come_alone_after_a_whole_version(pair: Callable[..., Ends], way: str) -> None:
    one = pair(way)
    assert one.run(1, complete=True).bytes_written == ADAPTER_BYTES + 4 * 24 + 2 * 4
    assert torch.equal(one.slot[0], A) and torch.equal(one.slot[1], B) and torch.equal(one.model.bias, BIAS)
    other = one.manager.lora_modules[1]["1.o"]
    assert not other.A_buffer.any() and not other.B_buffer.any()
    for version in (2, 3):
        one.add(7)
        assert one.run(version, complete=False).bytes_written == ADAPTER_BYTES
        assert torch.equal(one.slot[0], A + 7 * (version - 1)) and torch.equal(one.model.weight, WEIGHT)
    one.run(4, complete=True)
    assert torch.equal(one.model.weight, WEIGHT + 14) and torch.equal(one.slot[1], B + 14)


@pytest.mark.parametrize("way", [MAPPED, APART])
@pytest.mark.parametrize("position", [0, 41])
def test_after_a_flipped_bit_adapters_alone_are_refused(
    pair: Callable[..., Ends], way: str, position: int
) -> None:
    one = pair(way)
    one.run(1, complete=True)

    def flip(token: tuple[int, int], packet: object) -> None:
        if token == (2, 3):
            packet.data[packet.body + position] ^= 0x10

    one.sender.outbox.tamper = flip
    with pytest.raises(
        RefusedError, match=r"b: checksum 0x[0-9a-f]+ in 0\.qkv\.lora_B, 0x[0-9a-f]+ on trainer"
    ):
        one.run(2, complete=False)
    with pytest.raises(RefusedError, match="the engine holds no verified weights for them"):
        one.run(3, complete=False)
    one.run(4, complete=True)
    one.add(1)
    one.run(5, complete=False)
    assert torch.equal(one.slot[1], B + 1)


def test_a_lost_bucket_is_noticed(pair: Callable[..., Ends]) -> None:
    one = pair()
    one.run(1, complete=True)
    one.sender.outbox.tamper = lambda token, packet: token != (2, 2)
    with pytest.raises(LinkError, match=r"trainer rank 0 is at bucket 3 .* where bucket 2 of version 2"):
        one.run(2, complete=False)
    with pytest.raises(LinkError, match="connected anew"):
        one.run(3, complete=True)


def test_another_connection_begins_with_the_weights(pair: Callable[..., Ends], tmp_path: Path) -> None:
    one = pair()
    one.run(1, complete=True)
    sender = Sender(tmp_path / "again", [Slices(SLICES, PADDING)], 4, MAPPED, 5.0, 2, 1.5)
    sending = sender.send(2, complete=False)
    with pytest.raises(RefusedError, match="the engine holds no verified weights for them"):
        Receiver(one.model, sender.told[0], "another session").receive(2, complete=False)
    sending.result()
    sender.close()


def test_weights_that_moved_have_to_come_again(pair: Callable[..., Ends]) -> None:
    one = pair()
    one.run(1, complete=True)
    one.model.weight.data = torch.zeros(4, 6)
    with pytest.raises(RefusedError, match="the weights are not where they were"):
        one.run(2, complete=False)
    one.run(3, complete=True)
    assert torch.equal(one.model.weight, WEIGHT)


def test_adapters_that_left_their_slot_or_have_another_scaling_are_refused(pair: Callable[..., Ends]) -> None:
    one = pair()
    one.run(1, complete=True)
    one.manager.fetch_new_loras({None})
    with pytest.raises(RefusedError, match="SGLang took the adapters out of their slot"):
        one.run(2, complete=False)
    one.run(3, complete=True)  # puts the adapters back into the slot
    assert torch.equal(one.slot[0], A)
    with pytest.raises(RefusedError, match=r"the engine scales adapters by 1\.5, the trainer by 2"):
        pair(scaling=2.0).run(1, complete=True)


def test_an_engine_with_a_slot_takes_no_weights_without_adapters(pair: Callable[..., Ends]) -> None:
    with pytest.raises(RefusedError, match="started with adapters, weights come without them"):
        pair(scaling=None).run(1, complete=True)


def test_layers_that_were_wrapped_have_their_own_names() -> None:
    """Layers that are wrapped as SGLang does it: a parameter that the wrapper exposes counts once, and the layer's current parameter counts."""

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = Tiny()
            self.weight = self.base_layer.weight

    model = torch.nn.ModuleDict({"o_proj": Wrapper()})
    assert set(named_weights(model)) == {"o_proj.weight", "o_proj.bias"}
    model["o_proj"].base_layer.weight = torch.nn.Parameter(torch.zeros(4, 6))
    assert named_weights(model)["o_proj.weight"] is model["o_proj"].base_layer.weight
