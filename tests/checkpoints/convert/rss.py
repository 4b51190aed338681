"""The memory that a conversion takes, measured in a process of its own."""

import subprocess
import sys
import threading
from pathlib import Path


def peak_growth_mb(source: str, target: str, shard_bytes: int, adapter: str | None = None) -> float:
    """The largest growth of a process's resident memory while it converts a model or merges an adapter."""
    command = [sys.executable, "-m", "tests.checkpoints.convert.rss", source, target, str(shard_bytes)]
    command += [adapter] if adapter else []
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def _main(source: str, target: str, shard_bytes: int, adapter: str | None = None) -> None:
    from megarl.checkpoints.convert import convert

    convert(
        source, target + "-first", shard_bytes=shard_bytes, adapter=adapter
    )  # loads everything that is loaded once
    before, peak, done = _resident_mb(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _resident_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    convert(source, target, shard_bytes=shard_bytes, adapter=adapter)
    done.set()
    watcher.join()
    print(peak - before)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
