"""Triton kernels that pack and unpack buckets of a weight sync, interpreted on a CPU: `python -m tests.weight_sync.interpreted_buckets`
(with TRITON_INTERPRET=1) prints {case: result} as JSON. It has a process of its own, like interpreted_slices.py.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.layout import Box, RankPlace
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, logical_tensors
from megarl.models.float8 import FP8, block_scales
from megarl.weight_sync import gpu_buckets, packets, receiver, sender, slice_kernels
from megarl.weight_sync.gpu_buckets import PackedBucket, TakenBucket
from megarl.weight_sync.layouts import EngineLayout, megatron_layout, sglang_layout
from megarl.weight_sync.packets import CONVERT, QUANTISE, SCALE, PacketSpec, Slice, header_bytes
from megarl.weight_sync.quantize import with_scales
from megarl.weight_sync.served_model import RefusedError
from megarl.weight_sync.sync_plan import APART, COLOCATED, MAPPED, P2P, SHARED_MEMORY, SyncPlan
from tests.kernel_cases import print_cases
from tests.weight_sync.shards import empty_shards
from tests.weight_sync.transfer import Transfer

BLOCK = (8, 16)
TOKEN = (7, 3)


def bucket(layers: int) -> tuple[list[PacketSpec], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Two packets: one of weights converted to bfloat16, some of them parts of fused ones, and one of weights in float8 with their scales;
    the trainer's parameters; and views of an engine's parameters for all slices, filled with other numbers."""
    generator = torch.Generator().manual_seed(layers)
    parameters, first, second, views = {}, [], [], []
    for layer in range(layers):
        weight = parameters[f"w{layer}"] = torch.randn(24, 32, generator=generator)
        engine = torch.full((40, 48), 3.0, dtype=torch.bfloat16)
        first.append(Slice(f"w{layer}", f"w{layer}", Box((4, 8), (12, 20)), "bfloat16", CONVERT))
        views.append(engine[8:20, 5:25])
        first.append(Slice(f"b{layer}", f"w{layer}", Box((0, 0), (1, 32)), "float32", CONVERT))
        views.append(torch.full((1, 32), 3.0))
        assert weight.is_contiguous()
    for layer in range(layers):
        second.append(Slice(f"w{layer}", f"w{layer}", Box((8, 0), (16, 32)), "float8_e4m3fn", QUANTISE))
        views.append(torch.zeros(16, 40, dtype=FP8)[:, 4:36])
    for layer in range(layers):
        second.append(Slice(f"s{layer}", f"w{layer}", Box((1, 0), (2, 2)), "float32", SCALE))
        views.append(torch.zeros(2, 2))
    one = PacketSpec(0, (0, 1), None, 0, tuple(first))
    return [one, PacketSpec(0, (1,), None, one.nbytes, tuple(second))], parameters, views


def slot_of(specs: list[PacketSpec]) -> torch.Tensor:
    return torch.zeros(specs[-1].start + specs[-1].nbytes, dtype=torch.uint8)


def by_torch(
    specs: list[PacketSpec], parameters: dict[str, torch.Tensor], known: list[torch.Tensor | None]
) -> torch.Tensor:
    """The slot when torch packs it slice by slice, with a GPU's checksums."""
    slot = slot_of(specs)
    with mock.patch.object(sender, "checksum", packets.multilinear):
        sender._pack_one_by_one(TOKEN, specs, parameters, slot, known, BLOCK)
    return slot


def packing() -> list[str]:
    """Differences when kernels pack a bucket at once: complete, twice with the same tables, and without unchanged slices."""
    wrong = []
    specs, parameters, _ = bucket(3)
    packed = PackedBucket(specs, BLOCK, torch.device("cpu"))
    for version in range(2):
        for name in parameters:
            parameters[name] += version
        slot = slot_of(specs)
        packed.pack(TOKEN, parameters, slot)
        if not torch.equal(slot, by_torch(specs, parameters, [None, None])):
            wrong.append(f"version {version}")
    known = [packed.checksums[: len(specs[0].slices)].clone(), None]
    parameters["w1"] += 1
    slot = slot_of(specs)
    follows = packed.pack(TOKEN, parameters, slot, known)
    if not torch.equal(slot, by_torch(specs, parameters, known)) or follows.tolist()[:6].count(True) != 2:
        wrong.append("unchanged")
    return wrong


