"""Real Slurm jobs, on a cluster whose nodes are on this machine (tests/launch/slurm_cluster.sh)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.arithmetic import arithmetic_texts, write_arithmetic
from examples.tiny_model import make_tiny_model
from tests.launch.slurm import ROOT, Slurm, obstacle, slurm_cluster
from tests.waiting import wait_for

TRAIN, SWEEP, ATTACH = (
    ROOT / "launch/slurm" / name for name in ("train.sbatch", "sweep.sbatch", "attach.sh")
)
SFT = str(ROOT / "recipes/quickstart_sft.yaml")
STEPS = 120  # steps of the runs that are disturbed
PPO = str(ROOT / "recipes/quickstart_ppo.yaml")
OBSTACLE = obstacle()

pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def task(slurm: Slurm) -> Path:
    """A folder with model/ and data/{sft,train,test}.parquet, which both nodes see."""
    folder = slurm.work / "task"
    write_arithmetic(folder / "data", 64, 64, 16, seed=3)
    make_tiny_model(folder / "model", arithmetic_texts(), hidden_size=64, ffn_hidden_size=128, num_layers=2)
    return folder


@pytest.fixture(scope="module")
def stub(slurm: Slurm) -> Path:
    """A folder with bin/megarl, which stands in for megarl: it writes down its arguments, waits for the file `hold`, and ends as its arguments say;
    when it is started again, it succeeds.
    """
    program = slurm.work / "stub/bin/megarl"
    program.parent.mkdir(parents=True)
    program.write_text(f"""#!{sys.executable}
import json, os, pathlib, sys, time
given = dict(text.split("=", 1) for text in sys.argv if "=" in text)
if sys.argv[1] == "config":
    keys = {{key: {{"value": int(given[key])}} for key in ("trainer.nnodes", "trainer.n_gpus_per_node")}}
    print(json.dumps({{"keys": keys}}))
    sys.exit()
facts = {{"arguments": sys.argv[1:], "environment": dict(os.environ)}}
written = pathlib.Path(given["trainer.default_local_dir"] + ".json")
again = written.exists()
written.write_text(json.dumps(facts))
while "hold" in given and not os.path.exists(given["hold"]):
    time.sleep(0.1)
