"""The Scorer with real worker processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ray import cloudpickle

from megarl.rewards.processes import scorer as scorer_module
from megarl.rewards.processes.scorer import Scorer
from megarl.rewards.registry import RewardSpec
from megarl.rewards.sample import Sample, Score
from tests.rewards.processes.found import is_running
from tests.waiting import wait_for

REWARD = """
import asyncio, ctypes, os, subprocess, sys, time

def hang():
    while True:
        time.sleep(1)

def fail():
    return {}["missing"]

def wait(file):
    while not os.path.exists(file):
        time.sleep(0.01)
    return 1

def compute_score(data_source, solution_str, ground_truth, extra_info):
    actions = {
        "hang": hang,
        "raise": fail,
        "segfault": lambda: ctypes.string_at(0),
        "exit": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit(4),
        "text": lambda: "high",
        "pid": os.getpid,
        "sleep": lambda: time.sleep(0.3) or 1,
        "wait": lambda: wait(extra_info["go"]),
        "no GIL given back": lambda: ctypes.PyDLL(None).sleep(100),
        "child": lambda: [subprocess.Popen(["sleep", "100"]), os._exit(0)],
    }
    if "begun" in (extra_info or {}):
        open(extra_info["begun"], "w").close()
    if solution_str in actions:
        return actions[solution_str]()
    return {"score": float(solution_str) + float(ground_truth), "extra": extra_info["index"], "pred": data_source}

running, most = 0, 0

async def later(data_source, solution_str, ground_truth, extra_info, prompt_str, seconds=0.2):
    global running, most
    running += 1
    most = max(most, running)
    try:
        if solution_str == "hang":
            await asyncio.sleep(100)
        if solution_str == "segfault":
            await asyncio.sleep(0.1)
            ctypes.string_at(0)
        if solution_str == "block":
            time.sleep(100)
        await asyncio.sleep(seconds)
        return {"score": len(prompt_str), "most": most}
    finally:
        running -= 1
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "my_reward.py"
    path.write_text(REWARD)
    return str(path)


@pytest.fixture(scope="module")
def plain(file):
    with Scorer(RewardSpec(custom_path=file), num_workers=2, timeout=1.0) as scorer:
        yield scorer


def samples(*responses):
    return [
        Sample(f"p{number}/0", "mine", "a prompt", response, "0.5", f'{{"index": {number}}}')
        for number, response in enumerate(responses)
    ]


def scored(scorer, *responses) -> list[Score]:
    scorer.submit(samples(*responses))
    scores = scorer.collect()
    assert list(scores) == [score.uid for score in scores.values()]
    return [scores[f"p{number}/0"] for number in range(len(responses))]


LARGE = "0" * (1 << 20)  # more than a socket buffers while no process reads


def scored_in_time(scorer, *responses) -> list[Score]:
    """As `scored`; if the scorer waits for a worker for ever, the test fails, and the worker is killed so that the scorer ends."""
    results = []
    process = scorer._workers[0]._process
    thread = threading.Thread(target=lambda: results.extend(scored(scorer, *responses)), daemon=True)
    thread.start()
    try:
        return wait_for(lambda: results, 40)
    finally:
        if not results:
            process.kill()


def test_scores_come_by_uid_with_numbers_and_notes(plain):
    first, second = scored(plain, "1", "2")
    assert (first.score, first.numbers, first.notes) == (1.5, {"extra": 0.0}, {"pred": "mine"})
    assert (second.score, second.numbers, second.error) == (2.5, {"extra": 1.0}, None)
    assert 0 < second.seconds < 1


def test_collect_forgets_what_it_gave(plain):
    assert [score.score for score in scored(plain, "1")] == [1.5]
    assert plain.collect() == {}
    assert [score.score for score in scored(plain, "3")] == [3.5]


def test_a_failure_elsewhere_ends_the_wait(plain, monkeypatch):
    """Open samples stay open, and can still be collected."""
    monkeypatch.setattr(scorer_module, "_MEANWHILE_SECONDS", 0.1)
    calls = []

    def meanwhile():
        calls.append(time.perf_counter())
        if len(calls) == 2:
            raise LookupError("a rank died")

    plain.submit(samples("hang"))
    with pytest.raises(LookupError, match="a rank died"):
        plain.collect(meanwhile)
    assert len(calls) == 2
    (score,) = plain.collect().values()
    assert score.score is None


