"""The receiver's rules, on a module with two parameters; test_sglang_engine.py tests it inside SGLang."""

import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megarl.layout.boxes import Box
from megarl.weight_sync import receiver as after_update
from megarl.weight_sync.links import LinkError
from megarl.weight_sync.receiver import RECEIVER, Receiver
from megarl.weight_sync.served_model import RefusedError, overlap
from megarl.weight_sync.sync_plan import APART, MAPPED
from tests.rollout.manifests import Slices
from tests.rollout.sender import Sender


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 6), -1.0))
        self.bias = torch.nn.Parameter(torch.full((4,), -1.0, dtype=torch.bfloat16))


WEIGHT = torch.arange(24.0).view(4, 6)
BIAS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
TOP = ("up", "weight", [0, 0], WEIGHT[:2])
LEFT = ("down", "weight", [2, 0], WEIGHT[2:, :2])
RIGHT = ("down", "weight", [2, 2], WEIGHT[2:, 2:])
ALL_BIAS = ("bias", "bias", [0], BIAS)
ALL = [TOP, LEFT, RIGHT, ALL_BIAS]


@pytest.fixture
def connect(tmp_path):
    """connect(slices, ...) -> (sender, receiver, model)"""
    senders = []

    def connect(slices, padding=(), num_buckets=2, way=MAPPED, timeout=10.0, **more):
        sender = Sender(
            tmp_path / str(len(senders)),
            [Slices(list(slices), dict(padding))],
            num_buckets,
            way,
            timeout,
            **more,
        )
        senders.append(sender)
        sending, model = sender.send(1), Tiny()  # both ends connect as they start
        receiver = Receiver(model, sender.told[0], "session")
        return sender, sending, receiver, model

    yield connect
    for sender in senders:
        sender.close()


def receive(connect, slices, **more):
    """Receive a complete version; returns the model."""
    _, sending, receiver, model = connect(slices, **more)
    receiver.receive(1)
    sending.result()
    return model


@pytest.mark.parametrize("way", [MAPPED, APART])
@pytest.mark.parametrize("num_buckets", [1, 2, 3, 7])
def test_writes_slices_of_all_buckets(connect, way, num_buckets):
    _, sending, receiver, model = connect(ALL, num_buckets=num_buckets, way=way)
    received = receiver.receive(1)
    assert received.bytes_written == sending.result().bytes_sent == 4 * 24 + 2 * 4
    assert torch.equal(model.weight, WEIGHT)
    assert torch.equal(model.bias, BIAS)


@pytest.mark.parametrize("way", [MAPPED, APART])
def test_one_version_after_the_other(connect, way):
    sender, sending, receiver, model = connect(ALL, num_buckets=3, way=way)
    receiver.receive(1)
    sending.result()
    for name, tensor in sender.parameters.items():
        sender.parameters[name] = tensor + 7
    sending = sender.send(2)
    receiver.receive(2)
    sending.result()
    assert torch.equal(model.weight, WEIGHT + 7) and torch.equal(model.bias, BIAS + 7)


def test_padding_is_declared_and_left_alone(connect):
    slices = [TOP, LEFT, ALL_BIAS]
    with pytest.raises(RefusedError, match=r"weight: 8 of 24 elements missing, padding is 0"):
        receive(connect, slices)
    with pytest.raises(RefusedError, match=r"weight: 8 of 24 elements missing, padding is 9"):
        receive(connect, slices, padding={"weight": 9})
    with pytest.raises(RefusedError, match=r"wait: padding of no parameter"):
        receive(connect, slices, padding={"weight": 8, "wait": 1})
    model = receive(connect, slices, padding={"weight": 8})
    assert torch.all(model.weight[2:, 2:] == -1)


def test_what_comes_twice_does_not_make_up_for_what_is_missing(connect):
    with pytest.raises(RefusedError, match="weight: slices overlap"):
        receive(connect, [TOP, TOP, ALL_BIAS])


def test_a_parameter_that_never_comes_is_named(connect):
    with pytest.raises(RefusedError, match="bias: 4 of 4 elements missing"):
        receive(connect, [TOP, LEFT, RIGHT])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("t", "wait", [0], BIAS), "t: the engine has no parameter 'wait'"),
        (("t", "weight", [3, 0], WEIGHT[:2]), r"t: weight has shape \(4, 6\): no place for start \(3, 0\)"),
        (("t", "weight", [-1, 0], WEIGHT[:2]), "no place for start"),
        (("t", "weight", [0], WEIGHT.flatten()), "no place for start"),
        (("t", "bias", [0], BIAS.float()), "t: bias holds torch.bfloat16, not torch.float32"),
    ],
)
def test_a_slice_that_does_not_fit_is_refused(connect, wrong, message):
    with pytest.raises(RefusedError, match=message):
        receive(connect, [*ALL, wrong])


