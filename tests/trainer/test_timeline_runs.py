"""Records of a real run: a timeline of all its processes, traces of the profiler, and the report on both."""

import json

import pytest

from megarl.cli.main import main
from megarl.report.timeline import RecordedTimeline, read_timeline
from megarl.trainer.run.timeline import TIMELINE
from tests.fixtures.runs import steps


@pytest.fixture(scope="module")
def recorded(ppo_run) -> RecordedTimeline:
    return read_timeline(ppo_run[1])


def spans(recorded: RecordedTimeline, role: str, name: str | None = None) -> dict[str, list]:
    """The role's spans by thread, or only those with this name."""
    return {
        track.name: [span for span in track.spans if name in (None, span.name)]
        for track in recorded.tracks
        if track.role == role
    }


def test_every_process_is_there_with_all_its_calls(recorded):
    """The run has an actor with TP2 x PP2, a critic with PP2 x DP2 and one engine, with two steps and a validation."""
    ranks = [f"rank {rank}" for rank in range(4)]
    for role, names, calls in (
        ("actor", ranks, {"start": 1, "send_weights": 3, "update_policy": 2, "begin_save": 2, "write_profile": None}),
        ("critic", ranks, {"start": 1, "compute_values": 2, "update_values": 2}),
        ("rollout", ["rank 0"], {"start": 1, "receive_weights": 3, "begin_generation": 3}),
    ):  # fmt: skip
        for name, times in calls.items():
            found = spans(recorded, role, name)
            assert list(found) == names
            expected = times if times is not None else [1, 0, 0, 0]
            counts = [len(of_rank) for of_rank in found.values()]
            assert counts == (expected if isinstance(expected, list) else [expected] * len(names)), name
    assert list(spans(recorded, "controller")) == ["loop"]
    assert [moment.name for moment in recorded.moments] == ["weights 1", "weights 2", "weights 3"]


def test_calls_are_within_the_phases_that_the_controller_was_in(recorded):
    (loop,) = spans(recorded, "controller").values()
    for phase, role, call in (
        ("update", "actor", "update_policy"), ("update", "critic", "update_values"), ("generate", "rollout", "land"),
        ("sync_send", "actor", "send_weights"), ("evaluate_models", "critic", "compute_values"),
    ):  # fmt: skip
        for found in spans(recorded, role, call).values():
            phases = [span for span in loop if span.name in (phase, "validate")]
            for span in found:
                around = [one for one in phases if one.begin <= span.begin and span.end <= one.end]
                assert around and {one.facts["step"] for one in around} == {span.facts["step"]}, (call, span)


def test_facts_are_told(ppo_run, recorded):
    metrics = steps(ppo_run[1])
    (loop,) = spans(recorded, "controller", "step").values()
    assert [span.facts for span in loop] == [
        {"step": step["step"], "tokens": step["perf/tokens"]} for step in metrics
    ]
    assert all(0.0 <= step["perf/engines_idle"] < 1.0 for step in metrics)
    seconds = [(span.end - span.begin) / 1e9 for span in loop]
    assert seconds == pytest.approx([step["timing_s/step"] for step in metrics], abs=2e-3)
    # Consecutive calls are one span, unless the machine paused between them.
    (landed,) = spans(recorded, "rollout", "land").values()
    assert {span.facts["step"] for span in landed} == {1, 2}
    assert sum(span.facts.get("calls", 1) for span in landed) >= len(landed) >= 3
    (update,) = [
        found[0] for name, found in spans(recorded, "actor", "update_policy").items() if name == "rank 3"
    ]
    assert update.facts["table_rows"] == 8 and update.facts["table_bytes"] > 8 * 4
    samples = [span.facts["samples"] for found in spans(recorded, "rewards").values() for span in found]
    assert sum(samples) == 8 + 8 + 16


def test_traces_of_chosen_ranks_have_their_calls_and_operations(ppo_run):
    """Rank 0 of each trained role has a trace of step 2; no role has a rank 9."""
    folder = ppo_run[1] / "profiles"
    assert [path.name for path in folder.iterdir()] == ["step-2"]
    files = {path.name: json.loads(path.read_text()) for path in (folder / "step-2").iterdir()}
    assert set(files) == {"actor-rank0.json", "critic-rank0.json"}
    for file, calls in (("actor-rank0.json", {"compute_both_log_probs", "update_policy", "send_weights"}), ("critic-rank0.json", {"update_values"})):  # fmt: skip
        events = files[file]["traceEvents"]
        names = {event["name"] for event in events if event.get("ph") == "X"}
        assert calls | {"aten::mm"} <= names, names
        assert any("backward" in name.lower() for name in names)


def test_the_report_of_a_real_run(ppo_run, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(ppo_run[1]), "--output", str(out)]) == 0
    text = out.read_text()
    for words in (
        "of steps 1 to 2", "actor/grad_norm is", "update_policy", "actor 3", "Device memory in step 2", "rollout_kv_cache",
        "Step 2, rank by rank", "kl_coef: 0.001",
    ):  # fmt: skip
        assert words in text, words
    assert "token ids:" not in text  # the report found the model's tokenizer
    assert json.loads((ppo_run[1] / TIMELINE).read_text())
