"""The memory that a trainer rank packs weights into: one piece for each bucket that is on its way at a time.

On a GPU it is there while weights travel, and what trains or generates next has the room; on a CPU it stays.

It belongs to the process, not to a connection. What an engine opens of it by CUDA IPC is counted by torch, and counted down by
the engine alone: one that was killed never does, and torch would keep the memory for good though nobody uses it
(CudaIPCSentDataLimbo in torch/csrc/CudaIPCTypes.cpp). So the next connection gets the memory of one that broke.
"""

import mmap
import os

import torch


class Slots:
    """`take` gives the slots; `files` are those of them that other processes may map (CPU).

    Attributes:
        lasting: whether they stay between two syncs.
    """

    def __init__(self, device: str, lasting: bool | None = None) -> None:
        """`lasting`: None: on a CPU."""
        self._device = device
        self.lasting = device == "cpu" if lasting is None else lasting
        self._slots: list[torch.Tensor] = []
        self.files: list[int] = []

    def take(self, number: int, size: int) -> list[torch.Tensor]:
        """`number` slots of `size` bytes: those of the last time, if they are so; who had them must not use them any more."""
        if [len(slot) for slot in self._slots] != [size] * number:
            self.close()
            self._slots = [self._make(size) for _ in range(number)]
        return list(self._slots)

    def close(self) -> None:
        """Give the memory up: it is gone when nobody maps it any more."""
        files, self.files = self.files, []  # taken at once: a thread that sends may be closing, too
        for file in files:
            os.close(file)
        made, self._slots = len(self._slots), []
        if self._device != "cpu" and made:
            torch.cuda.ipc_collect()  # what the engines have closed
            torch.cuda.empty_cache()

    def _make(self, size: int) -> torch.Tensor:
        if self._device != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        file = os.memfd_create("megarl-weights")
        os.ftruncate(file, size)
        self.files.append(file)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
