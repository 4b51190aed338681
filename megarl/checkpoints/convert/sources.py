"""Sources of a conversion: a Hugging Face folder, or a Megatron distributed checkpoint saved from any layout.

`MegatronCheckpoint` describes the global tensors of Megatron's distributed checkpoint, and where each weight lies in them. It follows
megatron-core 0.19.2's `sharded_state_dict` of a GPTModel, with which tests compare it. A parameter's global tensor is the
parameter of the model on one rank (tp = pp = ep = 1), since shards lie in it end to end; gate and up projection of `linear_fc1` are
sharded separately, so all of the gate comes first there too. Beyond that:

- layers are stacked (`decoder.layers.mlp.linear_fc2.weight` with a leading axis of layers), unless the layers differ
  or the caller that saves asks for numbered names (`non_homogeneous_layers`);
- experts are stacked in an axis after that of layers, under `mlp.experts.experts.`;
- of a gated delta net the parts of `in_proj` and of `conv1d` (`.query`, `.key`, `.value` and so on) are tensors of their own;
- a layer's position among MTP layers stays in the name, with `transformer_layer` in place of `mtp_model_layer`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from megarl.checkpoints.dcp import Chunk, DCPReader
from megarl.checkpoints.hf.load import HFReader
from megarl.checkpoints.hf.peft import is_adapter
from megarl.layout import Box, Copy, Layout, Piece
from megarl.models import (
    COMPANIONS,
    MegatronPlace,
    ModelConfig,
    megatron_pieces,
    padded_vocab_size,
    read_model_config,
)
from megarl.models.fields import short
from megarl.models.lora import IN_CHECKPOINTS
from megarl.models.weight_files import some
from megarl.util.files import read_json_object
from megarl.weight_sync.layouts import hf_layout

VOCAB_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight")
_DECODER_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
# Modules whose parameters are no Transformer Engine module's: they have no extra state in a checkpoint.
_WITHOUT_EXTRA_STATE = re.compile(
    r"embedding\.word_embeddings|output_layer|value_head|.*\.mlp\.router|.*\.mlp\.shared_experts|.*\.self_attention(\.conv1d|\.indexer\..*)?"
)


class GlobalTensor(NamedTuple):
    """A tensor of a distributed checkpoint; its first `num_leading` axes number layers and experts."""

    shape: tuple[int, ...]
    num_leading: int


@dataclass(frozen=True)
class MegatronCheckpoint:
    """The contents of a model's distributed checkpoint.

    Attributes:
        layout: one holder of all weights; local names are the keys of global tensors.
        tensors: key -> global tensor; the vocabulary is padded as for tp = 1.
        extra_states: keys of the objects that Transformer Engine's modules save in addition to their parameters.
    """

    layout: Layout
    tensors: dict[str, GlobalTensor]
    extra_states: tuple[str, ...]


def stacks_layers(config: ModelConfig) -> bool:
    """Whether Megatron's own `sharded_state_dict` stacks the model's layers by default: where they are all alike."""
    return config.moe is None and config.delta_net is None


def megatron_checkpoint(
    config: ModelConfig, *, stacked: bool, head: str = "lm", mtp: bool = False
) -> MegatronCheckpoint:
    """The distributed checkpoint of a model.

    Args:
        stacked: whether decoder layers are stacked, or have numbers in their names.
        mtp: whether the model's multi-token prediction layers are in it.
    """
    pieces, ends, places = [], {}, {}
    everything = megatron_pieces(
        config,
        MegatronPlace(),
        layers=[list(range(config.num_layers))],
        first_stage=True,
        last_stage=True,
        head=head,
        mtp=mtp,
    )
    for piece in everything:
        local, local_box = _in_section(piece.local.removeprefix("0:"), piece.local_box, config)
        key, at, extent = _global_place(local, config, stacked)
        box = Box(at + local_box.start, (1,) * len(at) + local_box.size)
        pieces.append(Piece(piece.tensor, piece.box, key, box))
        end = [a + n for a, n in zip(local_box.start, local_box.size, strict=True)]
        ends[key] = [max(pair) for pair in zip(ends.get(key, end), end, strict=True)]
        places.setdefault(key, (extent, set()))[1].add(at)
    tensors = {
        key: GlobalTensor(places[key][0] + tuple(end), len(places[key][0])) for key, end in ends.items()
    }
    for key in VOCAB_TENSORS:
        if key in tensors:
            padded = (padded_vocab_size(config, 1), *tensors[key].shape[1:])
            tensors[key] = tensors[key]._replace(shape=padded)
    layout = Layout.by_rank("Megatron checkpoint", 1, lambda rank: pieces)
    return MegatronCheckpoint(layout, tensors, tuple(_extra_states(places, config)))


def _in_section(local: str, box: Box, config: ModelConfig) -> tuple[str, Box]:
    """The name and box of a part of a parameter: within its section in a gated delta net's `in_proj` and `conv1d`, whose
    sections are sharded one by one; else unchanged."""
    net = config.delta_net
    module = local.rpartition("self_attention.")[2]
    if net is None or module not in ("in_proj.weight", "conv1d.weight"):
        return local, box
    sections = {"query": net.keys, "key": net.keys, "value": net.values}
    if module == "in_proj.weight":
        sections |= {"z": net.values, "beta": net.value_heads, "alpha": net.value_heads}
    first = box.start[0]
    for name, rows in sections.items():
        if first < rows:
            assert first + box.size[0] <= rows, (local, box)
            return f"{local}.{name}", Box((first, *box.start[1:]), box.size)
        first -= rows
    raise AssertionError((local, box))


def _global_place(
    local: str, config: ModelConfig, stacked: bool
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """A parameter's key, its index in the key's leading axes, and the lengths of these axes."""
    at: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()
    layer = _DECODER_LAYER.fullmatch(local)
    if layer and stacked:
        local = f"decoder.layers.{layer[2]}"
        at, extent = (int(layer[1]),), (config.num_layers,)
    local = local.replace(".mtp_model_layer.", ".transformer_layer.")
    expert = _EXPERT.fullmatch(local)
    if expert:
        assert config.moe is not None, local
        local = f"{expert[1]}.experts.{expert[2]}.{expert[3]}"
        at, extent = (*at, int(expert[4])), (*extent, config.moe.num_experts)
    return local, at, extent


def _extra_states(
    places: dict[str, tuple[tuple[int, ...], set[tuple[int, ...]]]], config: ModelConfig
) -> list[str]:
    """The keys of extra states, as `ShardedObject.unique_key` writes them: key, index and extent of the leading axes."""
    own = (".q_layernorm", ".k_layernorm") if config.qk_norm_all_heads else ()  # megarl's modules
    names: dict[str, None] = {}
    for key, (extent, indices) in places.items():
        module = key.partition(".weight.")[0] if ".weight." in key else key.rpartition(".")[0]
        if not _WITHOUT_EXTRA_STATE.fullmatch(module) and not module.endswith(own):
            for at in sorted(indices):
                shard, total = (
                    ".".join(map(str, axes or default)) for axes, default in ((at, (0,)), (extent, (1,)))
                )
                names[f"{module}._extra_state/shard_{shard}_{total}"] = None
    return list(names)


_WITHOUT_MTP = " (--mtp drop converts a checkpoint without its MTP layers)"
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


class Part(NamedTuple):
    """Values for a part of a copy: `box` of the copy's target tensor."""

    copy: Copy
    box: Box
    values: torch.Tensor


