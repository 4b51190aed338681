"""Made-up run folders, and a parser of the pages about them."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa

from megarl.data.trajectories import append_column, expand_prompts, replace_column, write_trajectories
from megarl.trainer.run.timeline import TraceFile
from tests.trainer.trajectories import answer, prompts

SECOND = 1_000_000  # microseconds
EVIL = (
    "</pre></script><script>document.title = 'EVIL'</script><img src=x onerror=\"document.title = 'EVIL'\">"
)
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """A parsed page: whether every tag is closed, the addresses in it, its text without its scripts, and the data that its scripts draw."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.addresses, self.text, self.scripts, self.policy = [], [], [], "", [], ""
        self.feed(text)
        packed = re.search(r'id="plotly">([^<]+)<', text)
        self.plotly = gzip.decompress(base64.b64decode(packed[1])) if packed else b""
        found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
        self.data = json.loads(found[1], parse_constant=lambda name: 1 / 0) if found else {}

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data

    def chart(self, title: str) -> dict:
        (found,) = [chart for chart in self.data["charts"] if chart["title"] == title]
        return found

    def points(self, metric: str, run: int = 0) -> list[tuple]:
        return list(zip(*self.data["series"][metric][run], strict=True))


def hash_of(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def step_line(step: int, **metrics: float) -> str:
    entry = {"step": step, "time": 1.7e9 + step, "timing_s/step": 10.0, "perf/tokens": 500.0}
    return json.dumps(entry | {name.replace("__", "/"): value for name, value in metrics.items()}) + "\n"


def write_timeline(folder: Path) -> None:
    """Step 1 twice (a failure between), step 2; an actor rank that works 5 s of 10, then 2 s of 20, an engine all the time."""
    file = TraceFile(folder, 1 << 20, goes_on=False)
    for pid, role, threads in (
        (1, "controller", ["loop"]),
        (2, "rollout", ["rank 0"]),
        (5, "actor", ["rank 0"]),
    ):
        file.name([{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": role}}])
        for tid, name in enumerate(threads):
            file.name([{"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}])

    def write(name, pid, begin, seconds, **facts):
        file.write([{"name": name, "ph": "X", "pid": pid, "tid": 0, "ts": begin * SECOND, "dur": seconds * SECOND, "args": facts}])  # fmt: skip

    write("step", 1, 0, 4, step=1)
    write("rollout rank 1 (process 7) is lost: starting it anew, 1 of 3 times", 1, 5, 3)
    for step, begin, seconds in ((1, 100, 10), (2, 200, 20)):
        write("step", 1, begin, seconds, step=step)
        write("update", 1, begin + 1, 6, step=step)
        write("land", 2, begin, seconds, calls=8)
    write("start", 5, 50, 40)
    write("update_policy", 5, 101, 4)
    write("inner", 5, 102, 1)
    write("memory", 5, 106, 1)
    write("update_policy", 5, 205, 2)
    file.write([{"name": "weights 3", "ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": 210 * SECOND}])


def write_run(run: Path, *, more: float = 0.0) -> Path:
    """A PPO run of five steps with everything: validations, constants, a step that was logged twice, NaN, a line cut off, a failure.

    Args:
        more: is added to its scores, and to its learning rate.
    """
    run.mkdir(parents=True)
    lines = [
        step_line(
            step, critic__score__mean=0.25 + 0.1 * step + more, timing_s__generate=6.0, timing_s__update=3.0, timing_s__sync=0.5,
            actor__entropy=0.5 / step, actor__pg_clipfrac=0.01 * step, actor__kl_coef=0.001, actor__lr=1e-4 + more, response_length__clip_ratio=0.0,
            sync__bytes_total=3 << 20, sync__bytes_local=2 << 20, sync__bytes_intra_node=1 << 20, perf__tokens_per_s=50.0 * step,
            memory__update__actor_weights=5 << 20, memory__update__total=7 << 20,
        )
        for step in range(1, 6)
    ]  # fmt: skip
    first = json.loads(lines[0]) | {"val/score/mean": 0.125, "actor/entropy": "nan"}
    last = json.loads(lines[4]) | {"val/score/mean": 0.8671875 + more}
    stale = step_line(3, critic__score__mean=0.0)
    lines = [
        json.dumps(first) + "\n",
        lines[1],
        stale,
        *lines[2:4],
        json.dumps(last) + "\n",
        '{"step": 6, "ti',
    ]
    (run / "metrics.jsonl").write_text("".join(lines))
    config = {"trainer": {"total_training_steps": 5, "default_local_dir": str(run)},
              "actor_rollout_ref": {"model": {"path": f"{run}/none"}, "actor": {"optim": {"lr": 1e-4 + more}}},
              "data": {"train_files": EVIL}}  # fmt: skip
    (run / "config.yaml").write_text(json.dumps(config))
    finding = {"step": 2, "message": f"entropy is low {EVIL}", "advice": "Do: this"}
    (run / "health.jsonl").write_text(json.dumps(finding) + '\n{"ste')
    (run / "failures").mkdir()
    head = "time: 2026-11-22 10:30:00 UTC\nstep: 1\nphase: step / update\nrole: actor\nrank: 1\n\n"
    (run / "failures" / "20261122-103000.txt").write_text(
        head + f"{'=' * 9}\nthe error\n{'=' * 9}\nactor rank 1 died\n"
    )
    table = answer(expand_prompts(prompts("a", "b"), 2), lengths=[3, 4, 5, 6])
    table = append_column(table, "score", np.array([0.0, 0.5, 2.5, 1.0]))
    for step in (1, 5):
        named = replace_column(table, "ground_truth", pa.array([f"{EVIL} {step}"] * 4))
        write_trajectories(named, run / "rollouts" / f"step-{step:06d}.parquet")
    write_timeline(run)
    return run
