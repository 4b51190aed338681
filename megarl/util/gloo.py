"""Process groups of gloo that share a device.

torch 2.13 makes a device for each group: a listening socket, and a thread that wakes 100 times a second for as long as the group is there, whether it
is used or not. A rank of Megatron's has up to dozens of groups, and a scheduler of SGLang's has many, too. A device serves any number of groups, so
those of a process share one.
"""

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

_Original: Any = distributed_c10d.ProcessGroupGloo


def make_group(store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)) -> Any:
    """A group with this process's device; the arguments are those of `ProcessGroupGloo`."""
    options = _Original._Options()
    options._devices = _devices(os.getpid())
    options._threads = 2 * len(options._devices)  # as torch has it
    options._timeout = timeout
    return _Original(store, rank, size, options)


class _Maker(type):
    """The metaclass of a stand-in for `ProcessGroupGloo`, which torch.distributed calls and uses in isinstance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Original, name)


class _ProcessGroupGloo(metaclass=_Maker):
    pass


def share_device() -> None:
    """Let torch.distributed make all groups of gloo of this process by `make_group` (torch 2.13)."""
    modules: tuple[Any, ...] = (distributed_c10d, torch.distributed)
    for module in modules:
        module.ProcessGroupGloo = _ProcessGroupGloo


@functools.cache
def _devices(pid: int) -> list[Any]:
    """Devices of the interfaces that GLOO_SOCKET_IFNAME names, or else of the interface of this machine's name, as in torch.

    Args:
        pid: of this process: a fork makes devices of its own, since it has none of its parent's threads.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [_Original.create_device(interface=name) for name in names.split(",")]
    return [_Original.create_default_device()]