class Source(Protocol):
    """A checkpoint that is read.

    Attributes:
        path: as the user wrote it.
        kind: "hf" or "megatron".
        companions: the Hugging Face folder with its config, tokenizer and generation config.
        head: "lm" or "value".
        mtp: whether its multi-token prediction layers are read.
        layout: where the weights lie in its tensors.
        ignored: contents other than weights, in words; "" for nothing.
    """

    path: str
    kind: str
    companions: Path
    config: ModelConfig
    head: str
    mtp: bool
    layout: Layout
    ignored: str

    def check(self) -> None:
        """Refuse a checkpoint with anything missing, left over or of another shape than its config makes it."""
        ...

    def dtype(self, local: str) -> torch.dtype:
        """The type of the values that `read` gives for the local tensor."""
        ...

    def read(self, copies: Sequence[Copy]) -> Iterator[Part]:
        """The values that the copies move, in parts and in any order; every part is released before the next is read."""
        ...


def open_source(path: str, companions: str | None = None, mtp: bool = True) -> Source:
    """The checkpoint at `path`; its files tell its kind.

    Args:
        companions: the Hugging Face folder to take config and tokenizer from, for a Megatron checkpoint that has
            none of its own.
        mtp: whether to read multi-token prediction layers, where the model has them.

    Raises:
        ValueError: no checkpoint there, or a Megatron checkpoint whose config is not known.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"{path!r} is not a folder; a Hugging Face folder or a Megatron checkpoint is needed"
        )
    if is_adapter(folder):
        raise ValueError(
            f"{path!r} is a folder of adapters; to merge it into its base model: megarl convert BASE NEW --merge {path}"
        )
    checkpoint = _megatron_folder(folder)
    if checkpoint is not None:
        return MegatronSource(path, checkpoint, companions, mtp)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{path!r} is neither a Hugging Face folder (it has no config.json) nor a Megatron distributed "
            f"checkpoint (it has no metadata.json and no latest_checkpointed_iteration.txt){_within(folder)}"
        )
    return HFSource(path, mtp)


def _within(folder: Path) -> str:
    """The end of an error about a folder that is no checkpoint: checkpoints within it. A run's are in `step-<n>/<role>`."""
    for pattern in ("*", "step-*/*"):
        found = sorted(file.parent for file in folder.glob(f"{pattern}/metadata.json"))
        if found:
            return f"; it holds checkpoints: {some([str(place) for place in found])}"
    return ""


