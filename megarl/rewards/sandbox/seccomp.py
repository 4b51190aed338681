"""A filter of system calls (seccomp, in classic BPF) for a process that computes and prints, and does nothing else.

All system calls are allowed but the listed ones, because Python and its libraries need many, and different ones in each version.
Sources: linux/seccomp.h, linux/filter.h, linux/audit.h; numbers from asm/unistd_64.h and asm-generic/unistd.h.
"""

import ctypes
import errno
import os
import platform
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_CLONE_THREAD = 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# machine -> (audit architecture, index into the pairs below)
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32_BIT = 0x40000000  # x86_64's second set of system calls

# Numbers on x86_64 and on aarch64; None: there is none.
_REFUSED = {
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # Memory that RLIMIT_AS does not count, or that outlives the process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # The operations of an io_uring pass no filter.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
# Changes of the file system by other calls than those that open files.
_CHANGES = {
    "creat": (85, None),
    "truncate": (76, 45),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "rmdir": (84, None),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_KILL, _TGKILL, _PRLIMIT = (62, 129), (234, 131), (302, 261)
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), (437, 437)

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def apply(may_write: bool) -> None:
    """Restrict this process, for good. OSError: the kernel refuses; ValueError: a machine without a list of numbers.

    Args:
        may_write: whether files may be opened for writing, made, renamed and so on, where permissions allow it.
    """
    program = b"".join(struct.pack("HBBI", *one) for one in _filter(may_write))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({call[0]})")


def _filter(may_write: bool) -> list[_Instruction]:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"the code sandbox knows {', '.join(_MACHINES)}, not {machine}")
    architecture, index = _MACHINES[machine]
    pid = os.getpid()
    refuse = _return_error(errno.EPERM)
    result: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT),
        _return_error(errno.ENOSYS),
    ]

    def rule(numbers: tuple[int | None, int | None], block: list[_Instruction]) -> None:
        if numbers[index] is not None:
            result.extend([(_EQUAL, 0, len(block), numbers[index]), *block])

    for numbers in [*_REFUSED.values(), *(() if may_write else _CHANGES.values())]:
        rule(numbers, [refuse])
    # Threads are made by clone; clone3 has its flags in memory, so libraries are sent back to clone.
    rule(_CLONE, [_argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _ALLOWED, refuse])
    rule(_CLONE3, [_return_error(errno.ENOSYS)])
    for numbers in (_KILL, _TGKILL):  # `abort` and the like signal the process itself
        rule(numbers, [_argument(0), (_EQUAL, 0, 1, pid), _ALLOWED, refuse])
    rule(_PRLIMIT, [_argument(0), (_EQUAL, 1, 0, pid), (_EQUAL, 0, 1, 0), _ALLOWED, refuse])
    if not may_write:
        rule(_OPEN, [_argument(1), (_ANY_BIT, 0, 1, _WRITING), refuse, _ALLOWED])
        rule(_OPENAT, [_argument(2), (_ANY_BIT, 0, 1, _WRITING), refuse, _ALLOWED])
        rule(_OPENAT2, [_return_error(errno.ENOSYS)])
    return [*result, _ALLOWED]


_ALLOWED: _Instruction = (_RETURN, 0, 0, _ALLOW)


def _return_error(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _argument(position: int) -> _Instruction:
    """Load the lower half of an argument (both machines are little-endian)."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * position)