@pytest.mark.parametrize(("kind", "sleep", "num_workers"), [
    ("def", "time.sleep", 3), ("async def", "await asyncio.sleep", 1),
])  # fmt: skip
def test_the_score_of_a_sample_that_was_given_up_is_not_that_of_one_with_its_uid(
    tmp_path, kind, sleep, num_workers
):
    """Neither in another process nor in the same one; other samples stay open."""
    reward = tmp_path / "waits.py"
    reward.write_text(
        "import asyncio, pathlib, time\n"
        f"{kind} compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    pathlib.Path(solution_str + '.begun').touch()\n"
        f"    while not pathlib.Path(solution_str).exists():\n        {sleep}(0.01)\n"
        "    return float(ground_truth)\n"
    )
    old, new, other = (str(tmp_path / name) for name in ("old", "new", "other"))

    def begin(uid, path, truth):
        scorer.submit([Sample(uid, "mine", "", path, truth, None)])
        wait_for(Path(f"{path}.begun").exists)

    with Scorer(RewardSpec(custom_path=str(reward)), num_workers=num_workers, timeout=60.0) as scorer:
        begin("b", other, "3")
        begin("a", old, "1")
        scorer.give_up(["a", "unknown"])
        begin("a", new, "2")
        Path(old).touch()
        assert scorer.collect(Path(new).touch, ["a"])["a"].score == 2.0
        Path(other).touch()
        assert {uid: score.score for uid, score in scorer.collect().items()} == {"b": 3.0}


def test_what_is_given_up_before_it_began_is_not_scored(file, tmp_path):
    begun = tmp_path / "begun"
    with Scorer(RewardSpec(custom_path=file), num_workers=1, timeout=60.0) as scorer:
        scorer.submit(
            [
                Sample("a", "mine", "", "sleep", "", None),
                Sample("b", "mine", "", "sleep", "", json.dumps({"begun": str(begun)})),
            ]
        )
        scorer.give_up()
        assert scorer.collect() == {}
        assert scored(scorer, "1")[0].score == 1.5
    assert not begun.exists()


def test_many_samples_in_several_parts(plain):
    for part in range(5):
        plain.submit(
            [Sample(f"{part}/{i}", "mine", "", str(i), str(part), '{"index": 0}') for i in range(40)]
        )
    assert {uid: score.score for uid, score in plain.collect().items()} == {
        f"{part}/{i}": part + i for part in range(5) for i in range(40)
    }


def test_submitting_does_not_wait(plain, tmp_path):
    """The rewards wait for a file that is made afterwards."""
    go = tmp_path / "go"
    told = json.dumps({"go": str(go)})
    plain.submit([Sample(f"p{number}/0", "mine", "", "wait", "", told) for number in range(2)])
    assert plain.awaits(["p0/0"], 0.0) and not plain.awaits(["unknown"], 0.0)
    go.touch()
    assert not plain.awaits(["p0/0"], 60.0)
    assert [score.score for score in plain.collect().values()] == [1.0, 1.0]


def test_whatever_goes_wrong_costs_its_own_sample(plain, monkeypatch):
    monkeypatch.setattr(scorer_module, "_GRACE_SECONDS", 100.0)  # each worker ends by itself
    kinds = ["1", "hang", "raise", "2", "segfault", "exit", "3", "sys.exit", "text", "no GIL given back", "4"]
    begun = time.perf_counter()
    result = dict(zip(kinds, scored(plain, *kinds), strict=True))
    assert time.perf_counter() - begun < 60
    assert [result[kind].score for kind in "1234"] == [1.5, 2.5, 3.5, 4.5]
    failed = {kind: score for kind, score in result.items() if len(kind) > 1}
    assert {score.score for score in failed.values()} == {None}
    assert failed["hang"].error.startswith("no result within 1 s; it was at\n")
    assert "my_reward.py" in failed["hang"].error and "in hang" in failed["hang"].error
    assert 0.1 < failed["hang"].seconds < 30
    assert failed["raise"].error.startswith("KeyError: 'missing'\n")
    assert 'return {}["missing"]' in failed["raise"].error
    assert "worker.py" not in failed["raise"].error
    assert failed["segfault"].error.startswith("its process was killed by SIGSEGV\n")
    assert failed["exit"].error == "its process ended with exit code 3"
    assert failed["sys.exit"].error.startswith("SystemExit: 4")
    assert failed["text"].error.startswith("ValueError: the reward is 'high' (str), not a number")
    assert failed["no GIL given back"].error.startswith("no result within 1 s")


def test_a_worker_is_used_again_and_replaced_when_it_dies(file):
    with Scorer(RewardSpec(custom_path=file), num_workers=1, timeout=60.0) as scorer:
        (before,) = {score.score for _ in range(2) for score in scored(scorer, *["pid"] * 4)}
        assert scored(scorer, "exit")[0].error == "its process ended with exit code 3"
        (after,) = {score.score for score in scored(scorer, *["pid"] * 4)}
    assert None not in (before, after)
    assert before != after