def _megatron_folder(folder: Path) -> Path | None:
    """`folder` if it is a distributed checkpoint, or the latest one that Megatron-LM saved to it."""
    if not (folder / "metadata.json").is_file():
        tracker = folder / "latest_checkpointed_iteration.txt"
        if not tracker.is_file():
            return None
        latest = tracker.read_bytes().decode(errors="replace").strip()
        if not re.fullmatch(r"[\w.-]*\w", latest):
            raise ValueError(f"{tracker} should name an iteration or release, found {short(latest)}")
        folder = folder / (f"iter_{int(latest):07d}" if latest.isdecimal() else latest)
        if not (folder / "metadata.json").is_file():
            raise ValueError(f"{tracker} names {latest!r}, but {folder} is no distributed checkpoint")
    backend = read_json_object(folder / "metadata.json").get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{folder}/metadata.json: checkpoint format {backend!r}; supported: 'torch_dist'")
    return folder


class HFSource:
    """A Hugging Face folder. Its files are mapped into memory only while `read` runs."""

    kind = "hf"
    ignored = ""

    def __init__(self, path: str, mtp: bool) -> None:
        self.path, self.companions = path, Path(path).expanduser()
        self.config = read_model_config(path)
        self.mtp = mtp and self.config.num_mtp_layers > 0
        with HFReader(path) as reader:
            self.head = "value" if "score.weight" in reader.tensors else "lm"
            whole = hf_layout(self.config, self.head, self.mtp).pieces(0)
            # the model's tensors that MTP layers repeat are not read
            pieces = [piece for piece in whole if piece.local == piece.tensor]
            names = {piece.local for piece in whole}
            self._dtypes = {name: reader.dtype(name) for name in reader.tensors if name in names}
        self.layout = Layout.by_rank("Hugging Face checkpoint", 1, lambda rank: pieces)

    def check(self) -> None:
        with HFReader(self.path) as reader:
            if {"score.weight", "lm_head.weight"} <= reader.tensors.keys():
                raise ValueError(
                    f"checkpoint {self.path} has both lm_head.weight and score.weight; one is left over"
                )
            try:
                reader.check(self.config, self.head, self.mtp)
            except ValueError as error:
                raise ValueError(f"{error}{self.mtp * _WITHOUT_MTP}") from None
            if self.mtp:
                reader.check_mtp_copies(self.config)

    def dtype(self, local: str) -> torch.dtype:
        return self._dtypes[local]

    def read(self, copies: Sequence[Copy]) -> Iterator[Part]:
        with HFReader(self.path) as reader:
            for copy in copies:
                yield Part(copy, copy.target_box, reader.read(copy.source_local, copy.source_box))


def _attention_parts(keys: Collection[str]) -> dict[str, bool]:
    """Which parts of attention a checkpoint has weights of; the config of a `model_type` without a family does not say."""
    ends = {"qkv_bias": ".self_attention.linear_qkv.bias", "qk_norm": ".self_attention.q_layernorm.weight"}
    return {part: any(key.endswith(end) for key in keys) for part, end in ends.items()}


