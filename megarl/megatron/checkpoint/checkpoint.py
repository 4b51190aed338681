"""A Megatron rank's full state in a distributed checkpoint, saved and loaded in any layout.

Guarantees, each asserted by a test:
- Loaded into the layout that saved it everything is bit-identical: weights, optimizer states, learning rate, loss scale,
  random numbers, and so the steps that follow. In another layout, or on another kind of device, random streams start anew from seed and step.
- Loaded into any other layout, with a distributed optimizer or without, model and optimizer are the same to the bit.
- Every element is written once, by the rank with the least to write among its holders; no rank holds more of the model than
  its own part, nor reads elements that it does not hold.
- A checkpoint that does not fit is refused on all ranks before a weight is changed; error messages name the tensor, its shape in the
  checkpoint and the expected one.
- A rank that cannot read its part makes all ranks raise: none waits for it, and none goes on alone.
- Ranks read and write shared files at very different speeds: none is in a collective, which has a short timeout, until all are done.
- A background save has the state at the time when `begin_save` returned.
- Nothing is unpickled but tensors and plain types.

The folder is in megatron-core's format `torch_dist`: its `dist_checkpointing.load` reads the weights, and so does
`megarl convert`. Its own save and load are not used (0.19.2): they gather optimizer states or tie them to a layout, start
processes that outlive a killed rank, do not copy a CPU's tensors before they write in the background, and unpickle metadata
without limits. `states.json` has the state other than tensors.
"""

import errno
import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.checkpoints import FileFacts, seal_file
from megarl.checkpoints.dcp import (
    Chunk,
    Contents,
    DCPReader,
    StoredTensor,
    file_name,
    merged,
    write_file,
    write_metadata,
)
from megarl.layout import Box
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import local_parameters, named_parameters
from megarl.megatron.checkpoint.places import (
    CONTENT,
    OPTIMIZER,
    Item,
    Places,
    in_parts,
    relative,
    shard_items,
    weight_items,
)
from megarl.megatron.checkpoint.states import (
    num_steps,
    of_this_device,
    optimizer_items,
    random_states,
    restart_random_states,
    scaler_state,
    set_num_steps,
    set_random_states,
    set_scaler_state,
    set_schedule,
)
from megarl.megatron.fsdp import shards_of, shares_weights
from megarl.util.files import naming

# Loading: each chunk of the checkpoint that holds elements of this rank is read once, whatever layout saved it.


def mistakes_of(reader: DCPReader, items: Sequence[Item], padded: Mapping[str, int]) -> Iterator[str]:
    """Why a checkpoint cannot fill a rank's tensors, in words; nothing if it can. Reads no tensor.

    padded: as in `Places`; rows beyond the vocabulary may be there or not.
    """
    for item in items:
        stored = reader.tensors.get(item.key)
        if stored is None:
            yield f"{item.key} is missing; it should have shape {item.shape}"
        elif stored.dtype != item.tensor.dtype:
            yield f"{item.key} has dtype {stored.dtype}, this run has {item.tensor.dtype}"
        elif not _fits(stored.shape, item, padded):
            yield f"{item.key} has shape {stored.shape}, this run has {item.shape}"
        else:
            wanted = item.box.intersect(Box.whole(stored.shape))
            needed = wanted.numel if wanted is not None else 0
            found = sum(common.numel for _, common in _overlaps(stored, item.box))
            if found != needed:
                yield f"{item.key} is incomplete: its chunks have {found} of {needed} elements at {item.box.start}"


def _fits(shape: tuple[int, ...], item: Item, padded: Mapping[str, int]) -> bool:
    if shape == item.shape:
        return True
    weight = item.key
    if weight.startswith(OPTIMIZER):
        weight = weight.removeprefix(OPTIMIZER).partition(".")[2]
    return weight in padded and shape[1:] == item.shape[1:] and shape[0] >= padded[weight]


