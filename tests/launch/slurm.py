"""A Slurm cluster whose three nodes are on this machine (slurm_cluster.sh): it submits jobs and waits for their ends."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "tests/launch/slurm_cluster.sh"
NODES = 3
PACKAGES = ROOT / "tests/launch/debian_packages.txt"  # .ci/run installs them
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")


def obstacle() -> str | None:
    """Why no cluster can be started here; None: it can be started."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        return (
            f"a Slurm cluster is started as root, with Debian's {PACKAGES.read_text().strip()} (missing: "
            f"{', '.join(missing) or 'root'})"
        )
    if ROOT.is_relative_to("/tmp"):
        return "each node has a /tmp of its own, where this checkout would not be"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    if made.returncode:
        return f"a node is namespaces of its own, which cannot be made here: {made.stderr.strip()}"
    return None


class Slurm:
    """The cluster, its jobs and their ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.logs = self.work / "logs"
        self.logs.mkdir(parents=True)
        bin = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{bin}:{os.environ['PATH']}",
            "COLUMNS": "200",
        }

    def run(self, *command: str | Path) -> str:
        """The output of a command, which must succeed."""
        result = subprocess.run(
            list(map(str, command)),
            cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def submit(self, *arguments: str | Path) -> str:
        """Submit with sbatch; returns the job's number."""
        return self.run("sbatch", "--parsable", f"--output={self.logs}/%j.out", *arguments).strip()

    def launch(self, *arguments: str | Path) -> str:
        """Submit with `megarl launch slurm`; returns the job's number."""
        return self.run("megarl", "launch", "slurm", "--logs", self.logs, *arguments).split()[-1]

    def output(self, job: str) -> str:
        """The output of the batch script."""
        path = self.logs / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def log(self, job: str, start: int = 0, name: str = "train") -> str:
        path = self.logs / job / f"start-{start}" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: str, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds."""
        wait_for(holds, seconds, lambda: self.everything(job), apart=0.3)

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm shows of a job."""
        text = self.run("scontrol", "show", "job", "-o", job)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def nodes(self, job: str) -> list[str]:
        """The nodes of a running job."""
        return self.run("scontrol", "show", "hostnames", self.facts(job)["NodeList"]).split()

    def end(self, job: str, seconds: float = 240) -> tuple[str, int]:
        """Wait for a job's end: (its state, its exit code)."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(job, lambda: self.facts(job)["JobState"] in ends, seconds)
        facts = self.facts(job)
        return facts["JobState"], int(facts["ExitCode"].split(":")[0])

    def processes(self, node: int) -> list[psutil.Process]:
        """All processes on a node."""
        pids = self.run("ip", "netns", "pids", f"megarl-n{node}").split()
        return [psutil.Process(int(pid)) for pid in pids]

    def names(self) -> set[str]:
        """The names of all processes on nodes 1 and 2."""
        names = set()
        for node in (1, 2):
            for pid in self.run("ip", "netns", "pids", f"megarl-n{node}").split():
                with suppress(psutil.NoSuchProcess):  # it has ended since
                    names.add(psutil.Process(int(pid)).name())
        return names

    def everything(self, job: str) -> str:
        texts = [self.run("squeue"), self.output(job)[-5000:]]
        texts += [f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(self.logs.glob(f"{job}/*/*.log"))]
        return "\n".join(texts)


@contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    """A cluster that lasts until the end of the block; another process that wants a cluster waits until then."""
    # munge wants a folder that everybody can enter, which pytest's are not.
    folder = Path(tempfile.mkdtemp(prefix="megarl-slurm-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        # One cluster at a time: the names of its networks are fixed.
        with open("/tmp/megarl-slurm.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            started = subprocess.run(
                ["bash", STARTER, "up", folder, str(NODES)], capture_output=True, text=True, timeout=120
            )
            assert started.returncode == 0, started.stdout + started.stderr
            try:
                yield Slurm(folder)
            finally:
                subprocess.run(["bash", STARTER, "down", folder, str(NODES)], check=True, timeout=60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