sys.exit(0 if again else int(given.get("trainer.seed", 0)))
""")
    program.chmod(0o755)
    return program.parent.parent


def sft(slurm: Slurm, task: Path, name: str) -> tuple[str, Path]:
    """Submit a supervised run whose two pipeline stages are on two of the nodes: (the job, the run folder)."""
    run = slurm.work / name
    job = slurm.launch(
        SFT, "--command", "sft", "--cpu", "--nodes", "2", "--partition", "low", "trainer.n_gpus_per_node=1",
        "megatron.tensor_model_parallel_size=1", "data.train_batch_size=16", "trainer.save_freq=20",
        f"data.train_files={task}/data/sft.parquet", f"model.path={task}/model", f"trainer.default_local_dir={run}",
        "trainer.total_epochs=1000", f"trainer.total_training_steps={STEPS}",
    )  # fmt: skip
    return job, run


def steps_in(log: str) -> list[int]:
    """The steps whose lines are in a log."""
    return [int(line.split()[1].split("/")[0]) for line in log.splitlines() if line.startswith("step ")]


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_cannot_run_says_why(slurm: Slurm, tmp_path: Path) -> None:
    """Each job ends within seconds, with exit code 2, before anything is started on the nodes."""
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
    """The job fails before Ray is started; the node that failed ends the other one, too."""
    job = slurm.submit(
        "--nodes=2", TRAIN, "--cpu", "--devices", "2", "--venv", stub, "--logs", slurm.logs, "--",
        SFT, "trainer.nnodes=3", "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    begun = time.monotonic()
    assert slurm.end(job) == ("FAILED", 1) and time.monotonic() - begun < 150
    assert (
        "node.sh: n1: the job has 2 nodes, and the recipe is made for trainer.nnodes=3: submit with --nodes 3"
        in slurm.output(job)
    )
    other = slurm.submit(
        "--nodes=2", TRAIN, "--cpu", "--devices", "1", "--venv", stub, "--logs", slurm.logs, "--interface", "ib7", "--",
        SFT, "trainer.nnodes=2", "trainer.n_gpus_per_node=1",
    )  # fmt: skip
    assert slurm.end(other)[0] == "FAILED"
    # Whichever node failed first: it ends the other one, sometimes before that node could report anything.
    said = next(line for line in slurm.output(other).splitlines() if line.startswith("node.sh: n"))
    assert "the interface ib7 has no address" in said and "eth0" in said


@pytest.fixture(scope="module")
def sweep(slurm: Slurm, stub: Path) -> list[str]:
    """An array of two runs, which are inspected while they go on: the first fails, the second asks to be started again.
    Returns: the numbers of its tasks.

    They run in containers as far as possible here: the stand-in for Apptainer runs the command without a container.
    """
    lines, runs, image, go = (slurm.work / name for name in ("sweep.txt", "sweep", "megarl.sif", "go"))
    lines.write_text(f"trainer.seed=3 hold={go} trainer.nnodes=1\ntrainer.seed=75 hold={go}\n")
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
    slurm.wait(job, lambda: len(list(runs.iterdir())) == 2, 100)
    tasks = [slurm.facts(f"{job}_{task}")["JobId"] for task in (1, 2)]
    assert tasks[1] == job  # the last task has the number of the whole array
    status = ("bash", ATTACH, f"{job}_2", "--logs", slurm.logs, "--", "ray", "status")
    slurm.wait(
        job, lambda: "/8.0 GPU" in slurm.run(*status), 60
    )  # Ray knows of its nodes some seconds after its start
    hosts = {
        slurm.run("bash", ATTACH, f"{job}_{task}", "--logs", slurm.logs, "--", "hostname") for task in (1, 2)
    }
    assert hosts == {"n1\n", "n2\n"}
    go.touch()
    assert slurm.end(f"{job}_1") == ("FAILED", 3), slurm.everything(job)  # megarl's exit code
    assert slurm.end(f"{job}_2") == ("COMPLETED", 0), slurm.everything(job)
    return tasks


@pytest.mark.slow
def test_a_sweep_gives_each_run_its_line_its_folder_and_its_gpus(slurm: Slurm, sweep: list[str]) -> None:
    runs = slurm.work / "sweep"
    for number, seed in (("1", "3"), ("2", "75")):
        facts = json.loads((runs / f"{number}.json").read_text())
        arguments, environment = facts["arguments"], facts["environment"]
        assert arguments[:2] == ["train", SFT] and f"trainer.seed={seed}" in arguments
        assert sum(text.startswith("trainer.ray_address=10.78.0.") for text in arguments) == 1
        assert environment["NOTE"] == "a $b = 'c'd" and environment["GLOO_SOCKET_IFNAME"] == "eth0"
    contained = (slurm.work / "apptainer").read_text().splitlines()
    assert len(contained) == 3
    assert all(f"--pwd {slurm.work} --nv --bind /etc:/site:ro --bind " in line for line in contained)


@pytest.mark.slow
def test_a_task_of_an_array_is_started_again_alone(slurm: Slurm, sweep: list[str]) -> None:
    starts = [sorted(path.name for path in (slurm.logs / task).iterdir()) for task in sweep]
    assert starts == [["start-0"], ["start-0", "start-1"]]
    for task in sweep:
        for path in (slurm.logs / task).glob("start-*/n*.log"):
            assert "1 of 1 nodes have 8 GPUs (10.78.0." in path.read_text()
    assert "megarl ended with exit code 75: queued again" in slurm.output(sweep[1])


@pytest.fixture(scope="module")
def trained(slurm: Slurm, task: Path) -> tuple[str, Path]:
    """A run of the quickstart over both nodes, from its submission to its end: (the job, the run folder).

    Actor and critic have a pipeline stage on each node.
    """
    run = slurm.work / "ppo"
    job = slurm.launch(
        PPO, "--cpu", "--nodes", "2", "--interface", "eth0", "trainer.n_gpus_per_node=1", "data.train_batch_size=8",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
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
    assert "2 of 2 nodes have 1 CPUs (10.78.0.1: 1, 10.78.0.2: 1)" in slurm.log(job, name="n1")
    assert "stopping the worker at 10.78.0.2" in slurm.log(job, name="n2")


def test_nothing_of_a_job_outlives_it(slurm: Slurm, trained: tuple[str, Path]) -> None:
    """Ray's agents end within seconds after their raylet."""
    wait_for(lambda: not slurm.names() - {"unshare", "slurmd", "slurmstepd"}, 100, slurm.names, apart=0.2)


@pytest.mark.slow
def test_an_engine_spans_both_nodes(slurm: Slurm, task: Path) -> None:
    """The nodes have separate networks, /tmp and shared memory: the engine's ranks communicate over the network."""
    run = slurm.work / "spanning"
    job = slurm.launch(
        PPO, "--cpu", "--nodes", "2", "--interface", "eth0", "trainer.n_gpus_per_node=1", "data.train_batch_size=8",
        "critic=null", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.test_freq=-1", "trainer.total_training_steps=2",
        f"data.train_files={task}/data/train.parquet", f"data.val_files={task}/data/test.parquet",
        f"actor_rollout_ref.model.path={task}/model", f"trainer.default_local_dir={run}",
    )  # fmt: skip
    assert slurm.end(job, 280) == ("COMPLETED", 0), slurm.everything(job)
    hosts = {
        path.name: path.read_text().split(" on ")[1].split(",")[0]
        for path in (run / "logs").glob("rollout*.log")
    }
    assert sorted(hosts) == ["rollout-rank0.log", "rollout-rank0.part1.log"]
    assert sorted(hosts.values()) == ["10.78.0.1", "10.78.0.2"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["training/rollout_log_prob_diff_max"] < 1e-4
        assert line["sync/bytes_inter_node"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True], ids=["dead", "silent"])