def _overlaps(stored: StoredTensor, box: Box) -> Iterator[tuple[Chunk, Box]]:
    """The stored chunks that have a part of a box, with that part."""
    for chunk in stored.chunks:
        common = box.intersect(chunk.box)
        if common is not None:
            yield chunk, common


@torch.no_grad()
def fill(reader: DCPReader, items: Sequence[Item]) -> None:
    """Fill the tensors of `items` in place; rows of padding that the checkpoint lacks become zeros.

    Raises:
        ValueError: a file is damaged or not there.
    """
    wanted: dict[Chunk, list[tuple[Item, Box]]] = defaultdict(list)
    for item in items:
        stored = reader.tensors[item.key]
        if stored.shape != item.shape:
            item.tensor.zero_()
        for chunk, common in _overlaps(stored, item.box):
            wanted[chunk].append((item, common))
    for chunk in sorted(wanted, key=lambda chunk: (chunk.file, chunk.offset)):
        values = reader.load(chunk)
        for item, common in wanted[chunk]:
            leading = len(item.shape) - item.tensor.dim()
            target = item.tensor[relative(common, item.box, leading)]
            target.copy_(values[relative(common, chunk.box)].reshape(target.shape))


# The model that adapters were trained on: its path, and a fingerprint of its files that is quick to take.

NUM_SAMPLES, SAMPLE_BYTES = 64, 4096


class BaseModel(NamedTuple):
    """A Hugging Face folder, and the SHA-256 of its fingerprint."""

    path: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.path} (sha256 {self.sha256[:12]})"


