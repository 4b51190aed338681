"""Receives weights inside SGLang: runs in each of its schedulers, one for each TP rank.

SGLang calls `receive_weights` as a custom weight loader (`custom_weight_loader`, `load_format`) between
its `begin_weight_update` and `end_weight_update`. The tensor it passes is a small JSON, as bytes, that names
one manifest file for each TP rank:

    {"version": int, "bucket": int, "last": bool, "payload": path of a shared-memory file,
     "entries": [{"tensor": Hugging Face name, "local": SGLang's parameter, "start": [..], "size": [..],
                  "dtype": "float32", "offset": int, "nbytes": int, "crc32": int}, ..],
     "padding": {local: elements that no entry fills}}

Guarantees, each asserted by a test:

- what counts is what lies in the parameter: each slice is read back from it and its checksum compared;
- nothing is skipped: an unknown name, type or place is an error (SGLang's own loaders ignore such names);
- a version is complete: over its buckets every element of every parameter is written exactly once, but for
  the padding that the manifest of the last bucket declares;
- an error names the tensor and the rank, and reaches the engine's process through a file beside the
  manifest (`result_path`): an exception would end the scheduler (sglang 0.5.21).

The file is gone from memory when the answer is there, so the sender may reuse it.
"""

import json
import math
import mmap
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import torch

from megarl.layout.boxes import Box

LOADER = "megarl.rollout.receiver.receive_weights"
RECEIPT = "_megarl_receipt"  # attribute of the model; SGLang gives a loader no other place to remember


class RefusedError(ValueError):
    """A manifest or a slice that must not be served."""


@dataclass
class Receipt:
    """What has arrived of a version: the next bucket, and by parameter the boxes that were written."""

    version: int
    next_bucket: int = 0
    written: dict[str, list[Box]] = field(default_factory=dict)


def request_tensor(manifests: Sequence[Path]) -> torch.Tensor:
    """The uint8 tensor that carries the manifests' paths, by TP rank, through SGLang."""
    return torch.tensor(list(json.dumps([str(path) for path in manifests]).encode()), dtype=torch.uint8)


def result_path(manifest: Path) -> Path:
    """Where the receiver puts its answer: {"ok", "error", "version", "rank", "bytes_written", "seconds"}."""
    return manifest.with_name(manifest.name + ".result")