class MegatronSource:
    """A distributed checkpoint, whatever the layout and the form (layers stacked or numbered) it was saved in.

    `weights` and `adapters`: its tensors by key.
    """

    kind = "megatron"

    def __init__(self, path: str, folder: Path, companions: str | None, mtp: bool) -> None:
        self.path, self.folder = path, folder
        self.companions = Path(companions).expanduser() if companions else folder / COMPANIONS
        if not (self.companions / "config.json").is_file():
            raise ValueError(
                f"{self.companions} has no config.json: checkpoint {path!r} does not name its model; "
                "name its Hugging Face folder with --hf"
            )
        self.reader = DCPReader(folder)
        self.config = read_model_config(str(self.companions), _attention_parts(self.reader.tensors))
        self.mtp = mtp and self.config.num_mtp_layers > 0
        tensors = {key: t for key, t in self.reader.tensors.items() if not _OPTIMIZER.match(key)}
        self.adapters = {key: t for key, t in tensors.items() if key.startswith(IN_CHECKPOINTS)}
        self.weights = {key: t for key, t in tensors.items() if key not in self.adapters}
        left = ["optimizer states"] * (len(tensors) < len(self.reader.tensors))
        left += ["adapters (--to peft writes them)"] if self.adapters else []
        self.ignored = ", ".join(left)
        self.head = "value" if "value_head.weight" in self.weights else "lm"
        stacked = not any(re.match(r"decoder\.layers\.\d", key) for key in self.weights)
        self.definition = megatron_checkpoint(self.config, stacked=stacked, head=self.head, mtp=self.mtp)
        self.layout = self.definition.layout

    def check(self) -> None:
        """As `Source`; a vocabulary may be padded to any size."""
        if self.adapters and self.weights.keys() <= {"value_head.weight"}:
            raise ValueError(
                f"checkpoint {self.path} has adapters and no weights; --to peft writes them, and --merge puts them into "
                "their base model"
            )
        wrong, expected = [], self.definition.tensors
        for key, tensor in expected.items():
            found = self.weights.get(key)
            if found is None:
                wrong.append(f"{key} is missing")
                continue
            if not found.dtype.is_floating_point:
                wrong.append(f"{key} is of type {found.dtype}, which no weight has")
            shape = tensor.shape
            if key in VOCAB_TENSORS and found.shape[0] >= self.config.vocab_size:
                shape = (found.shape[0], *shape[1:])
            if found.shape != shape:
                wrong.append(f"{key} has shape {found.shape}, config.json makes it {shape}")
            elif sum(chunk.box.numel for chunk in found.chunks) != Box.whole(found.shape).numel:
                wrong.append(f"{key} is incomplete: its chunks do not add up to {found.shape}")
        dropped = "" if self.mtp else "mtp."
        for key in self.weights:
            if key not in expected and not (dropped and key.startswith(dropped)):
                wrong.append(f"{key} is not a tensor of this model")
        if wrong:
            hint = self.mtp * _WITHOUT_MTP
            raise ValueError(f"checkpoint {self.path} does not fit its config: {'; '.join(wrong)}{hint}")

    def dtype(self, local: str) -> torch.dtype:
        return self.weights[local].dtype

    def read(self, copies: Sequence[Copy]) -> Iterator[Part]:
        wanted: dict[Chunk, list[tuple[Copy, Box]]] = defaultdict(list)
        for copy in copies:
            found = 0
            for chunk in self._chunks_at[
                copy.source_local, self._leading(copy.source_local, copy.source_box)
            ]:
                common = copy.source_box.intersect(chunk.box)
                if common is not None:
                    wanted[chunk].append((copy, common))
                    found += common.numel
            if found != copy.source_box.numel:
                raise ValueError(
                    f"checkpoint {self.path}: {copy.source_local} is incomplete at {copy.source_box}"
                )
        for chunk in sorted(wanted, key=lambda chunk: (chunk.file, chunk.offset)):
            yield from self._parts_of(chunk, wanted[chunk])

    def _parts_of(self, chunk: Chunk, wanted: list[tuple[Copy, Box]]) -> Iterator[Part]:
        values = self.reader.load(chunk)
        for copy, common in wanted:
            part = common.inside(chunk.box, Box.whole(chunk.box.size))
            leading = self.definition.tensors[copy.source_local].num_leading
            taken, source = (Box(b.start[leading:], b.size[leading:]) for b in (common, copy.source_box))
            yield Part(copy, taken.inside(source, copy.target_box), values[part.slices])

    @cached_property
    def _chunks_at(self) -> dict[tuple[str, tuple[int, ...]], list[Chunk]]:
        """Chunks by key and index in its leading axes: a key may have thousands, one for each layer and expert."""
        chunks = defaultdict(list)
        for key in self.definition.tensors:
            for chunk in self.weights[key].chunks:
                chunks[key, self._leading(key, chunk.box)].append(chunk)
        return chunks

    def _leading(self, key: str, box: Box) -> tuple[int, ...]:
        count = self.definition.tensors[key].num_leading
        if any(extent != 1 for extent in box.size[:count]):
            raise ValueError(
                f"checkpoint {self.path}: a chunk of {key} spans several layers or experts: {box}"
            )
        return box.start[:count]