@pytest.mark.parametrize("position", [0, 23, 47])
@pytest.mark.parametrize("way", [MAPPED, APART])
def test_any_flipped_bit_is_found(connect, tmp_path, position, way):
    slices = [Slices([TOP, LEFT, RIGHT, ALL_BIAS])]
    sender = Sender(tmp_path / "s", slices, num_buckets=1, way=way)

    def flip(token, packet):
        packet.data[packet.body + position] ^= 0x10

    sender.outbox.tamper = flip
    sending = sender.send(1)
    receiver = Receiver(Tiny(), sender.told[0], "session")
    with pytest.raises(
        RefusedError,
        match=r"up: checksum 0x[0-9a-f]+ in weight, 0x[0-9a-f]+ on trainer rank 0, which sent it",
    ):
        receiver.receive(1)
    sending.result()
    sender.close()


def test_the_checksum_is_of_what_lies_in_the_parameter(connect):
    """A write that does not reach the parameter is found, though the sent bytes are intact."""
    _, _, receiver, _ = connect(ALL)
    original, reader = torch.Tensor.copy_, threading.get_ident()

    def lazy_copy(self, source, *args, **kwargs):
        mine = threading.get_ident() == reader
        return original(self, source.clone().zero_() if mine else source, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RefusedError, match=r"up: checksum"):
        patch.setattr(torch.Tensor, "copy_", lazy_copy)
        receiver.receive(1)


@pytest.mark.parametrize("way", [MAPPED, APART])
@pytest.mark.parametrize("step", ["_bind", "_take_bucket"])
def test_any_error_of_a_receiver_ends_its_connection(connect, monkeypatch, way, step):
    """Such as out of memory on the device: no other rank waits for this one, and the next version needs another connection."""
    _, sending, receiver, _ = connect(ALL, way=way)

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(receiver, step, no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        receiver.receive(1)
    with pytest.raises(LinkError, match="engine rank 0 closed its connection"):
        sending.result()
    monkeypatch.undo()
    with pytest.raises(LinkError, match="connected anew"):
        receiver.receive(2)
    assert receiver.verify_again() is None  # the version was given up


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_packet_is_noticed(tmp_path, lost):
    sender = Sender(tmp_path / "s", [Slices(ALL)], num_buckets=3)
    sender.outbox.tamper = lambda token, packet: token[1] != lost
    sender.send(1)
    receiver = Receiver(Tiny(), sender.told[0], "session")
    with pytest.raises(
        LinkError, match=f"trainer rank 0 is at bucket {lost + 1} .* where bucket {lost} of version 1"
    ):
        receiver.receive(1)
    with pytest.raises(LinkError, match="connected anew"):
        receiver.receive(2)
    sender.close()


def test_a_packet_of_another_bucket_or_version_is_refused(tmp_path):
    for identity, found in (((1, 1), "bucket 1 of version 1"), ((0, 0), "bucket 0 of version 0")):
        sender = Sender(tmp_path / found, [Slices(ALL)], num_buckets=2)

        def stale(token, packet, identity=identity):
            if token == (1, 0):
                packet.identity.copy_(torch.tensor(identity))

        sender.outbox.tamper = stale
        sending = sender.send(1)
        receiver = Receiver(Tiny(), sender.told[0], "session")
        with pytest.raises(
            RefusedError, match=f"trainer rank 0 sent {found} where bucket 0 of version 1 was due"
        ):
            receiver.receive(1)
        sending.result()
        sender.close()


@pytest.mark.parametrize("way", [MAPPED, APART])
def test_a_silent_trainer_is_named_within_the_timeout(tmp_path, way):
    sender = Sender(tmp_path / "s", [Slices(ALL)], num_buckets=3, way=way, timeout=1.0)
    sender.outbox.tamper = lambda token, packet: token[1] < 2
    sending = sender.send(1)
    receiver = Receiver(Tiny(), sender.told[0], "session")
    begun = time.monotonic()
    with pytest.raises(LinkError, match="trainer rank 0"):
        receiver.receive(1)
    assert time.monotonic() - begun < 30
    sender.close()
    del sending


def test_an_engine_that_never_comes_is_named(tmp_path):
    sender = Sender(tmp_path / "s", [Slices(ALL)], timeout=0.5)
    with pytest.raises(LinkError, match=r"engine rank 0 said nothing for 0.5 s"):
        sender.send(1).result()
    with pytest.raises(LinkError, match="connected anew"):
        sender.send(2).result()
    sender.close()


def test_an_engine_that_goes_away_is_named(tmp_path):
    sender = Sender(tmp_path / "s", [Slices(ALL)], num_buckets=4)
    sending = sender.send(1)
    receiver = Receiver(Tiny(), sender.told[0], "session")
    receiver.close()
    with pytest.raises(LinkError, match="engine rank 0 closed its connection"):
        sending.result()
    sender.close()


@pytest.mark.parametrize("way", [MAPPED, APART])
def test_what_did_not_change_stays_and_is_verified(connect, way):
    sender, sending, receiver, model = connect(ALL, num_buckets=3, way=way, skip_unchanged=True)
    receiver.receive(1)
    sending.result()

    def update(version, held):
        sending = sender.send(version, {0: held})
        try:
            return receiver.receive(version)
        finally:
            sending.result()

    assert update(2, None).bytes_kept == 0  # the first version was sent without a record of its checksums
    name = next(name for name, tensor in sender.parameters.items() if tensor is LEFT[3])
    sender.parameters[name] = LEFT[3] * 2
    received = update(3, 2)
    assert (received.bytes_written, received.bytes_kept) == (16, 4 * 20 + 2 * 4)
    assert torch.equal(model.weight[2:, :2], LEFT[3] * 2)
    assert update(4, None).bytes_kept == 0  # an engine that holds nothing gets everything
    with torch.no_grad():
        model.weight[0, 0] += 1
    with pytest.raises(
        RefusedError, match=r"up: checksum .* in weight, .* trainer rank 0, which did not send it"
    ):
        update(5, 4)


def test_parameters_may_move_in_memory(connect):
    """As happens when an engine's memory is released and allocated again."""
    sender, sending, receiver, model = connect(ALL)
    receiver.receive(1)
    sending.result()
    model.weight.data = torch.zeros(4, 6)
    sending = sender.send(2)
    receiver.receive(2)
    sending.result()
    assert torch.equal(model.weight, WEIGHT)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], False),
        ([((0, 0), (2, 3)), ((1, 2), (2, 3))], True),
        ([((0, 0), (9, 1)), ((1, 1), (1, 1)), ((3, 1), (1, 1)), ((8, 0), (1, 1))], True),
        ([((0, 0), (9, 1)), ((1, 1), (1, 1)), ((3, 1), (1, 1)), ((8, 1), (1, 1))], False),
    ],
)
def test_overlap(boxes, expected):
    assert overlap([Box(*box) for box in boxes]) is expected
    assert overlap([Box(*box) for box in reversed(boxes)]) is expected