def receive_weights(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point: take the bucket that this rank's manifest describes."""
    from sglang.srt.runtime_context import get_parallel

    ((_, request),) = named_tensors
    rank = get_parallel().tp_rank
    manifest = Path(json.loads(bytes(request.cpu().numpy()))[rank])
    begun = time.perf_counter()
    result = {"ok": True, "error": "", "rank": rank, "version": None, "bytes_written": 0}
    # Any exception that left this function would end SGLang's scheduler, and with it the whole engine.
    try:
        content = json.loads(manifest.read_text())
        result["version"] = content["version"]
        result["bytes_written"] = apply_bucket(model, content)
    except Exception as error:
        setattr(model, RECEIPT, None)
        kind = "" if isinstance(error, RefusedError) else f"{type(error).__name__}: "
        result |= {"ok": False, "error": f"{kind}{error} (TP rank {rank})"}
    result["seconds"] = time.perf_counter() - begun
    building = result_path(manifest).with_suffix(".building")
    building.write_text(json.dumps(result))
    os.replace(building, result_path(manifest))


@torch.no_grad()
def apply_bucket(model: torch.nn.Module, manifest: Mapping) -> int:
    """Write a bucket into the model's parameters and verify it there.

    Returns:
        the number of bytes written.

    Raises:
        RefusedError: names the tensor that is wrong, or the parameter that is incomplete.
    """
    receipt = _receipt(model, manifest)
    targets = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    payload = _Payload(Path(manifest["payload"])) if manifest["entries"] else None
    num_bytes = 0
    for entry in manifest["entries"]:
        box = Box(tuple(entry["start"]), tuple(entry["size"]))
        _write(_target(entry, box, targets), payload, entry)
        receipt.written.setdefault(entry["local"], []).append(box)
        num_bytes += entry["nbytes"]
    receipt.next_bucket += 1
    if manifest["last"]:
        setattr(model, RECEIPT, None)
        check_complete(dict(model.named_parameters()), receipt.written, manifest.get("padding", {}))
    return num_bytes


def check_complete(
    parameters: Mapping[str, torch.Tensor], written: Mapping[str, Sequence[Box]], padding: Mapping[str, int]
) -> None:
    """Check that `written` covers every element once, but for `padding` elements of each parameter.

    Raises:
        RefusedError: names each parameter where it does not.
    """
    wrong = []
    for name, parameter in parameters.items():
        boxes = written.get(name, [])
        if any(one.intersect(other) for one, other in combinations(boxes, 2)):
            wrong.append(f"{name}: slices overlap")
        missing = parameter.numel() - sum(box.numel for box in boxes)
        if missing != padding.get(name, 0):
            wrong.append(
                f"{name}: {missing} of {parameter.numel()} elements missing, padding is {padding.get(name, 0)}"
            )
    wrong += [f"{name}: padding of no parameter" for name in padding if name not in parameters]
    if wrong:
        raise RefusedError("the version is incomplete: " + "; ".join(wrong))


def _receipt(model: torch.nn.Module, manifest: Mapping) -> Receipt:
    version, bucket = manifest["version"], manifest["bucket"]
    if bucket == 0:
        setattr(model, RECEIPT, Receipt(version))
    receipt = getattr(model, RECEIPT, None)
    if receipt is None or (receipt.version, receipt.next_bucket) != (version, bucket):
        held = "nothing" if receipt is None else f"version {receipt.version}, bucket {receipt.next_bucket}"
        raise RefusedError(f"bucket {bucket} of version {version} came where {held} was due")
    return receipt


def _target(entry: Mapping, box: Box, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The slice of the model that an entry fills: a view.

    Raises:
        RefusedError: there is no such parameter or place, or it has another type or size.
    """
    name, local = entry["tensor"], entry["local"]
    if local not in targets:
        raise RefusedError(f"{name}: the engine has no parameter {local!r}")
    target = targets[local]
    dtype = getattr(torch, entry["dtype"])
    if target.dtype != dtype:
        raise RefusedError(f"{name}: {local} holds {target.dtype}, not {dtype}")
    fits = len(box.start) == len(box.size) == target.dim() and all(
        start >= 0 and size > 0 and start + size <= extent
        for start, size, extent in zip(box.start, box.size, target.shape, strict=True)
    )
    if not fits:
        raise RefusedError(
            f"{name}: {local} has shape {tuple(target.shape)}: no place for start {box.start}, size {box.size}"
        )
    if box.numel * dtype.itemsize != entry["nbytes"]:
        raise RefusedError(f"{name}: {entry['nbytes']} bytes for {box.numel} elements of {dtype}")
    return target.data[box.slices]


class _Payload:
    """The bucket's bytes, mapped; private, since torch wants a writable buffer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read(self, entry: Mapping) -> torch.Tensor:
        """The entry's elements [numel], a view of the mapping."""
        if entry["offset"] + entry["nbytes"] > len(self._map):
            raise RefusedError(
                f"{entry['tensor']}: {self.path} ends at {len(self._map)}, "
                f"needed are {entry['nbytes']} bytes at {entry['offset']}"
            )
        return torch.frombuffer(
            self._map,
            dtype=getattr(torch, entry["dtype"]),
            count=math.prod(entry["size"]),
            offset=entry["offset"],
        )


def _write(target: torch.Tensor, payload: _Payload, entry: Mapping) -> None:
    target.copy_(payload.read(entry).view(target.shape))
    arrived = target.contiguous().cpu().view(torch.uint8).flatten().numpy()
    crc32 = zlib.crc32(arrived)
    if crc32 != entry["crc32"]:
        raise RefusedError(
            f"{entry['tensor']}: checksum {crc32:#010x} in {entry['local']}, sent was {entry['crc32']:#010x}"
        )
