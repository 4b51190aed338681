"""Real Slurm jobs, on a cluster of two nodes that lie on this machine (tests/launch/slurm_cluster.sh)."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.data.arithmetic import arithmetic_texts, write_arithmetic
from megarl.models.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "tests/launch/slurm_cluster.sh"
TRAIN, SWEEP = (ROOT / "launch/slurm" / name for name in ("train.sbatch", "sweep.sbatch"))
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
SFT = str(ROOT / "recipes/quickstart_sft.yaml")
PPO = str(ROOT / "recipes/quickstart_ppo.yaml")

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or bool(MISSING),
        reason=f"a Slurm cluster is started as root, with Debian's slurmctld slurmd slurm-client munge iproute2 (missing: "
        f"{', '.join(MISSING) or 'root'})",
    ),
    pytest.mark.skipif(
        ROOT.is_relative_to("/tmp"),
        reason="each node has a /tmp of its own, where this checkout would not be",
    ),
    pytest.mark.timeout(600),
]


class Slurm:
    """The cluster: what is submitted to it, and what becomes of that."""

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
        """What a command printed; it must succeed."""
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
        """Of the batch script."""
        path = self.logs / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def log(self, job: str, start: int = 0, name: str = "train") -> str:
        path = self.logs / job / f"start-{start}" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: str, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.everything(job)
            time.sleep(0.3)

    def end(self, job: str, seconds: float = 240) -> tuple[str, int]:
        """Wait for a job's end: (its state, its exit code)."""
        facts: dict[str, str] = {}

        def over() -> bool:
            text = self.run("scontrol", "show", "job", "-o", job)
            facts.update(part.split("=", 1) for part in text.split() if "=" in part)
            return facts["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        self.wait(job, over, seconds)
        return facts["JobState"], int(facts["ExitCode"].split(":")[0])

    def everything(self, job: str) -> str:
        texts = [self.run("squeue"), self.output(job)[-5000:]]
        texts += [f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(self.logs.glob(f"{job}/*/*.log"))]
        return "\n".join(texts)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # munge wants a folder that everybody can enter, which pytest's are not.
    folder = Path(tempfile.mkdtemp(prefix="megarl-slurm-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        # One cluster at a time: the names of its networks are fixed.
        with open("/tmp/megarl-slurm.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            started = subprocess.run(
                ["bash", STARTER, "up", folder, "2"], capture_output=True, text=True, timeout=120
            )
            assert started.returncode == 0, started.stdout + started.stderr
            yield Slurm(folder)
            subprocess.run(["bash", STARTER, "down", folder, "2"], check=True, timeout=60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def task(slurm: Slurm) -> Path:
    """A folder with model/ and data/{sft,train,test}.parquet, which both nodes see."""
    folder = slurm.work / "task"
    write_arithmetic(folder / "data", 64, 64, 16, seed=3)
    make_tiny_model(folder / "model", arithmetic_texts(), hidden_size=64, ffn_hidden_size=128, num_layers=2)
    return folder


@pytest.fixture(scope="module")
def stub(slurm: Slurm) -> Path:
    """A folder with bin/megarl, which stands in for megarl: it writes down what it was given, and ends as it is told."""
    program = slurm.work / "stub/bin/megarl"
    program.parent.mkdir(parents=True)
    program.write_text(f"""#!{sys.executable}
import json, os, pathlib, sys
given = dict(text.split("=", 1) for text in sys.argv if "=" in text)
if sys.argv[1] == "config":
    keys = {{key: {{"value": int(given[key])}} for key in ("trainer.nnodes", "trainer.n_gpus_per_node")}}
    print(json.dumps({{"keys": keys}}))
    sys.exit()
facts = {{"arguments": sys.argv[1:], "environment": dict(os.environ)}}
pathlib.Path(given["trainer.default_local_dir"] + ".json").write_text(json.dumps(facts))
sys.exit(int(given.get("trainer.seed", 0)))
""")
    program.chmod(0o755)
    return program.parent.parent


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_cannot_run_says_why(slurm: Slurm, tmp_path: Path) -> None:
    """Each within seconds, with exit code 2, and before anything is started on the nodes."""
    two = ["--nodes=2", TRAIN]
    mistakes = {
        "the recipe /tmp/none.yaml is not there (on n1": [*two, "--cpu", "--devices", "1", "--", "/tmp/none.yaml"],
        "no recipe": [*two, "--cpu"],
        "unknown option '--device'": [*two, "--device", "1", "--", SFT],
        "Slurm gave no GPUs": ["--exclusive=user", *two, "--", SFT],
        "--devices 9, and Slurm gave 8 GPUs on n1": ["--gpus-per-node=8", *two, "--devices", "9", "--", SFT],
        "the image /images/none.sqsh is not there": [
            *two, "--cpu", "--devices", "1", "--container", "apptainer", "--image", "/images/none.sqsh", "--", SFT,
        ],
        "this Slurm has no Pyxis": [
            *two, "--cpu", "--devices", "1", "--container", "pyxis", "--image", "registry#megarl", "--", SFT,
        ],
        "--image x needs --container": [*two, "--cpu", "--devices", "1", "--image", "x", "--", SFT],
        "the environment file none.env is not there": [*two, "--cpu", "--devices", "1", "--env-file", "none.env", "--", SFT],
        "there is no bin/megarl in it": [*two, "--cpu", "--devices", "1", "--venv", "/usr", "--", SFT],
    }  # fmt: skip
    jobs = {reason: slurm.submit(*arguments) for reason, arguments in mistakes.items()}
    for reason, job in jobs.items():
        assert slurm.end(job) == ("FAILED", 2), slurm.everything(job)
        assert reason in slurm.output(job)
        assert not (slurm.logs / job / "start-0/n1.log").exists()


def test_a_job_of_the_wrong_size_says_so(slurm: Slurm, stub: Path) -> None:
    """Before Ray is started; the node that failed takes the other one along."""
    job = slurm.submit(
        "--nodes=2", TRAIN, "--cpu", "--devices", "2", "--venv", stub, "--logs", slurm.logs, "--",
        SFT, "trainer.nnodes=3", "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    begun = time.monotonic()
    assert slurm.end(job) == ("FAILED", 1) and time.monotonic() - begun < 60
    assert (
        "node.sh: n1: the job has 2 nodes, and the recipe is made for trainer.nnodes=3: submit with --nodes 3"
        in slurm.output(job)
    )
    other = slurm.submit(
        "--nodes=2", TRAIN, "--cpu", "--devices", "1", "--venv", stub, "--logs", slurm.logs, "--interface", "ib7", "--",
        SFT, "trainer.nnodes=2", "trainer.n_gpus_per_node=1",
    )  # fmt: skip
    assert slurm.end(other)[0] == "FAILED"
    # Of whichever node came first: it takes the other one along, at times before that could speak.
    said = next(line for line in slurm.output(other).splitlines() if line.startswith("node.sh: n"))
    assert "the interface ib7 has no address" in said and "eth0" in said


def test_a_sweep_gives_each_run_its_line_its_folder_and_its_gpus(slurm: Slurm, stub: Path) -> None:
    """In containers, as far as that goes here: what stands in for Apptainer runs the command without one."""
    lines, runs, image = slurm.work / "sweep.txt", slurm.work / "sweep", slurm.work / "megarl.sif"
    lines.write_text("trainer.seed=0 trainer.nnodes=1\ntrainer.seed=3\n")
    (slurm.work / "env").write_text("# the site's\nNOTE=a $b = 'c'd\n")
    runs.mkdir()
    image.touch()
    apptainer = stub / "bin/apptainer"
    apptainer.write_text(
        f'#!/bin/bash\necho "$@" >> {slurm.work}/apptainer\n'
        f'while [[ "$1" != {image} ]]; do shift; done; shift; exec "$@"\n'
    )
    apptainer.chmod(0o755)
    job = slurm.submit(
        "--array=1-2", "--nodes=1", "--gpus-per-node=8", SWEEP, lines, runs, "--venv", stub, "--logs", slurm.logs,
        "--env-file", slurm.work / "env", "--interface", "eth0", "--container", "apptainer", "--image", image,
        "--mount", "/etc:/site:ro", "--", SFT, "trainer.nnodes=1", "trainer.n_gpus_per_node=8",
    )  # fmt: skip
    assert slurm.end(f"{job}_1") == ("COMPLETED", 0), slurm.everything(job)
    assert slurm.end(f"{job}_2") == ("FAILED", 3), slurm.everything(job)  # as megarl has ended
    for number, seed in (("1", "0"), ("2", "3")):
        facts = json.loads((runs / f"{number}.json").read_text())
        arguments, environment = facts["arguments"], facts["environment"]
        assert arguments[:2] == ["train", SFT] and f"trainer.seed={seed}" in arguments
        assert sum(text.startswith("trainer.ray_address=10.78.0.") for text in arguments) == 1
        assert environment["NOTE"] == "a $b = 'c'd" and environment["GLOO_SOCKET_IFNAME"] == "eth0"
    contained = (slurm.work / "apptainer").read_text().splitlines()
    assert len(contained) == 2
    assert all(f"--pwd {slurm.work} --nv --bind /etc:/site:ro --bind " in line for line in contained)
    text = "".join(path.read_text() for path in slurm.logs.glob("*/start-0/n*.log"))
    assert text.count("1 of 1 nodes have 8 GPUs (10.78.0.") == 2


@pytest.fixture(scope="module")
def trained(slurm: Slurm, task: Path) -> tuple[str, Path]:
    """A run of the quickstart over both nodes, from its submission to its end: (the job, the run folder)."""
    run = slurm.work / "ppo"
    job = slurm.launch(
        PPO, "--cpu", "--nodes", "2", "--interface", "eth0", "trainer.n_gpus_per_node=2", "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.test_freq=-1", "trainer.total_training_steps=2",
        f"data.train_files={task}/data/train.parquet", f"data.val_files={task}/data/test.parquet",
        f"actor_rollout_ref.model.path={task}/model", f"trainer.default_local_dir={run}",
    )  # fmt: skip
    assert slurm.end(job, 400) == ("COMPLETED", 0), slurm.everything(job)
    return job, run


def test_the_quickstart_runs_across_both_nodes(slurm: Slurm, trained: tuple[str, Path]) -> None:
    job, run = trained
    assert steps(run) == [1, 2]
    assert (run / "hf/model.safetensors").is_file()
    output = slurm.output(job)
    assert "step 2/2" in output  # its output is streamed
    assert "megarl ended with exit code 0" in output
    assert "2 of 2 nodes have 2 CPUs (10.78.0.1: 2, 10.78.0.2: 2)" in slurm.log(job, name="n1")
    assert "stopping the worker at 10.78.0.2" in slurm.log(job, name="n2")


def test_nothing_of_a_job_outlives_it(slurm: Slurm, trained: tuple[str, Path]) -> None:
    left = [
        pid
        for node in (1, 2)
        for pid in subprocess.run(
            ["ip", "netns", "pids", f"megarl-n{node}"], capture_output=True, text=True, check=True
        ).stdout.split()
        if Path(f"/proc/{pid}/comm").read_text().strip() not in ("unshare", "slurmd", "slurmstepd")
    ]
    assert left == []
