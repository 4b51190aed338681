"""The comparison with other frameworks: what it makes of the steps that they report, and the task that they get."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cluster.guard import process_state

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def _scripts_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison's files import each other by their bare names, as they must in environments without megarl."""
    names = ("figures", "frameworks", "steps", "task", "watching")
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


def test_phases_of_all_frameworks_have_the_same_names_and_add_up_to_the_step() -> None:
    from figures import split_phases

    megarl = {"sync": 0.1, "generate": 1.0, "reward": 0.1, "evaluate_models": 0.3, "update": 2.0, "step": 4.0}
    found = split_phases(megarl, 4.0)
    assert found == pytest.approx(
        {**{k: megarl[k] for k in ("sync", "generate", "reward", "update")}, "evaluate": 0.3, "other": 0.5}
    )
    verl = {
        "gen": 1.0,
        "old_log_prob": 0.5,
        "values": 0.25,
        "update_actor": 1.0,
        "update_critic": 2.0,
        "adv": 0.1,
    }
    assert split_phases(verl, 5.0) == pytest.approx(
        {"generate": 1.0, "evaluate": 0.75, "update": 3.0, "other": 0.25}
    )
    trl = {"generate": 1.0, "reward": 0.5, "other": 0.25}
    assert split_phases(trl, 4.0) == pytest.approx(
        {"generate": 1.0, "reward": 0.5, "update": 2.25, "other": 0.25}
    )


def test_medians_are_of_quiet_steps_where_there_are_enough() -> None:
    from figures import Step, figures

    def step(seconds: float, others: float) -> Step:
        return Step(seconds, {"generate": seconds / 2}, own=2 * seconds, others=others, reward=0.0)

    steps = [step(1.0, 0.0), step(2.0, 0.1), step(3.0, 0.2), step(50.0, 40.0)]
    found = figures(steps, cores=0.15, wanted=3)
    assert (found["steps"], found["quiet_steps"], found["of_quiet_steps"]) == (4, 3, True)
    assert (found["seconds"], found["most_seconds"], found["processor_seconds"]) == (2.0, 3.0, 4.0)
    assert found["phases"] == {"generate": 1.0} and found["samples_per_s"] == 64
    busy = figures(steps, cores=0.15, wanted=4)
    assert not busy["of_quiet_steps"] and busy["seconds"] == 2.5


def test_a_log_gives_its_steps_and_processor_seconds_are_those_between_its_times(tmp_path: Path) -> None:
    from figures import read_log, read_steps
    from steps import MARK
    from watching import Look, Watched

    row = {"begin": 101.0, "end": 103.0, "phases": {"generate": 0.5, "update": 1.0}, "reward": 0.25}
    log = tmp_path / "log"
    log.write_text(f"noise\n(TaskRunner pid=7) {MARK}{json.dumps(row)}\nnoise\n")
    seen = Watched(100.0, [Look(100.0, 0.0, 0.0), Look(102.0, 4.0, 0.5), Look(104.0, 6.0, 0.5)])
    (step,) = read_steps(read_log(log), seen)
    assert (step.seconds, step.own, step.others) == (2.0, 3.0, 0.25)
    assert step.is_quiet(0.2) and not step.is_quiet(0.1)


def test_the_table_has_a_row_for_each_framework_failed_ones_too() -> None:
    from figures import Step, figures, table

    step = Step(2.0, {"generate": 0.5, "update": 1.5}, own=3.0, others=0.0, reward=0.1)
    good = {"figures": figures([step], 0.15, 1), "peak_pss_gib": 1.5, "processes": 3, "start_seconds": 9.0}
    lines = table({"a grpo": good, "b ppo": {"error": "exit code 1"}}).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "| a grpo | **2.00** | - | 0.50 | - | - | 1.50 | - | 3.00 | 64 | 1.5 | 3 | 9 | 1/1 |" in lines
    assert "exit code 1" in lines[3]


def test_a_watched_command_counts_its_descendants_and_leaves_none(tmp_path: Path) -> None:
    from watching import watch

    burn = "import time\nt = time.process_time()\nwhile time.process_time() - t < 2: pass\n"
    script = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {burn!r}])\n"
        "left = subprocess.Popen(['sleep', '600'])\nprint(left.pid, flush=True)\nimport time; time.sleep(0.7)\n"
        "subprocess.run(['sh', '-c', 'sleep 600 & echo $!'])\n"  # its parent ends before it can be seen
    )
    path = {"PATH": os.environ["PATH"]}
    seen = watch([sys.executable, "-c", script], path, tmp_path, tmp_path / "log", timeout=200)
    assert seen.exit_code == 0 and seen.peak_pss > 1 << 20 and seen.processes >= 2
    own, _ = seen.used(seen.began, seen.looks[-1].time)
    assert 1.0 < own < 4.0  # what a process does after the last look at it is not seen
    left = (tmp_path / "log").read_text().split()
    assert len(left) == 2
    assert [pid for pid in left if process_state(int(pid)) is not None] == []


def test_the_task_has_prompts_of_25_tokens_and_a_model_of_3_million_parameters(tmp_path: Path) -> None:
    from task import NUM_PROMPTS, PROMPT_TOKENS, make_task

    make_task(tmp_path, steps=2)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert len(rows) == 2 * NUM_PROMPTS == len({row["prompt"][0]["content"] for row in rows})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for row in rows:
        chat = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        assert len(tokenizer(chat)["input_ids"]) == PROMPT_TOKENS == 25
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.num_parameters() == pytest.approx(3.17e6, rel=0.002)


def test_arguments_that_no_framework_has_are_refused() -> None:
    result = subprocess.run(
        [sys.executable, FOLDER / "run.py", "--only", "megarl,other"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 2 and "--only megarl,other: choose of megarl, trl, verl" in result.stderr