def taking() -> list[str]:
    """Wrong values in the views that a bucket was written into, and faults that were not found."""
    wrong = []
    specs, parameters, views = bucket(3)
    slot = slot_of(specs)
    PackedBucket(specs, BLOCK, torch.device("cpu")).pack(TOKEN, parameters, slot)
    taken = TakenBucket(specs, views)
    found = taken.take(TOKEN, slot, skip_unchanged=False)
    if found.different.any() or not all(found.came):
        wrong.append("differs")
    for layer in range(3):
        weight = parameters[f"w{layer}"]
        scales = block_scales(weight, BLOCK)
        spread = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        expected = [weight[4:16, 8:28].bfloat16(), weight[:1], (weight / spread).to(FP8)[8:], scales[1:]]
        places = [views[2 * layer], views[2 * layer + 1], views[6 + layer], views[9 + layer]]
        wrong += [
            f"{layer} {at}"
            for at, (found, value) in enumerate(zip(places, expected, strict=True))
            if not torch.equal(found.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
        ]
    for name, token, place in (("token", (7, 4), None), ("header", TOKEN, 16), ("body", TOKEN, -3)):
        damaged = slot.clone()
        if place is not None:
            damaged[place] ^= 0x10
        if not taken.take(token, damaged, skip_unchanged=False).different.any():
            wrong.append(f"{name} not found")
    # A slice that the packet leaves out is not written, but is read back and verified.
    views[0].zero_()
    without = slot.clone()
    count = len(specs[0].slices)
    without[16 + 8 * count] = 0
    found = taken.take(TOKEN, without, skip_unchanged=True)
    if found.came.count(False) != 1 or views[0].any() or not found.different.any():
        wrong.append("left out")
    return wrong


PLACES = tuple(RankPlace("node", str(rank)) for rank in range(2))
SYNCS: dict[str, dict[str, Any]] = {
    MAPPED: {"transport": SHARED_MEMORY},
    COLOCATED: {"transport": P2P, "source_places": PLACES, "target_places": PLACES},
    APART: {"transport": P2P},
}


def syncs() -> list[str]:
    """Faults of complete syncs of a small model in float8, by each way, with kernels at both ends; and damage that was not found."""
    wrong = []
    sizes = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "head_dim": 8,
    }
    sizes |= {"ffn_hidden_size": 16, "vocab_size": 16, "max_position_embeddings": 64}
    config = ModelConfig(
        **sizes, family="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, norm_epsilon=1e-6,
        rope_theta=1e6, rope_scaling=None, tie_word_embeddings=False, dtype="float32", hf={},
    )  # fmt: skip
    engines, generator = EngineLayout(1, num_engines=2), torch.Generator()
    for way, more in SYNCS.items():
        parallel = ParallelLayout(1) if way == MAPPED else ParallelLayout(2, tp=2)
        for skip in (False, True) if way == APART else (False,):
            sync = SyncPlan(
                config, parallel, engines, torch.bfloat16, 1200, fp8_block=(8, 8), skip_unchanged=skip, **more
            )
            assert sync.way == way and len(sync.buckets) > 1
            trainer = empty_shards(megatron_layout(config, parallel))
            for tensor in (tensor for tensors in trainer for tensor in tensors.values()):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            found = []
            for at_once in (False, True):
                layout = with_scales(sglang_layout(config, engines), logical_tensors(config), (8, 8))
                served = empty_shards(layout)
                types = {item.local: item.dtype for share in sync.shares()[1] for specs in share.buckets
                         for spec in specs for item in spec.slices}  # fmt: skip
                served = [{n: t.to(getattr(torch, types[n])) for n, t in of.items()} for of in served]
                with TemporaryDirectory() as folder, checksums(at_once), one_launch_at_a_time():
                    transfer = Transfer(sync, trainer, served, Path(folder), at_once)
                    held = dict.fromkeys(range(2)) if skip else None
                    transfer.run(1, held)
                    if skip:
                        transfer.run(2, dict.fromkeys(range(2), 1))
                    found.append([{name: tensor.clone() for name, tensor in of.items()} for of in served])
                    if at_once and not refuses(transfer):
                        wrong.append(f"{way}: damage was not found")
                    transfer.close()
            for before, after in zip(*found, strict=True):
                wrong += [
                    f"{way}: {n}" for n in before if not same(before[n], after[n]) or not before[n].any()
                ]
    return wrong


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@contextmanager
def one_launch_at_a_time() -> Iterator[None]:
    """Triton's interpreter is not thread-safe, and ranks run as threads here."""
    lock = threading.Lock()

    def locked(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with lock:
                return work(*arguments)

        return call

    with ExitStack() as stack:
        for name in ("read_slices", "write_slices", "checksums_of"):
            stack.enter_context(mock.patch.object(gpu_buckets, name, locked(getattr(gpu_buckets, name))))
        yield


def checksums(at_once: bool) -> Any:
    """Have the receiver use a GPU's checksums also where it reads slices one by one."""
    return mock.patch.object(receiver, "checksum", packets.multilinear if at_once else packets.crc32)


def refuses(transfer: Transfer) -> bool:
    """Whether a version is refused, with the sender's name, if one byte was changed after packing."""
    outbox = transfer.outboxes[-1]
    pack = outbox._pack

    def damage(token: Any, *more: Any) -> None:
        pack(token, *more)
        if token[1] == 1:
            spec = transfer.sources[-1].buckets[1][0]
            outbox._slots[1 % len(outbox._slots)][spec.start + header_bytes(len(spec.slices))] ^= 1

    outbox._pack = damage
    try:
        transfer.run(3)
    except RefusedError as error:
        return f"trainer rank {len(transfer.sources) - 1}, which sent it" in str(error)
    return False


class Operations(TorchDispatchMode):
    """Counts operations that are not views, and reads of values, for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        looks = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero)
        self.waits += func.overloadpacket in looks
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], object]) -> list[int]:
    """Operations of `work`, including launches of Triton's kernels, which are disabled; and waits of the host."""
    kernels, nothing = slice_kernels.kernels(), mock.MagicMock()
    with (
        mock.patch.object(kernels, "copy_slices", nothing),
        mock.patch.object(kernels, "read_blocks", nothing),
        Operations() as operations,
    ):
        work()
    return [operations.count + nothing.__getitem__.call_count, operations.waits]


def launches() -> list[list[list[int]]]:
    """Operations for packing and for unpacking a bucket of 2 and of 6 layers, after the first version; a kernel counts as one."""
    found = []
    for layers in (2, 6):
        specs, parameters, views = bucket(layers)
        packed, taken, slot = (
            PackedBucket(specs, BLOCK, torch.device("cpu")),
            TakenBucket(specs, views),
            slot_of(specs),
        )
        packed.pack(TOKEN, parameters, slot)
        counts = [
            counted(partial(packed.pack, TOKEN, parameters, slot)),
            counted(partial(taken.take, TOKEN, slot, skip_unchanged=False)),
        ]
        found.append(counts)
    return found


def main() -> None:
    print_cases((packing, taking, syncs, launches))


if __name__ == "__main__":
    main()
