"""Linux namespaces for a process: a root folder of its own, no network, no sight of other processes.

Every step raises OSError where the system does not allow it.
"""

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Sequence

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_MOUNT_SETATTR = 442  # on every machine
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_DEVICES = ("null", "zero", "urandom")
_TMP_BYTES = 16 << 20
# On every Linux machine, and never where Python is installed.
_MOUNT_POINT = "/sys"

_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Move this process into new namespaces; its next child is the first process of the new pid namespace."""
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS), "unshare", "namespaces")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def make_root(folders: Sequence[str], writable: Sequence[str] = ()) -> None:
    """Replace the root folder by one in which only `folders` (and the targets of /lib and the like) can be read.

    Args:
        writable: which of `folders` can be written into, besides /tmp, which is empty.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
    _mount("tmpfs", _MOUNT_POINT, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    # Before the folders: one of them may lie in /tmp.
    os.mkdir(f"{_MOUNT_POINT}/tmp")
    _mount("tmpfs", f"{_MOUNT_POINT}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={_TMP_BYTES},mode=1777")
    system = _system_folders()
    for path in [*system, *sorted(folders, key=len)]:  # outer folders before the ones within them
        if path in system and os.path.islink(path):  # /lib -> usr/lib
            if not os.path.lexists(_MOUNT_POINT + path):
                os.symlink(os.readlink(path), _MOUNT_POINT + path)
        elif path in writable or not os.path.exists(_MOUNT_POINT + path):  # else it is within another one
            os.makedirs(_MOUNT_POINT + path, exist_ok=True)
            _mount(path, _MOUNT_POINT + path, None, _MS_BIND | _MS_REC, None)
    for name in _DEVICES:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{_MOUNT_POINT}/dev")
        os.mknod(f"{_MOUNT_POINT}/dev/{name}", stat.S_IFREG | 0o600)
        _mount(f"/dev/{name}", f"{_MOUNT_POINT}/dev/{name}", None, _MS_BIND, None)
    os.mkdir(f"{_MOUNT_POINT}/old")
    _check(
        _libc.syscall(_number(_SYS_PIVOT_ROOT), _MOUNT_POINT.encode(), f"{_MOUNT_POINT}/old".encode()),
        "pivot_root",
        "/",
    )
    os.chdir("/")
    _check(_libc.umount2(b"/old", _MNT_DETACH), "umount", "/old")
    os.rmdir("/old")
    _change_mounts("/", _AT_RECURSIVE, set_attributes=_ATTR_RDONLY | _ATTR_NOSUID)
    for path in ("/tmp", *writable):
        _change_mounts(path, 0, clear_attributes=_ATTR_RDONLY)
    os.chdir("/tmp")


def drop_capabilities() -> None:
    """Give up all rights that this process has beyond its user's."""
    version = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
    header, none = struct.pack("Ii", version, 0), bytes(24)
    _check(_libc.syscall(_number(_SYS_CAPSET), header, none), "capset", "")


def _system_folders() -> list[str]:
    """Where shared libraries are."""
    return [path for path in ("/usr", "/lib", "/lib64", "/lib32") if os.path.lexists(path)]


def _change_mounts(path: str, flags: int, set_attributes: int = 0, clear_attributes: int = 0) -> None:
    """Change attributes of a mount (with _AT_RECURSIVE of all below it too); other attributes stay as they are."""
    attributes = struct.pack("QQQQ", set_attributes, clear_attributes, 0, 0)
    result = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes))
    _check(result, "mount_setattr", path)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind and kind.encode(),
        ctypes.c_ulong(flags),
        data and data.encode(),
    )
    _check(result, "mount", target)


def _number(numbers: dict[str, int]) -> int:
    return numbers[os.uname().machine]


def _check(result: int, what: str, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}", path)