def identify(path: str) -> BaseModel:
    """The model at `path`, with a fingerprint of the content of `config.json` and of every safetensors file's name, size, header and
    64 samples of 4 KiB, evenly over the file: these tell fine-tuned models apart without reading them.

    Raises:
        ValueError: no safetensors there.
    """
    folder, digest = Path(path).expanduser(), hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model folder {path!r} holds no safetensors files")
    config = json.loads((folder / "config.json").read_text())
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
            digest.update(opened.read(min(header, size)))
            for sample in range(NUM_SAMPLES):
                opened.seek(8 + header + (size - 8 - header) * sample // NUM_SAMPLES)
                digest.update(opened.read(SAMPLE_BYTES))
    return BaseModel(path, digest.hexdigest())


STATES_FILE = "states.json"
FORMAT = 1
MEGATRON_VERSION = (
    3.0  # of Megatron-LM's checkpoints: from 2.0 on the order of rows within linear_qkv is today's
)
COMMON = "common_state/shard_0_1"
_SHOWN = 8  # mistakes in an error


@dataclass(frozen=True)
class RankStates:
    """The state of a rank that is saved and loaded.

    Attributes:
        places: of the weights that are saved: the model's (`model_places`), or of adapters and a value head alone.
        seed: of random streams that are begun anew.
        base: the model that the adapters are on; None: the model itself is saved.
        wait_for_ranks: returns when all ranks have called it with the same text, such as "... is read"; None: ranks wait in the next collective.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    layout: ParallelLayout
    places: Places
    seed: int
    base: BaseModel | None = None
    wait_for_ranks: Callable[[str], object] | None = None

    def items(self, places: Places) -> list[Item]:
        """The tensors that lie in `places`, as they are now."""
        names = {parameter: name for name, parameter in named_parameters(self.chunks).items()}
        shards = {
            f"{index}:{shard.name}": shard
            for index, chunk in enumerate(self.chunks)
            if shares_weights(chunk)
            for shard in shards_of(chunk)
        }
        whole = replace(places, pieces=tuple(piece for piece in places.pieces if piece.local not in shards))
        items = weight_items(whole, local_parameters(self.chunks)) + shard_items(places, shards)
        return items + list(optimizer_items(self.optimizer, places, names))


@dataclass(frozen=True)
class Saving:
    """A save in progress. `states`: the role's state other than tensors, on rank 0; `wait_for_ranks`: as of `RankStates`."""

    folder: Path
    states: dict[str, Any]
    written: Future[tuple[Contents, FileFacts]]
    wait_for_ranks: Callable[[str], object] | None = None


@dataclass(frozen=True)
class Loaded:
    """How a checkpoint was loaded. `exact`: random numbers go on too; else they were begun anew (another layout or kind of device)."""

    num_steps: int
    exact: bool


def save_states(folder: str | Path, states: RankStates) -> dict[str, FileFacts]:
    """`begin_save` and `finish_save`, without a copy of the states."""
    return finish_save(begin_save(folder, states, background=False))


def begin_save(folder: str | Path, states: RankStates, *, background: bool = True) -> Saving:
    """Begin to save into a folder that has nothing of a role; all ranks of the role call it.

    background: this rank's share is copied to the host's memory, and written by a thread after this returns. Otherwise it is
        written by then, and copied part by part. Errors of writing come out of `finish_save` in either case.
    """
    folder = Path(folder)
    items = list(in_parts(states.items(states.places.saved())))
    mine, about = _plan(items, states)
    # Each in a list of one, as Megatron has them.
    objects: dict[str, Any] = {_random_key(): [random_states()]}
    objects |= {key: [torch.empty(0, dtype=torch.uint8)] for key in states.places.extra_states}
    if torch.distributed.get_rank() == 0:
        common = {"content_metadata": CONTENT, "checkpoint_version": MEGATRON_VERSION}
        objects[COMMON] = [common | {"iteration": about["num_steps"]}]
    chunks = (
        (item.key, item.shape, item.box, item.tensor.detach().to("cpu", copy=True).view(item.box.size))
        for item in mine
    )
    if background:
        chunks = iter(list(chunks))
    written: Future[tuple[Contents, FileFacts]] = Future()
    rank = torch.distributed.get_rank()

    def write() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with naming(folder / file_name(rank)):
                contents = write_file(folder, rank, chunks, objects)
            written.set_result((contents, seal_file(folder / file_name(rank))))
        except Exception as error:  # raised on all ranks, by finish_save
            written.set_exception(error)

    if background:
        # Ends with the process: an unfinished folder is no checkpoint.
        threading.Thread(target=write, name="save", daemon=True).start()
    else:
        write()
    return Saving(folder, about, written, states.wait_for_ranks)


def finish_save(
    saving: Saving, companions: Callable[[], dict[str, FileFacts]] | None = None
) -> dict[str, FileFacts]:
    """Wait until all files are on the disk; all ranks of the role call it.

    Args:
        companions: writes further files, on rank 0, and returns them as this function does.

    Returns: the files that this rank wrote, by name in the folder.

    Raises:
        OSError: a rank could not write; raised on all ranks, and the others name the rank.
        ValueError, RuntimeError: on the others, where a rank raised another exception; they name the rank.
    """
    error = saving.written.exception()
    if saving.wait_for_ranks is not None:
        saving.wait_for_ranks(f"{saving.folder} is written")
    _raise_on_all(error, "save")
    contents, facts = saving.written.result()
    rank = torch.distributed.get_rank()
    files = {file_name(rank): facts}
    everything = _gather(contents)
    if everything is not None:
        try:
            files |= _write_common_files(saving, everything)
            files |= companions() if companions is not None else {}
        except Exception as failure:  # raised on all ranks
            error = failure
    _raise_on_all(error, "save")
    return files


def load_states(folder: str | Path, states: RankStates) -> Loaded:
    """Continue with the states of a checkpoint; all ranks of the role call it.

    Raises:
        ValueError: the checkpoint is of another model, base model, dtype or kind of training, or is incomplete, and no weight has been
            changed; or a file is damaged, and some states have been changed.
        OSError: a file cannot be read.
            Both are raised on all ranks; where one rank alone had an error of reading, the others name the rank.
    """
    folder = Path(folder)
    problems: list[str] = []
    items: list[Item] = []
    reader, about, error = None, {}, None
    try:
        about = _read_about(folder, states)
        reader = DCPReader(folder)
        set_num_steps(states.optimizer, about["num_steps"])
        items = states.items(states.places)
        problems = list(mistakes_of(reader, items, states.places.padded))
    except ValueError as mistake:
        problems.append(str(mistake))
    except Exception as failure:  # raised on all ranks
        error = failure
    _raise_on_all(error, "load")
    stored = reader.tensors.keys() if reader else ()
    _refuse_on_all(folder, problems, {item.key for item in items}, stored)
    assert reader is not None
    loaded = None
    try:
        fill(reader, items)
        loaded = Loaded(about["num_steps"], _set_numbers(reader, about, states))
    except Exception as failure:  # raised on all ranks
        error = failure
    if states.wait_for_ranks is not None:
        states.wait_for_ranks(f"{folder} is read")
    _raise_on_all(error, "load")
    assert loaded is not None
    return loaded


def _set_numbers(reader: DCPReader, about: Mapping[str, Any], states: RankStates) -> bool:
    """Continue with the schedule, the loss scale and the random numbers. Returns: whether the latter go on, and are not begun anew."""
    set_schedule(states.scheduler, about["schedule_steps"])
    if about["loss_scale"] is not None and states.optimizer.config.fp16:
        set_scaler_state(states.optimizer, about["loss_scale"])
    if about["layout"] == json.loads(json.dumps(asdict(states.layout))):  # JSON has lists for tuples
        saved = reader.load_object(_random_key())[0]
        if of_this_device(saved):
            set_random_states(saved)
            return True
    restart_random_states(states.seed, about["num_steps"])
    return False


def share_out(held: Sequence[Sequence[tuple[Any, int]]]) -> list[list[int]]:
    """Assign writers to parts that several ranks may have.

    Args:
        held: by rank, its parts: (part, bytes); equal parts have the same name everywhere.

    Returns: by rank, indices into its list. Each part is written once, by the rank that has least to write; parts that one rank
        alone has are counted first, then large parts.
    """
    holders: dict[tuple[Any, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, parts in enumerate(held):
        for index, part in enumerate(parts):
            holders[part].append((rank, index))
    chosen: list[list[int]] = [[] for _ in held]
    load = [0] * len(held)
    for (_, num_bytes), places in sorted(
        holders.items(), key=lambda entry: (len(entry[1]) > 1, -entry[0][1])
    ):
        rank, index = min(places, key=lambda place: load[place[0]])
        chosen[rank].append(index)
        load[rank] += num_bytes
    return [sorted(indices) for indices in chosen]


def _plan(items: Sequence[Item], states: RankStates) -> tuple[list[Item], dict[str, Any]]:
    """The items that this rank writes, and, on rank 0, `states.json`."""
    own = [((item.key, item.box), item.tensor.nbytes) for item in items]
    shapes = {item.key: item.shape for item in items}
    numbers = (num_steps(states.optimizer), scaler_state(states.optimizer))

    def decide(gathered: list[Any]) -> tuple[list[list[int]], int, Any]:
        held, shapes, numbers = zip(*gathered, strict=True)
        chosen = share_out(held)
        _check_complete(held, shapes)
        scalers = [scaler for _, scaler in numbers if scaler is not None]
        return chosen, max(steps for steps, _ in numbers), scalers[0] if scalers else None

    chosen, steps, scaler = _decided((own, shapes, numbers), decide)
    about = {
        "format": FORMAT,
        "layout": asdict(states.layout),
        "num_steps": steps,
        "schedule_steps": states.scheduler.num_steps,
        "loss_scale": scaler,
        "base": states.base._asdict() if states.base is not None else None,
    }
    return [items[index] for index in chosen[torch.distributed.get_rank()]], about


def _check_complete(
    held: Sequence[Sequence[tuple[Any, int]]], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> None:
    """Assert that all ranks' parts are the global tensors."""
    found: dict[str, int] = defaultdict(int)
    for key, box in {part for parts in held for part, _ in parts}:
        found[key] += box.numel
    for key, shape in {key: shape for own in shapes for key, shape in own.items()}.items():
        assert found[key] == torch.Size(shape).numel(), (
            f"{key}: {found[key]} elements of a tensor of shape {shape}"
        )


def _write_common_files(saving: Saving, everything: Sequence[Contents]) -> dict[str, FileFacts]:
    """Write the files that one rank writes for all."""
    folder = saving.folder
    with naming(folder):
        paths = [write_metadata(folder, merged(everything)), folder / "metadata.json", folder / STATES_FILE]
        paths[1].write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
        paths[2].write_text(json.dumps(saving.states, indent=2) + "\n")
    return {path.name: seal_file(path) for path in paths}


def _read_about(folder: Path, states: RankStates) -> dict[str, Any]:
    """`states.json`; ValueError: it is not there, or of another base model or kind of training."""
    path = folder / STATES_FILE
    try:
        about = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"it has no {STATES_FILE}: it was not saved by megarl, or not to its end") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} has format {about.get('format')}; this version of megarl reads {FORMAT}")
    kinds = [
        "a whole model" if base is None else f"adapters on the model {BaseModel(**base)}"
        for base in (about["base"], states.base._asdict() if states.base else None)
    ]
    same = (about["base"] or {}).get("sha256") == (states.base.sha256 if states.base else None)
    if not same:
        raise ValueError(f"it has {kinds[0]}, this run trains {kinds[1]}")
    return about


def _random_key() -> str:
    return f"rng_state/shard_{torch.distributed.get_rank()}_{torch.distributed.get_world_size()}"


def _gather(value: Any) -> list[Any] | None:
    """Every rank's value, on rank 0."""
    first = torch.distributed.get_rank() == 0
    gathered: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
    torch.distributed.gather_object(value, gathered, dst=0)
    return gathered


def _decided(value: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """The result of `decide` for every rank's value, worked out on rank 0; the same on all ranks."""
    gathered = _gather(value)
    answer = [None if gathered is None else decide(gathered)]
    torch.distributed.broadcast_object_list(answer, src=0)
    return answer[0]


def _raise_on_all(error: BaseException | None, action: str) -> None:
    """Raise on every rank an error that occurred on one. On the others it names the rank and the action, and is an OSError or a ValueError
    where it is one there, else a RuntimeError."""
    own: tuple[int | None, bool, str] | None = None
    if isinstance(error, OSError):
        own = (error.errno if error.errno is not None else errno.EIO, False, str(error))
    elif error is not None:
        own = (None, isinstance(error, ValueError), str(error) or type(error).__name__)
    errors: list[tuple[int | None, bool, str] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, own)
    if error is not None:
        raise error
    for rank, found in enumerate(errors):
        if found is not None:
            number, mistaken, text = found
            message = f"rank {rank} could not {action}: {text}"
            if number is not None:
                raise OSError(number, message)
            raise ValueError(message) if mistaken else RuntimeError(message)


def _refuse_on_all(folder: Path, problems: list[str], wanted: set[str], stored: Iterable[str]) -> None:
    """ValueError, the same on every rank, if there is a problem on any, or anything is stored that no rank wants."""

    def decide(gathered: list[Any]) -> list[str]:
        found = list(dict.fromkeys(problem for problems, _ in gathered for problem in problems))
        left = sorted(set(stored).difference(*(keys for _, keys in gathered)))
        return found or [f"it has {key}, which this run has no use for" for key in left]

    found = _decided((problems, wanted), decide)
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ValueError(f"checkpoint {folder} does not fit: {'; '.join(found[:_SHOWN])}{more}")