def test_there_are_no_more_workers_than_asked_for(plain):
    assert len({score.score for score in scored(plain, *["pid"] * 8)}) <= 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_hit_from_outside_costs_nothing(file, tmp_path, monkeypatch, number):
    """Its sample is run once more; a sample whose processes are all killed is the cause of their deaths."""
    monkeypatch.setattr(scorer_module, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(scorer_module, "_STOPPED_SECONDS", 0.5)
    reward = tmp_path / "hit.py"
    reward.write_text(
        "import os, pathlib\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    path = pathlib.Path({str(tmp_path)!r}, 'tries')\n"
        "    tries = path.read_text() if path.exists() else ''\n"
        "    path.write_text(tries + 'x')\n"
        f"    if len(tries) < int(solution_str):\n        os.kill(os.getpid(), {int(number)})\n"
        "    return len(tries)\n"
    )
    with Scorer(RewardSpec(custom_path=str(reward)), num_workers=1, timeout=60.0) as scorer:
        (score,) = scored(scorer, "1")
        assert (score.score, score.error) == (1.0, None)
        (score,) = scored(scorer, "4")
    assert score.score is None
    assert score.error.startswith(f"its process was {'killed' if number == signal.SIGKILL else 'stopped'}")
    assert (tmp_path / "tries").read_text() == "x" * 4


@pytest.mark.parametrize("function", ["compute_score", "later"])
def test_a_stopped_worker_that_does_not_read_its_sample_costs_nothing(file, monkeypatch, function):
    """The sample cannot be sent while the worker does not read."""
    monkeypatch.setattr(scorer_module, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(scorer_module, "_STOPPED_SECONDS", 0.5)
    spec = RewardSpec(custom_path=file, custom_name=function)
    with Scorer(spec, num_workers=1, timeout=60.0) as scorer:
        scored(scorer, "1")
        (worker,) = scorer._workers
        first = worker._process
        os.kill(first.pid, signal.SIGSTOP)
        (score,) = scored_in_time(scorer, LARGE + "7")
        assert worker._process is not first
    assert (score.score, score.error) == (7.5 if function == "compute_score" else 8.0, None)


def test_a_worker_that_stops_in_the_middle_of_an_answer_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_module, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(scorer_module, "_STOPPED_SECONDS", 0.5)
    reward, stopped = tmp_path / "stops.py", tmp_path / "stopped"
    reward.write_text(
        "import os, pathlib, signal\nfrom multiprocessing.connection import Connection\n"
        f"stopped, send = pathlib.Path({str(stopped)!r}), Connection._send\n"
        "def stop(connection, answer):\n"
        "    if len(answer) > 3_000_000 and not stopped.exists():\n"
        "        send(connection, answer[:20])\n        stopped.touch()\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    send(connection, answer)\n"
        "Connection._send = stop\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 2.0, 'notes': 'x' * int(solution_str)}\n"
    )
    with Scorer(RewardSpec(custom_path=str(reward)), num_workers=1, timeout=60.0) as scorer:
        scored(scorer, "1")
        (score,) = scored_in_time(scorer, "3000000")
    assert stopped.exists() and (score.score, score.error) == (2.0, None)
    assert score.notes == {"notes": "x" * 3_000_000}


def test_the_time_limit_holds_for_a_worker_that_does_not_read(tmp_path, monkeypatch):
    """The worker's loop hangs in one sample while other samples, which run at the same time, are sent to it."""
    monkeypatch.setattr(scorer_module, "_GRACE_SECONDS", 0.5)
    reward = tmp_path / "deaf.py"
    reward.write_text(
        "import faulthandler, time\nasync def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    faulthandler.cancel_dump_traceback_later()\n    time.sleep(1000 * (solution_str == 'hang'))\n    return 1\n"
    )
    with Scorer(RewardSpec(custom_path=str(reward)), num_workers=1, timeout=1.0) as scorer:
        scored(scorer, "1")
        result = scored_in_time(scorer, "hang", *[LARGE] * 3)
    assert [score.score for score in result] == [None, 1.0, 1.0, 1.0]


def test_what_a_dead_worker_left_behind_is_killed(plain, monkeypatch):
    """A child holds the worker's files open; the worker's death is noticed all the same."""
    for name in ("_GRACE_SECONDS", "_LOOK_SECONDS"):  # it is noticed at once, not at the next look
        monkeypatch.setattr(scorer_module, name, 100.0)
    begun = time.perf_counter()
    (score,) = scored(plain, "child")
    assert score.error == "its process ended with exit code 0"
    assert time.perf_counter() - begun < 60


def test_async_functions_run_together_up_to_a_limit(file):
    spec = RewardSpec(custom_path=file, custom_name="later", custom_kwargs={"seconds": 0.25})
    with Scorer(spec, num_workers=1, timeout=5.0, max_concurrency=8) as scorer:
        scored(scorer, "warm")
        begun = time.perf_counter()
        result = scored(scorer, *["x"] * 32)
        seconds = time.perf_counter() - begun
    assert {score.score for score in result} == {8.0}  # the length of the prompt
    assert max(score.numbers["most"] for score in result) == 8
    assert 4 * 0.25 <= seconds < 32 * 0.25


def test_among_async_functions_only_the_guilty_one_fails(file):
    spec = RewardSpec(custom_path=file, custom_name="later")
    with Scorer(spec, num_workers=1, timeout=1.0) as scorer:
        result = scored(scorer, "a", "hang", "segfault", "b", "block", "c")
    assert [score.score for score in result] == [8.0, None, None, 8.0, None, 8.0]
    assert result[1].error == "no result within 1 s"
    assert result[2].error.startswith("its process was killed by SIGSEGV")
    assert result[4].error.startswith("no result within 1 s; it was at\n")
    assert "in later" in result[4].error


def test_rules_are_chosen_by_data_source():
    with Scorer(RewardSpec(), num_workers=1, timeout=30.0) as scorer:
        with pytest.raises(ValueError, match="data_source 'mine', 'yours'"):
            scorer.check([("a", "openai/gsm8k", "7"), ("b", "yours", "7"), ("c", "mine", "7")])
        scorer.submit(
            [
                Sample("a", "openai/gsm8k", "", "#### 7", "7", None),
                Sample("b", "math_dapo", "", "Answer: 7", "8", None),
                Sample("c", "cais/mmlu", "", "Answer: B", "seven", None),
                Sample("d", "mine", "", "1", "", None),
            ]
        )
        scores = scorer.collect()
        assert scorer.collect() == {}
    assert [scores[uid].score for uid in "abcd"] == [1.0, -1.0, None, None]
    assert "must be a letter" in scores["c"].error
    assert "no reward rule for data_source 'mine'" in scores["d"].error
    assert scores["a"].notes == {"pred": "7"}


def test_a_function_that_stands_in_no_file():
    bonus = 10

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return len(solution_str) + bonus

    with Scorer(RewardSpec(function=cloudpickle.dumps(compute_score)), num_workers=1, timeout=30.0) as scorer:
        assert [score.score for score in scored(scorer, "four")] == [14.0]


def test_a_file_that_only_workers_cannot_import_ends_the_run(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError('no model here')\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1\n"
    )
    with Scorer(RewardSpec(custom_path=str(path)), num_workers=1, timeout=5.0) as scorer:
        scorer.submit(samples("1"))
        with pytest.raises(
            RuntimeError, match=r"(?s)rewards cannot be computed: .*importing it failed.*no model here"
        ):
            scorer.collect()


def test_workers_that_die_while_they_begin_end_the_run(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(5)\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1\n"
    )
    with Scorer(RewardSpec(custom_path=str(path)), num_workers=1, timeout=5.0) as scorer:
        scorer.submit(samples("1"))
        with pytest.raises(RuntimeError, match=r"3 reward workers ended while they began: .*exit code 5"):
            scorer.collect()


def test_closing_ends_workers_that_hang(file):
    scorer = Scorer(RewardSpec(custom_path=file), num_workers=1, timeout=100.0)
    (pid,) = [int(score.score) for score in scored(scorer, "pid")]
    scorer.submit(samples("hang"))
    begun = time.perf_counter()
    scorer.close()
    assert time.perf_counter() - begun < 60
    assert not is_running(pid)
    assert not scorer._thread.is_alive()


def test_workers_die_with_the_controller(file, tmp_path):
    """Also while they are in C code that never returns."""
    begun = tmp_path / "begun"
    code = (
        "import sys, time\n"
        "from megarl.rewards.registry import RewardSpec\n"
        "from megarl.rewards.sample import Sample\n"
        "from megarl.rewards.processes.scorer import Scorer\n"
        f"scorer = Scorer(RewardSpec(custom_path={file!r}), num_workers=1, timeout=100.0)\n"
        "scorer.submit([Sample('a', 'mine', '', 'pid', '', None)])\n"
        "print(int(scorer.collect()['a'].score), flush=True)\n"
        f"scorer.submit([Sample('a', 'mine', '', 'no GIL given back', '', {json.dumps({'begun': str(begun)})!r})])\n"
        "scorer.collect()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as controller:
        pid = int(controller.stdout.readline())
        wait_for(begun.exists)
        assert is_running(pid)
        controller.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_running(pid))