def test_what_sglang_changes_at_the_end_of_an_update_is_found(connect):
    """After the first version all parameters are read once more; after later versions only parameters whose tensor was replaced."""
    sender, sending, receiver, model = connect(ALL)
    receiver.receive(1)
    sending.result()
    with torch.no_grad():
        model.weight[2, 5] += 1
    assert receiver.verify_again() == "SGLang's end_weight_update has changed down in weight"
    with torch.no_grad():
        model.weight[2, 5] -= 1
    assert receiver.verify_again() is None

    sending = sender.send(2)
    receiver.receive(2)
    sending.result()
    model.bias.data = model.bias.data.clone()
    assert receiver.verify_again() is None
    model.bias.data = model.bias.data + 1
    assert receiver.verify_again() == "SGLang's end_weight_update has changed bias in bias"
    model.bias.data = model.bias.data.to(torch.float32)
    assert "bias holds torch.float32, not torch.bfloat16" in receiver.verify_again()


def test_a_refused_version_is_not_read_again(connect):
    _, sending, receiver, _ = connect([TOP, LEFT, ALL_BIAS])
    with pytest.raises(RefusedError):
        receiver.receive(1)
    sending.result()
    assert receiver.verify_again() is None


def test_scales_of_the_cache_are_one_after_a_version(connect):
    """They are no part of the version, and may hold any value before it."""
    _, sending, receiver, model = connect(ALL)
    model.k_scale = torch.nn.Parameter(torch.tensor(5e-4), requires_grad=False)
    model.k_scale._skip_weight_check = True
    receiver.receive(1)
    sending.result()
    assert model.k_scale == 1.0 and torch.equal(model.bias, BIAS)


@dataclass
class Answer:
    success: bool
    message: str


@pytest.fixture
def others(monkeypatch):
    """Another rank's result."""
    found = {"problem": None}
    monkeypatch.setattr(after_update, "every_rank", lambda mine, group: [mine, found])
    return found


def updater(problem):
    model = torch.nn.Module()
    setattr(model, RECEIVER, SimpleNamespace(verify_again=lambda: problem))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return SimpleNamespace(tp_worker=worker, tp_cpu_group=None)


def test_an_update_that_changed_nothing_is_answered_as_it_was(others):
    answer = Answer(True, "Success")
    assert after_update.verify_after_update(answer, updater(None), None) is answer


def test_any_rank_that_finds_other_weights_makes_it_a_refusal(others):
    others["problem"] = "w has changed"
    found = after_update.verify_after_update(Answer(True, "Success"), updater(None), None)
    assert found == Answer(False, "w has changed (TP rank 1)")
    refused = Answer(False, "no session")
    assert after_update.verify_after_update(refused, updater("v has changed"), None) is refused
