"""Runs the recorded benchmarks one after the other, and writes the tables of results in docs/results.md and README.md.

    python benchmarks/record.py                         # all but chaos and peers, 20 minutes on two cores
    python benchmarks/record.py --only step dispatch    # these; chaos (2 hours) and peers (environments of 5 GB) by name alone
    python benchmarks/record.py --table                 # measures nothing: the tables of the files in benchmarks/results/

Each benchmark writes benchmarks/results/NAME.json, which has its command, machine, versions and date; every figure of both tables
is read from there, and none is written by hand. A file that is not there has no rows. The table of README.md is a selection.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facts import without_paths

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- results: benchmarks/record.py writes them -->", "<!-- end of results -->"

Rows = Iterable[tuple[str, str]]
"""Measured things and their figures."""


@dataclass(frozen=True)
class Recording:
    """A benchmark, the arguments that it is recorded with, and the rows of its report.

    Attributes:
        short: the rows in README.md; None: none.
        out: the option for the file that it writes.
        asked: it runs only where it is named.
    """

    script: str
    arguments: tuple[str, ...]
    rows: Callable[[dict[str, Any]], Rows]
    short: Callable[[dict[str, Any]], Rows] | None = None
    out: str = "--out"
    asked: bool = False


def dispatch(report: dict[str, Any]) -> Rows:
    for result in report["results"]:
        yield (
            f"controller's dispatch in a {result['kind']} step of {report['ranks']:,} simulated ranks, {result['best']['tokens'] / 1e6:.1f} M tokens, "
            "weight sync and moves of memory among it",
            f"{result['dispatch']:.1f} processor s, {result['dispatch'] / 60:.1%} of a step of 60 s",
        )


def packing(report: dict[str, Any]) -> Rows:
    for task, name in (("gsm8k", "GSM8K-like lengths"), ("reasoning", "lengths up to 16,384")):
        found = {row["way"]: row for row in report["results"] if (row["task"], row["dp"]) == (task, 64)}
        others = ", ".join(f"{way} {row['rank_cost']:.1%}" for way, row in found.items() if way != "megarl")
        yield (
            f"imbalance of 64 data parallel ranks, {name}",
            f"{found['megarl']['rank_cost']:.2%} ({others}); padding {found['megarl']['padding']:.0%}",
        )


def step(report: dict[str, Any]) -> Rows:
    one = report["results"][0]["tokens_per_second"]["median"]
    yield (
        f"training step, tokens/s by layout; {report['cores']} cores, a thread a rank",
        "; ".join(
            f"{result['layout']}: {result['tokens_per_second']['median']:,.0f} ({result['tokens_per_second']['median'] / one:.2f}x)"
            for result in report["results"]
        ),
    )


def weight_sync(report: dict[str, Any]) -> Rows:
    for result in report["results"]:
        if "megarl" not in result:  # engines with devices of their own
            way = result["megarl p2p"]
            yield (
                f"weight sync {result['case']}, {result['model_bytes'] / 1e6:.0f} MB, over gloo",
                f"{way['median_seconds']:.2f} s; a trainer rank sends {way['bytes_sent_max'] / 1e6:.0f} MB to {way['peers_max']} peers at most",
            )
            continue
        ours, gathered, adapters = result["megarl"], result["full gather"], result["adapters"]
        yield (
            f"weight sync {result['case']}, {result['model_bytes'] / 1e6:.0f} MB: seconds; most that a device receives; extra memory",
            f"{ours['median_seconds']:.2f} s, {ours['bytes_received_max'] / 1e6:.0f} MB, {ours['extra_bytes_max'] / 1e6:.0f} MB"
            f" (full gather: {gathered['median_seconds']:.2f} s, {gathered['bytes_received_max'] / 1e6:.0f} MB,"
            f" {gathered['extra_bytes_max'] / 1e6:.0f} MB); between devices over gloo {result['megarl p2p']['median_seconds']:.2f} s;"
            f" adapters alone {adapters['median_seconds']:.3f} s, {adapters['bytes_total'] / 1e6:.1f} of {ours['bytes_total'] / 1e6:.1f} MB in all",
        )


def plan_scale(report: dict[str, Any]) -> Rows:
    whole = [
        sum(result[part] for part in ("placement", "account", "slices", "buckets"))
        for result in report["results"]
    ]
    seconds, slowest = max(zip(whole, report["results"], strict=True), key=lambda pair: pair[0])
    yield (
        f"plan of DeepSeek-V3's weight sync over 512 ranks, the slowest of {len(whole)} transitions",
        f"{seconds:.1f} processor s, {slowest['peak_mib']} MiB; a rank's own share {slowest['one_sends']:.1f} s",
    )


def generation(report: dict[str, Any]) -> Rows:
    for row in report["rows"]:
        if row["batch_size"] == max(other["batch_size"] for other in report["rows"]):
            yield (
                f"generation on a CPU, batch of {row['batch_size']}, one thread: {row['by']}",
                f"{row['tokens_per_s'][0]:,.0f} tokens/s",
            )


def sampling(report: dict[str, Any]) -> Rows:
    most = max(row["requests"] for row in report["results"])
    found = {row["way"]: row for row in report["results"] if row["requests"] == most}
    ours = found.pop("megarl")

    def figure(row: dict[str, Any]) -> str:
        return f"{row['launches']} launches, {row['bytes'] / 1e9:.2f} GB, {row['memory'] / 1e6:,.1f} MB"

    others = "; ".join(f"{way}: {figure(row)}" for way, row in found.items())
    yield (
        f"sampling a decode step by seed on a GPU, {most} requests of {report['vocabulary']:,} logits, counted in a shadow: launches; "
        "bytes read and written; memory beside the logits",
        f"{figure(ours)} ({others})",
    )


def peers(report: dict[str, Any]) -> Rows:
    for label, result in report["results"].items():
        versions = report["versions_of"][label]
        label = f"{label} ({', '.join(f'{name} {version}' for name, version in versions.items())})"
        if "figures" not in result:
            yield f"common task, {label}", f"failed: {result['error'].split(',')[0]}"
            continue
        found = result["figures"]
        yield (
            f"common task, {label}: a step; start-up; memory",
            f"{found['seconds']:.2f} s ({found['processor_seconds']:.2f} processor s), {result['start_seconds']:.0f} s, {result['peak_pss_gib']:.1f} GiB",
        )


def short_peers(report: dict[str, Any]) -> Rows:
    found: dict[str, list[str]] = {}
    for label, result in report["results"].items():
        name, algorithm = label.split()
        seconds = f"{result['figures']['seconds']:.2f} s" if "figures" in result else "failed"
        found.setdefault(algorithm, []).append(f"{name} {seconds}")
    for algorithm, steps in found.items():
        yield f"a step of {algorithm} on a common task, a tiny model", ", ".join(steps)


def first(rows: Callable[[dict[str, Any]], Rows]) -> Callable[[dict[str, Any]], Rows]:
    """The first row of `rows` alone."""
    return lambda report: list(rows(report))[:1]


def both_heads(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Each case with its figures by the kernels of the head, and by torch's code."""
    by_case: dict[str, dict[str, dict[str, float]]] = {}
    for result in report["results"]:
        by_case.setdefault(result["case"], {})[result["way"]] = result
    for case, ways in by_case.items():
        yield case, ways["kernels"], ways["torch"]


