"""The format of checkpoints: which rank writes which part, loading with megatron-core, refusals, damage, and background saves."""

import errno
import json
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from examples.tiny_model import make_tiny_model
from megarl import platform
from megarl.checkpoints import FileFacts
from megarl.checkpoints.convert import compare, convert
from megarl.checkpoints.dcp import DCPReader
from megarl.checkpoints.hf.load import load_hf_weights
from megarl.layout import Box, Piece
from megarl.megatron.build import local_parameters, unwrap
from megarl.megatron.checkpoint import checkpoint
from megarl.megatron.checkpoint.checkpoint import (
    BaseModel,
    Loaded,
    begin_save,
    finish_save,
    identify,
    load_states,
    save_states,
    share_out,
)
from megarl.megatron.checkpoint.places import Places, boxes_of_range, in_parts, range_items
from megarl.megatron.checkpoint.states import of_this_device, random_states, restart_random_states
from megarl.models import read_model_config
from tests.disks import small_disk
from tests.megatron.parity import VOCAB
from tests.megatron.states import Setting, Trainee, whole_tensors
from tests.ranks import RankError, RankPool

TP2_PP2 = Setting(4, {"tp": 2, "sp": True, "pp": 2})
ONE = Setting(1, {})


def make_model(folder: Path, **fields: Any) -> str:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": VOCAB}
    return str(make_tiny_model(folder, ["two words"], **(sizes | fields)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def _save(rank: int, world: int, model: str, setting: Setting, folder: str, steps: int = 1) -> None:
    trainee = Trainee(rank, world, model, setting)
    trainee.steps(steps)
    save_states(folder, trainee.states)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four ranks saved."""
    folder = tmp_path_factory.mktemp("saved") / "actor"
    ranks.run(_save, model, TP2_PP2, str(folder), world=4)
    return folder


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (4, 1)])
def test_ranges_are_boxes_in_order(shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for start in range(numbers.size):
        for stop in range(start, numbers.size + 1):
            boxes = list(boxes_of_range(start, stop, shape))
            found = [number for box in boxes for number in numbers[box.slices].ravel()]
            assert found == list(range(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1


def test_ranges_of_experts_adapters_begin_and_end_within_an_expert() -> None:
    """A rank's adapters of three experts are one tensor, which the optimizers of data parallel ranks cut anywhere; each expert's are a global
    tensor of their own."""
    experts, rank, columns = 3, 2, 4
    shape, numbers = (rank, columns), torch.arange(experts * rank * columns)
    pieces = tuple(
        Piece(f"a{expert}", Box.whole(shape), "0:lora.a", Box((expert, 0, 0), (1, *shape)))
        for expert in range(experts)
    )
    places = Places(pieces, {piece.tensor: shape for piece in pieces})
    expected = {piece.tensor: own for piece, own in zip(pieces, numbers.view(experts, *shape), strict=True)}
    for start in range(len(numbers)):
        for stop in range(start + 1, len(numbers) + 1):
            items = list(range_items("", places, pieces, (experts, *shape), start, numbers[start:stop]))
            assert sum(item.box.numel for item in items) == stop - start
            for item in in_parts(items):
                assert item.tensor.shape == item.box.size
                assert torch.equal(item.tensor, expected[item.key][item.box.slices])


def test_parts_are_written_once_and_shared_evenly() -> None:
    """Eight ranks: each pair shares a part, all share a small part, and each has a part of its own."""
    held = [
        [(("key", Box((rank // 2 * 4,), (4,))), 100), (("norm", Box((0,), (4,))), 4)] for rank in range(8)
    ]
    held = [[*parts, (("own", Box((rank,), (1,))), 50)] for rank, parts in enumerate(held)]
    chosen = share_out(held)
    written = [held[rank][index] for rank, indices in enumerate(chosen) for index in indices]
    assert len(written) == len(set(written)) == 4 + 1 + 8
    num_bytes = [sum(held[rank][index][1] for index in indices) for rank, indices in enumerate(chosen)]
    assert sorted(num_bytes) == [50, 50, 50, 54, 150, 150, 150, 150]
    assert share_out([[], [("part", 1)]]) == [[], [0]]


def test_replicas_share_what_there_is_to_write(ranks: RankPool, model: str, tmp_path: Path) -> None:
    ranks.run(_save, model, Setting(4, {}), str(tmp_path / "saved"), world=4)
    sizes: Counter[str] = Counter()
    for tensor in DCPReader(tmp_path / "saved").tensors.values():
        for chunk in tensor.chunks:
            sizes[chunk.file] += chunk.box.numel * tensor.dtype.itemsize
    assert len(sizes) == 4 and max(sizes.values()) < 1.1 * min(sizes.values())


def _load_with_megatron(rank: int, world: int, model: str, setting: Setting, folder: str) -> list[str]:
    """Load with megatron-core's own loader. Returns: the names of weights that differ from megarl's loader."""
    from megatron.core import dist_checkpointing, parallel_state

    ours = Trainee(rank, world, model, setting, seed=5)
    load_states(folder, ours.states)
    expected = {name: tensor.clone() for name, tensor in local_parameters(ours.chunks).items()}
    for tensor in local_parameters(ours.chunks).values():
        tensor.fill_(3.0)
    metadata = dist_checkpointing.load_content_metadata(folder)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    (chunk,) = unwrap(ours.chunks)
    states = dist_checkpointing.load(
        {"model": chunk.sharded_state_dict(metadata=metadata | {"dp_cp_group": group})}, folder
    )
    chunk.load_state_dict(states["model"], strict=True)
    found = local_parameters(ours.chunks)
    return [name for name, tensor in expected.items() if not torch.equal(found[name][:VOCAB], tensor[:VOCAB])]


def test_megatron_core_loads_the_weights(ranks: RankPool, model: str, saved: Path) -> None:
    different = ranks.run(_load_with_megatron, model, Setting(2, {"pp": 2}), str(saved), world=2)
    assert different == [[], []]


def _refusal(
    rank: int, world: int, model: str, setting: Setting, folder: str, base: BaseModel | None = None
) -> str:
    """The error's message, after a check that no weight was changed."""
    trainee = Trainee(rank, world, model, setting)
    before = trainee.hashes()
    with pytest.raises(ValueError) as caught:
        load_states(folder, replace(trainee.states, base=base))
    after = trainee.hashes()
    assert {name: after[name] for name in local_parameters(trainee.chunks)} == {
        name: before[name] for name in local_parameters(trainee.chunks)
    }
    return str(caught.value)


def test_other_models_are_refused(ranks: RankPool, model: str, saved: Path, tmp_path: Path) -> None:
    """All ranks raise the same message, though only some ranks have the tensor."""

    def refusal(name: str, base: BaseModel | None = None, **fields: Any) -> str:
        other = make_model(tmp_path / name, **fields)
        messages = ranks.run(_refusal, other, Setting(2, {"pp": 2}), str(saved), base, world=2)
        assert messages[0] == messages[1]
        return messages[0]

    wider = refusal("wider", ffn_hidden_size=128, tie_word_embeddings=True)
    assert wider.startswith(
        f"checkpoint {saved} does not fit: decoder.layers.0.mlp.linear_fc1.weight has shape "
    )
    assert "has shape (192, 64), this run has (256, 64)" in wider
    assert "more" in wider
    untied = refusal("untied")
    assert "output_layer.weight is missing; it should have shape (512, 64)" in untied
    deeper = refusal("deeper", num_layers=6, tie_word_embeddings=True)
    assert "decoder.layers.4." in deeper and "is missing" in deeper
    shallow = refusal("shallow", num_layers=2, tie_word_embeddings=True)
    assert "it has decoder.layers.2." in shallow and "which this run has no use for" in shallow
    adapters = refusal("adapters", BaseModel("/models/base", "ab" * 32), tie_word_embeddings=True)
    assert adapters.endswith(
        "it has a whole model, this run trains adapters on the model /models/base (sha256 abababababab)"
    )


def test_another_dtype_is_refused(ranks: RankPool, model: str, saved: Path) -> None:
    (message,) = ranks.run(_refusal, model, replace(ONE, dtype=torch.bfloat16), str(saved), world=1)
    assert "has dtype torch.float32, this run has torch.bfloat16" in message


def _save_critic(rank: int, world: int, model: str, folder: str) -> None:
    save_states(folder, Trainee(rank, world, model, Setting(4, {"pp": 2}, head="value")).states)


def _load_critic(rank: int, world: int, model: str, folder: str) -> list[str]:
    """The names of loaded weights that differ from the model's."""
    setting = Setting(2, {"tp": 2, "sp": True}, head="value")
    trainee = Trainee(rank, world, model, setting, seed=5)
    load_states(folder, trainee.states)
    config, found = read_model_config(model), local_parameters(trainee.chunks)
    expected = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    load_hf_weights(model, config, trainee.layout, rank, expected, "value")
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def test_a_value_head(ranks: RankPool, tmp_path: Path) -> None:
    """Saved before any step, when Adam has no states yet."""
    critic, folder = make_model(tmp_path / "hf", head="score"), str(tmp_path / "critic")
    ranks.run(_save_critic, critic, folder, world=4)
    assert ranks.run(_load_critic, critic, folder, world=2) == [[], []]
    convert(folder, str(tmp_path / "back"), companions=critic)
    assert compare(critic, str(tmp_path / "back")).equal


class _Payload:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> Any:
        return Path.touch, (self.touched,)


def test_damage_is_refused_and_nothing_is_unpickled(
    ranks: RankPool, model: str, saved: Path, tmp_path: Path
) -> None:
    def refusal(change: Callable[[Path], None]) -> str:
        folder = tmp_path / change.__name__
        shutil.copytree(saved, folder)
        change(folder)
        with pytest.raises(RankError) as caught:
            ranks.run(_load, model, str(folder), world=1)
        assert isinstance(caught.value.__cause__, ValueError)
        return str(caught.value.__cause__)

    def no_states(folder: Path) -> None:
        (folder / "states.json").unlink()

    def old_format(folder: Path) -> None:
        (folder / "states.json").write_text(json.dumps({"format": 0}))

    def no_file(folder: Path) -> None:
        (folder / "__1_0.distcp").unlink()

    def truncated(folder: Path) -> None:
        content = (folder / "__2_0.distcp").read_bytes()
        (folder / "__2_0.distcp").write_bytes(content[: len(content) // 2])

    def evil_metadata(folder: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(_Payload(tmp_path / "touched")))

    def evil_tensors(folder: Path) -> None:
        reader = DCPReader(folder)
        chunk = reader.tensors["decoder.final_layernorm.weight"].chunks[0]
        payload = tmp_path / "payload"
        torch.save(_Payload(tmp_path / "touched"), payload)
        content = bytearray((folder / chunk.file).read_bytes())
        evil = payload.read_bytes()
        content[chunk.offset : chunk.offset + chunk.length] = evil + bytes(chunk.length - len(evil))
        (folder / chunk.file).write_bytes(content)

    assert "it has no states.json" in refusal(no_states)
    assert "has format 0; this version of megarl reads 1" in refusal(old_format)
    assert "lacks its file __1_0.distcp" in refusal(no_file)
    assert "__2_0.distcp is damaged at byte" in refusal(truncated)
    assert "is no metadata of a distributed checkpoint" in refusal(evil_metadata)
    assert "is damaged at byte" in refusal(evil_tensors)
    assert not (tmp_path / "touched").exists()


def _load(rank: int, world: int, model: str, folder: str) -> None:
    load_states(folder, Trainee(rank, world, model, ONE).states)


def test_base_models_are_told_apart(tmp_path: Path) -> None:
    one, two = (identify(make_model(tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 1)))
    assert one.sha256 != two.sha256
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert identify(str(tmp_path / "copy")).sha256 == one.sha256


def _save_in_background(rank: int, world: int, model: str, folder: str) -> tuple[float, float]:
    """Save in the background while weights change. Returns: seconds until the start returned, and until the end."""
    trainee = Trainee(rank, world, model, TP2_PP2)
    trainee.steps(2)
    expected = trainee.hashes()
    begun = time.perf_counter()
    saving = begin_save(folder, trainee.states)
    blocked = time.perf_counter() - begun
    assert psutil.Process().children() == []  # no process that would outlive a killed rank
    for tensor in local_parameters(trainee.chunks).values():
        tensor.fill_(torch.nan)  # while the files are being written
    files = finish_save(saving)
    assert ("states.json" in files) == (rank == 0)
    load_states(folder, trainee.states)
    assert trainee.hashes() == expected
    return blocked, time.perf_counter() - begun


def test_what_is_saved_in_the_background_may_change_meanwhile(
    ranks: RankPool, model: str, tmp_path: Path
) -> None:
    ranks.run(_save_in_background, model, str(tmp_path / "behind"), world=4)
    ranks.run(_save, model, TP2_PP2, str(tmp_path / "at-once"), 2, world=4)
    behind, at_once = (whole_tensors(tmp_path / name) for name in ("behind", "at-once"))
    assert behind.keys() == at_once.keys()
    assert all(torch.equal(tensor, at_once[key]) for key, tensor in behind.items())


def _save_to_full_disk(rank: int, world: int, model: str, folder: str, background: bool) -> tuple[int, str]:
    trainee = Trainee(rank, world, model, Setting(2, {}))
    with pytest.raises(OSError) as caught:
        finish_save(begin_save(folder, trainee.states, background=background))
    return caught.value.errno, str(caught.value)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_named_on_all_ranks(
    ranks: RankPool, model: str, tmp_path: Path, background: bool
) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        for number, message in ranks.run(_save_to_full_disk, model, str(disk / "actor"), background, world=2):
            assert number == errno.ENOSPC
            assert "distcp" in message and "No space left" in message


def _save_with_fault(rank: int, world: int, model: str, folder: str, written: bool) -> str:
    """Rank 0 raises a ValueError: while it writes its file, or (`written`) after all ranks have written their files."""
    saving = begin_save(folder, Trainee(rank, world, model, Setting(2, {})).states, background=False)

    def companions() -> dict[str, FileFacts]:
        raise ValueError("a fault")

    if rank == 0 and not written:
        saving = replace(saving, written=Future())
        saving.written.set_exception(ValueError("a fault"))
    with pytest.raises(Exception, match="a fault") as caught:
        finish_save(saving, companions)
    return caught.type.__name__


@pytest.mark.parametrize("written", [False, True])
def test_a_fault_of_one_rank_is_no_file_error_of_the_others(
    ranks: RankPool, model: str, tmp_path: Path, written: bool
) -> None:
    """`trainer.on_save_error` is only for file errors."""
    kinds = ranks.run(_save_with_fault, model, str(tmp_path / "actor"), written, world=2)
    assert kinds == ["ValueError", "ValueError"]


def _load_with_another(
    rank: int, world: int, model: str, folder: str, unreadable: str
) -> tuple[type[Exception], str]:
    """Load, with another folder on rank 1."""
    trainee = Trainee(rank, world, model, Setting(world, {}))
    with pytest.raises((OSError, ValueError)) as caught:
        load_states(unreadable if rank == 1 else folder, trainee.states)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("file", [".metadata", "__1_0.distcp"])
def test_a_file_that_one_rank_cannot_read_is_named_on_all_ranks(
    ranks: RankPool, model: str, saved: Path, tmp_path: Path, file: str
) -> None:
    unreadable = tmp_path / "unreadable"
    shutil.copytree(saved, unreadable)
    (unreadable / file).unlink()
    (unreadable / file).mkdir()
    (other, text), (own, cause) = ranks.run(
        _load_with_another, model, str(saved), str(unreadable), world=2, timeout=60
    )
    assert own is IsADirectoryError and str(unreadable / file) in cause
    assert issubclass(other, OSError) and text.endswith(f"rank 1 could not load: {cause}")


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_file_that_is_damaged_for_one_rank_is_named_on_all_ranks(
    ranks: RankPool, model: str, saved: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    file = folder / "__1_0.distcp"
    content = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    (other, text), (own, cause) = ranks.run(_load_with_another, model, str(saved), str(folder), world=2)
    assert own is other is ValueError
    assert file.name in cause and text == f"rank 1 could not load: {cause}"


def _go_on_from_another_device(rank: int, world: int, model: str, folder: str) -> tuple[Loaded, bool]:
    """Save random states in a GPU's form, and load. Returns: how they were loaded, and whether the random streams were restarted."""
    trainee = Trainee(rank, world, model, ONE)
    generator = torch.zeros(16, dtype=torch.uint8)  # a GPU's seed and offset; a CPU's state is longer
    own = random_states()
    foreign = own | {"cuda": generator, "streams": dict.fromkeys(own["streams"], generator)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "random_states", lambda: foreign)
        save_states(folder, trainee.states)
    loaded = load_states(folder, trainee.states)
    with get_cuda_rng_tracker().fork():
        drawn = torch.rand(3)
    restart_random_states(trainee.states.seed, loaded.num_steps)
    with get_cuda_rng_tracker().fork():
        return loaded, torch.equal(drawn, torch.rand(3))


def test_random_states_of_another_kind_of_device_begin_anew(
    ranks: RankPool, model: str, tmp_path: Path
) -> None:
    results = ranks.run(_go_on_from_another_device, model, str(tmp_path / "saved"), world=1)
    assert results == [(Loaded(num_steps=0, exact=False), True)]


@pytest.mark.parametrize("saved_on_gpu", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_random_states_tell_their_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, saved_on_gpu: bool, gpu: bool
) -> None:
    monkeypatch.setattr(platform, "is_cuda", lambda: saved_on_gpu)
    states = random_states()
    monkeypatch.setattr(platform, "is_cuda", lambda: gpu)
    assert of_this_device(states) == (gpu == saved_on_gpu)
