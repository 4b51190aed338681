"""Where a rank's time goes within its calls: traces of torch's profiler for chosen steps, ranges for Nsight.

Every call of a rank is a range with the method's name: in a trace of the profiler, and on CUDA as an NVTX range that
`nsys profile` shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl import platform


@contextmanager
def named(method: str) -> Iterator[None]:
    """Around a call of a rank; takes some microseconds where nobody profiles."""
    with torch.profiler.record_function(method):
        if not platform.is_cuda():
            yield
            return
        torch.cuda.nvtx.range_push(method)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


class Profile:
    """A trace of everything that this process does with torch until `write`."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if platform.is_cuda():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def write(self, path: str | Path) -> None:
        """End it; the file is one that ui.perfetto.dev opens, its folder is made."""
        self._profiler.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))