def test_a_lost_part_of_the_cluster_is_no_error_of_the_run(slurm: Slurm, stub: Path, silent: bool) -> None:
    """Even though megarl loses ranks, and ends with an error before Slurm or the lost node's own script notices the loss."""
    run, go = slurm.work / f"lost-{silent}", slurm.work / f"go-{silent}"
    job = slurm.submit(
        "--nodes=2", TRAIN, "--cpu", "--devices", "1", "--venv", stub, "--logs", slurm.logs, "--", SFT,
        "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.seed=1", f"trainer.default_local_dir={run}", f"hold={go}",
    )  # fmt: skip
    slurm.wait(job, run.with_suffix(".json").exists, 100)
    [raylet] = [process for process in slurm.processes(2) if process.name() == "raylet"]
    if silent:
        raylet.suspend()
        head = (slurm.logs / job / "start-0/head").read_text().strip()
        look = [
            "bash", ATTACH, job, "--logs", slurm.logs, "--", "python3", ROOT / "launch/ray/wait_for_devices.py", head,
            "--nodes", "1", "--devices", "1", "--kind", "CPU", "--seconds", "0",
        ]  # fmt: skip
        slurm.wait(job, lambda: "10.78.0.2" not in slurm.run(*look), 100)  # Ray has noticed
    else:
        raylet.kill()
    go.touch()
    try:
        slurm.wait(job, lambda: slurm.facts(job)["Restarts"] == "1", 100)
    finally:
        if silent:
            raylet.kill()
    lost = (
        "megarl ended with exit code 1, and a part of the cluster was lost"
        if silent
        else "Ray's worker has ended"
    )
    assert f"{lost}\n" in slurm.output(
        job
    ) and "the nodes did not stay together: queued again" in slurm.output(job)
    assert slurm.end(job) == ("COMPLETED", 0), slurm.everything(job)


@pytest.fixture(scope="module")
def preempted(slurm: Slurm, task: Path) -> tuple[str, Path]:
    """A run that loses a node to a job of higher priority, up to the run's end: (the job, the run folder)."""
    job, run = sft(slurm, task, "preempted")
    slurm.wait(job, lambda: "\nstep 2/" in slurm.log(job), 200)
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true")
    assert slurm.end(urgent) == ("COMPLETED", 0)
    assert slurm.end(job, 300) == ("COMPLETED", 0), slurm.everything(job)
    return job, run


@pytest.mark.slow
def test_a_preempted_job_saves_and_goes_on(slurm: Slurm, preempted: tuple[str, Path]) -> None:
    """The run saves when it is asked to end, so that no step is made again."""
    job, run = preempted
    last = steps_in(slurm.log(job))[-1]
    assert "SIGUSR1: the run ends after this step" in slurm.log(job)
    assert "megarl ended with exit code 75: queued again" in slurm.output(job)
    assert f"going on from step {last}: " in slurm.log(job, 1)
    assert steps_in(slurm.log(job, 1)) == list(range(last + 1, STEPS + 1))
    assert steps(run) == list(range(1, STEPS + 1))


def end_all_but_slurmd(namespace: str) -> None:
    """Kill all processes of a node except slurmd, without which the node could not come back."""
    found = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True)
    for pid in map(int, found.stdout.split()):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            if Path(f"/proc/{pid}/comm").read_text() != "slurmd\n":
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 0], ids=["second", "first"])
def test_a_job_whose_node_is_cut_off_goes_on_with_another_node(
    slurm: Slurm, task: Path, preempted: tuple[str, Path], number: int
) -> None:
    """The job resumes from its last checkpoint, and its results are those of the run that was disturbed elsewhere and by other means.

    The first node has Ray's head, the controller and the job's own script. It also loses its power: the job's next start
    does not take a node for lost that runs on and still reaches the checkpoints.
    """
    job, run = sft(slurm, task, f"cut-{number}")
    slurm.wait(job, lambda: "\nstep 30/" in slurm.log(job), 200)
    before = slurm.nodes(job)
    lost = before[number]
    subprocess.run(["ip", "link", "set", f"megarl-{lost}", "down"], check=True)
    if number == 0:
        end_all_but_slurmd(f"megarl-{lost}")
    try:
        slurm.wait(job, lambda: bool(steps_in(slurm.log(job, 1))), 300)
        after = slurm.nodes(job)
    finally:
        subprocess.run(["ip", "link", "set", f"megarl-{lost}", "up"], check=True)
    assert lost not in after and before[1 - number] in after and len(set(after)) == 2
    assert slurm.end(job, 200) == ("COMPLETED", 0), slurm.everything(job)
    first = steps_in(slurm.log(job, 1))[0]
    assert first % 20 == 1 and first - 1 <= steps_in(slurm.log(job))[-1]
    assert f"going on from step {first - 1}: " in slurm.log(job, 1)
    assert steps(run) == list(range(1, STEPS + 1))
    weights, others = (load_file(folder / "hf/model.safetensors") for folder in (run, preempted[1]))
    assert weights.keys() == others.keys()
    assert all(weights[name].equal(others[name]) for name in weights)