def head(report: dict[str, Any]) -> Rows:
    for case, ours, before in both_heads(report):
        yield (
            f"the head on a GPU, counted in a shadow run, forward and backward: {case} (the same by torch's code)",
            f"{ours['launches']} launches ({before['launches']}), {ours['collectives']} collectives ({before['collectives']}),"
            f" {ours['moved_gb']:.0f} GB read and written ({before['moved_gb']:.0f}), {ours['tflop']:.1f} TFLOP ({before['tflop']:.1f}),"
            f" {ours['peak_gb']:.2f} GB at the peak ({before['peak_gb']:.2f})",
        )


def update(report: dict[str, Any]) -> Rows:
    for case, ours, before in both_heads(report):
        yield (
            f"a whole update of an actor's rank on a GPU, counted in a shadow run: {case} (the same with torch's code of the head)",
            f"{ours['launches']:,} launches ({before['launches']:,}), {ours['collectives']} collectives ({before['collectives']}),"
            f" {ours['tflop']:.1f} TFLOP ({before['tflop']:.1f}), {ours['peak_gb']:.2f} GB at the peak ({before['peak_gb']:.2f})",
        )


def routing_replay(report: dict[str, Any]) -> Rows:
    seeds = len({run["seed"] for run in report["runs"]})

    def ends(curve: str, scale: float, digits: int) -> str:
        """First and last third of the steps, without replay and with it: means over steps and seeds, and the range of the seeds."""
        texts = []
        for replay in (None, "rollout"):
            runs = [run["curves"][curve] for run in report["runs"] if run["replay"] == replay]
            third = report["steps"] // 3
            for part in (slice(0, third), slice(-third, None)):
                means = [scale * sum(run[part]) / len(run[part]) for run in runs]
                texts.append(
                    f"{sum(means) / len(means):.{digits}f} ({min(means):.{digits}f}-{max(means):.{digits}f})"
                )
        return f"{texts[0]} -> {texts[1]} without replay, {texts[2]} -> {texts[3]} with it"

    about = f"GRPO of a tiny mixture in bfloat16, {report['steps']} steps, {seeds} seeds, first -> last third of the steps"
    yield (
        f"{about}: k3 estimate of the KL between engine and trainer, in 1e-6 nats a token",
        ends("k3_kl", 1e6, 1),
    )
    yield f"{about}: reward", ends("reward", 1.0, 3)


def distillation(report: dict[str, Any]) -> Rows:
    for start, name in (("scratch", "from scratch"), ("sft", "after supervised fine-tuning")):
        ends = {}
        for way in ("teacher", "grpo"):
            runs = [run for run in report["runs"] if (run["start"], run["way"]) == (start, way)]
            last = [run["accuracy"][str(report["steps"])] for run in runs]
            ends[way] = f"{min(last):.1%} to {max(last):.1%}"
        yield (
            f"a tiny student of a teacher, {name}: held-out accuracy after {report['steps']} steps, {len(runs)} seeds",
            f"{ends['teacher']} (by GRPO from rewards: {ends['grpo']})",
        )


