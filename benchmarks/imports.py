"""Processor seconds and memory of the imports of a run's processes, with Python's garbage collector running and paused.

    python benchmarks/imports.py --out FILE

Each line is the median of processes that import nothing else (`megarl.util.memory.without_collection` is what megarl's own use).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

from facts import REPOSITORY, announce, write_report

# The imports of a trainer rank, and of an engine's owner; on a GPU of its schedulers, too.
MODULES = ("megarl.trainer.workers.model", "sglang.srt.managers.scheduler")
CHILD = """
import contextlib, importlib, json, resource, sys
import megarl.util.memory
with megarl.util.memory.without_collection() if sys.argv[2] == "paused" else contextlib.nullcontext():
    importlib.import_module("torch")
    importlib.import_module(sys.argv[1])
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


def measure(module: str, how: str) -> list[float]:
    """Processor seconds of a process that imports `module`, and the MiB that it has held at most."""
    added = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, module, how], env={**os.environ, **added},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=3, help="processes of each line, after one that does not count"
    )
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    facts = announce(("torch", "megatron-core", "sglang", "transformers"))
    print("\nimported                         collector   seconds      MiB")
    results = []
    for module in MODULES:
        measure(module, "paused")  # reads the files once
        for how in ("running", "paused"):
            found = [measure(module, how) for _ in range(options.repeats)]
            seconds, mebibytes = (statistics.median(values) for values in zip(*found, strict=True))
            results.append({"module": module, "collector": how, "seconds": seconds, "peak_mib": mebibytes})
            print(f"{module:32} {how:10} {seconds:8.2f} {mebibytes:8.0f}", flush=True)
    write_report(options.out, **facts, results=results)


if __name__ == "__main__":
    main()
