"""Page-locked memory of the host, in one piece: what a GPU's copies reach at full speed.

Torch's own comes in powers of two, of which up to a half would be lost, and is locked while the process waits for it: at one to a few
GB/s that is minutes for a rank's weights and states.
"""

import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megarl import platform


class HostRoom:
    """Bytes on the host for what leaves a GPU; a thread locks them while the process does other things."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._locking: Future[None] | None = None
        if nbytes:
            thread = ThreadPoolExecutor(1, "page-locking")
            self._locking = thread.submit(_lock, self._bytes.data_ptr(), nbytes)
            thread.shutdown(wait=False)
            # It holds the tensor too: memory that is freed must not be page-locked any more.
            weakref.finalize(self, _unlock, self._bytes, self._locking).atexit = False

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def take(self) -> torch.Tensor:
        """The bytes, once they are locked.

        Raises:
            RuntimeError: they cannot be.
        """
        if self._locking is not None:
            self._locking.result()
        return self._bytes


def host_tensor(numel: int, owner: object) -> torch.Tensor:
    """float32 zeros on the host, page-locked on a GPU as long as `owner` is there.

    Raises:
        RuntimeError: they cannot be.
    """
    tensor = torch.zeros(numel, dtype=torch.float32, device="cpu")
    if platform.is_cuda() and numel:
        _lock(tensor.data_ptr(), tensor.nbytes)
        weakref.finalize(owner, _unlock, tensor).atexit = False
    return tensor


def _lock(address: int, nbytes: int) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        raise RuntimeError(
            f"{nbytes / 2**30:.1f} GiB of the host's memory for weights or optimizer states cannot be page-locked (CUDA error "
            f"{code}): has the machine so much, and may the process lock it?"
        )


def _unlock(tensor: torch.Tensor, locking: Future[None] | None = None) -> None:
    if locking is not None and locking.exception() is not None:
        return
    code = int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()))
    assert not code, f"CUDA error {code}"