def chaos(report: dict[str, Any]) -> Rows:
    found = report["summary"]
    yield (
        f"{found['kills']} random kills and stops of a real run",
        f"{found['recovered']} recovered, at most {found['steps_lost_most']} step lost, {found['differences']} differences in"
        f" {found['runs_compared']} runs compared, orphans: {found['orphans']}, unexpected ends: {found['unexpected_ends']}",
    )


def dealing(report: dict[str, Any]) -> Rows:
    for found in report["results"]:
        before, after = found["equal_parts"], found["as_room"]
        yield (
            f"engines' idle share while {report['prompts']} x {report['samples']} responses are generated by {report['engines']} simulated "
            f"engines, {found['waves']:.0f} for each place",
            f"{after['idle']:.0%}, {after['seconds']:.0f} simulated s (prompts in equal parts: {before['idle']:.0%}, "
            f"{before['seconds']:.0f} s)",
        )


def gateway(report: dict[str, Any]) -> Rows:
    for found in report["results"]:
        yield (
            f"the gateway on one core, {found['at_once']} sessions at a time of {report['turns']} requests: sessions/s; what it adds to a request "
            "(median, 95 %)",
            f"{found['sessions_per_second']:.1f}; {found['median_ms']:.0f} ms, {found['p95_ms']:.0f} ms",
        )


LAYOUTS = ("1", "dp2", "tp2", "pp2", "cp2", "dp4", "tp2-pp2")
RECORDINGS = {
    "peers": Recording("peers/run.py", ("--steps", "10"), peers, short_peers, out="--json", asked=True),
    "step": Recording("megatron_step.py", ("--layouts", *LAYOUTS), step, step),
    "weight_sync": Recording("weight_sync.py", (), weight_sync, first(weight_sync)),
    "plan_scale": Recording("plan_scale.py", (), plan_scale, plan_scale),
    "packing": Recording("packing.py", (), packing, packing),
    "dealing": Recording("dealing.py", (), dealing),
    "dispatch": Recording("dispatch.py", ("--kinds", "GRPO", "PPO"), dispatch, first(dispatch)),
    "head": Recording("head.py", (), head),
    "update": Recording("update.py", (), update),
    "gateway": Recording("gateway.py", (), gateway),
    "generation": Recording("generation.py", (), generation),
    "sampling": Recording("sampling.py", (), sampling, sampling),
    "routing_replay": Recording("routing_replay.py", (), routing_replay),
    "distillation": Recording("distillation.py", (), distillation, asked=True),
    "chaos": Recording("chaos.py", ("--kills", "200"), chaos, chaos, out="--json", asked=True),
}


def facts_of(report: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A report's command, machine and versions, and its date."""
    if "parts" in report:  # chaos: one or several recordings in a file
        last = report["parts"][-1]
        return last["environment"], last["written"][:10]
    return report, report["date"]


def table(folder: Path) -> str:
    """The table of docs/results.md, from the files in `folder`, in Markdown."""
    lines = ["| measured | figure | command | on | raw |", "|---|---|---|---|---|"]
    for name, recording in RECORDINGS.items():
        file = folder / f"{name}.json"
        if not file.is_file():
            continue
        report = json.loads(file.read_text())
        facts, date = facts_of(report)
        versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
        on = f"{date}; {facts['cores']} cores of {_short(facts['cpu'])}, load before {facts['load_average_before']:.1f}; {versions}"
        raw = f"[{name}.json](../benchmarks/results/{name}.json)"
        for what, figure in recording.rows(report):
            lines.append(f"| {what} | {figure} | `{without_paths(facts['command'])}` | {on} | {raw} |")
    return "\n".join(lines)


def short_table(folder: Path) -> str:
    """The table of README.md."""
    lines = ["| measured | figure |", "|---|---|"]
    for name, recording in RECORDINGS.items():
        file = folder / f"{name}.json"
        if recording.short is not None and file.is_file():
            lines += [
                f"| {what} | {figure} |" for what, figure in recording.short(json.loads(file.read_text()))
            ]
    return "\n".join(lines)


def _short(cpu: str) -> str:
    return " ".join(re.sub(r"\((R|TM)\)|Processor|CPU", "", cpu).split())


def write_table(page: Path, text: str) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{page} has no lines {BEGIN} and {END}"
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RECORDINGS, help="measure these")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    usual = [name for name, recording in RECORDINGS.items() if not recording.asked]
    failed = []
    for name in [] if options.table else options.only or usual:
        recording = RECORDINGS[name]
        script = Path("benchmarks", recording.script)
        out = (recording.out, str(Path("benchmarks", "results", f"{name}.json")))
        command = [sys.executable, str(script), *recording.arguments, *out]
        print(f"\n$ python {' '.join(command[1:])}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
    write_table(PAGE, table(RESULTS))
    write_table(README, short_table(RESULTS))
    print(f"\nthe tables are in {PAGE} and {README}, the raw figures are in {RESULTS}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
