"""The folders that sandboxes which use this machine's own programs let an agent read."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from megarl.gateway.sandboxes.interface import SandboxSettings

ROOT = str(Path(__file__).resolve().parents[3])  # has the folder megarl
PYTHON = (sys.executable, "-I", "-S", "-B")


def readable_folders(settings: SandboxSettings) -> list[str]:
    """Shells, Python and its packages, megarl, the gateway's socket and the settings' folders; no folders of shared libraries."""
    found = [
        "/bin",
        "/sbin",
        os.path.realpath(sys.base_prefix),
        sys.prefix,
        *sysconfig.get_paths().values(),
        f"{ROOT}/megarl",
        *settings.readable,
        os.path.dirname(settings.socket),
    ]
    return [path for path in dict.fromkeys(found) if os.path.isdir(path)]
