"""Which groups a step takes, how many prompts are in flight, and how a checkpoint stores them; no process is started."""

import random

import numpy as np
import pyarrow as pa
import pytest

from megarl.config import FilterGroupsConfig
from megarl.data.sessions import players, requested, trajectory_uid
from megarl.data.trajectories import replace_column
from megarl.trainer.schedule.in_flight import InFlight, load_in_flight, save_in_flight
from megarl.trainer.stages.scoring import Scored, concat_scored, join_scores
from tests.trainer.trajectories import answer, prompts, score

PLAIN, FILTER = FilterGroupsConfig(), FilterGroupsConfig(enable=True)


def made(num_prompts=4, num_answers=2, max_staleness=2, last_step=50, options=PLAIN) -> InFlight:
    return InFlight(options, num_prompts, num_answers, max_staleness, last_step)


def drawn(state: InFlight, count: int) -> pa.Table:
    return prompts(*(f"q{number}" for number in range(state.drawn, state.drawn + count)))


def trajectories(asked, n: int, rows=None) -> pa.Table:
    (requests,) = asked.requests(n, greedy=False)
    return answer(requests if rows is None else requests.take(rows))


def scores_of(groups, values=lambda name: [1.0, 0.0]) -> Scored:
    parts = []
    for one in groups:
        table = one.table()
        found = {
            uid: score(uid, value, pred=one.name, length=2.0)
            for uid, value in zip(table["uid"].to_pylist(), values(one.name), strict=True)
        }
        parts.append(join_scores(table, found))
    return concat_scored(parts)


def finish(state: InFlight, asked) -> None:
    state.receive(trajectories(asked, state.num_answers))


def keep(state: InFlight, values=lambda name: [1.0, 0.0]) -> None:
    groups = state.finished()
    state.keep(groups, scores_of(groups, values))


def test_a_session_is_one_answer_however_many_trajectories_it_has() -> None:
    state = made(num_prompts=1)
    state.ask(prompts("q"), 0)
    (asked,) = state.prompts.values()
    (requests,) = asked.requests(2, greedy=False)
    names = requests["uid"].to_pylist()
    rows = [0, 0, 1]  # two paths of the first session and one of the second
    table = answer(requested(requests, rows, [f"{names[0]}.0", f"{names[0]}.1", f"{names[1]}.0"]))
    kept = state.receive(table.slice(0, 2))
    assert kept.num_rows == 2 and not state.finished()
    state.receive(table.slice(2))
    assert state.finished() == [asked] and asked.table()["uid"].to_pylist() == table["uid"].to_pylist()
    state.keep([asked], join_scores(asked.table(), {}))
    groups, _ = state.take(0)
    assert groups.batch().num_rows == 3 and groups.prompt_scores() == (["q", "q"], pytest.approx([0, 0]))


def test_a_group_of_players_survives_a_checkpoint_and_is_dropped_if_none_of_them_differs(tmp_path) -> None:
    """In the second game of prompt r, white sends no request."""
    state = made(num_prompts=1, options=FILTER)
    state.ask(prompts("q", "r"), 0)
    games = {"q": ("bw", "bw", [1, -1, 1, -1]), "r": ("bw", "b", [1, -1, 0.5])}
    for asked in [*state.prompts.values()]:
        (requests,) = asked.requests(2, greedy=False)
        first, second, values = games[asked.name]
        sides = [
            (row, number, side) for row, own in enumerate((first, second)) for number, side in enumerate(own)
        ]
        names = requests["uid"].to_pylist()
        uids = [trajectory_uid(names[row], number, side) for row, number, side in sides]
        state.receive(answer(requested(requests, [row for row, *_ in sides], uids)))
        found = {uid: score(uid, float(value)) for uid, value in zip(uids, values, strict=True)}
        state.keep([asked], join_scores(asked.table(), found))
    assert [group.name for group in state.dropped] == ["q"] and [group.name for group in state.ready] == ["r"]
    save_in_flight(state, None, tmp_path)
    again = made(num_prompts=1, options=FILTER)
    load_in_flight(again, tmp_path)
    groups, metrics = again.take(0)
    assert players(groups.batch()).tolist() == ["b", "w", "b"]
    assert (metrics["reward/b/mean"], metrics["reward/w/mean"]) == (0.75, -1.0)
    assert metrics["filter_groups/score_before"] == pytest.approx(0.5 / 7)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_nothing_is_staler_lost_or_twice_there_whatever_comes_first(max_staleness: int) -> None:
    """A run of 30 steps in which some prompts take very long, some have equal scores for all responses, and time passes at random."""
    chance = random.Random(max_staleness)
    state, trained, last = made(max_staleness=max_staleness, options=FILTER), [], 30
    patience = {}

    def ask(step: int, taken: bool) -> None:
        count = state.room(step, taken)
        if count:
            state.ask(drawn(state, count), version=step)
        for uid in state.prompts:
            patience.setdefault(uid, chance.choice([1, 1, 2, 3, 9, 40]))

    def tick() -> None:
        for asked in list(state.prompts.values()):
            patience[asked.uid] -= 1
            if patience[asked.uid] <= 0 and len(asked.answers) < 2:
                finish(state, asked)

    def values(name: str) -> list[float]:
        return [1.0, 1.0] if int(name[1:]) % 5 == 0 else [1.0, 0.0]

    for step in range(1, last + 1):
        state.drop_late(step)
        while not state.is_enough(step):
            ask(step, False)
            assert len(state.prompts) + len(state.ready) <= 4 * (max_staleness + 1)
            tick()
            if state.due(step):
                keep(state, values)
        groups, metrics = state.take(step)
        uids = list(dict.fromkeys(groups.batch()["prompt_uid"].to_pylist()))
        assert len(uids) == 4 and groups.complete and metrics["staleness/too_late"] == 0.0
        for uid in uids:
            assert step - max_staleness <= int(uid.partition("@")[2]) <= step
        trained += [uid.partition("@")[0] for uid in uids]
        for _ in range(chance.randrange(4)):  # while the models learn
            ask(step, True)
            assert len(state.prompts) + len(state.ready) <= 4 * max_staleness
            tick()
            if state.due(step + 1):
                keep(state, values)
    assert len(trained) == len(set(trained)) == 4 * last
    teaching = {f"q{number}" for number in range(state.drawn) if number % 5}
    assert set(trained) <= teaching
    left = {one.name for one in state.prompts.values()} | {group.name for group in state.ready}
    assert teaching == set(trained) | (left & teaching)


def test_a_prompt_that_comes_again_while_the_models_learn_gets_other_responses() -> None:
    """The noise of a response depends on the version and the uid."""
    state = made(num_prompts=1, options=FILTER)
    state.ask(prompts("q", "r"), 1)
    for asked in [*state.prompts.values()]:
        finish(state, asked)
    keep(state, lambda name: [1.0, 0.0] if name == "q" else [1.0, 1.0])
    groups, _ = state.take(1)
    assert groups.batch()["prompt_uid"].to_pylist() == ["q@1"] * 2
    state.ask(prompts("r", "q"), 1)
    assert [*state.prompts] == ["r@1~2", "q@1~2"]


def test_a_step_waits_for_those_whose_time_it_is() -> None:
    state = made(num_prompts=2, max_staleness=1)
    state.ask(drawn(state, state.room(1, False)), version=1)
    slow, *others = state.prompts.values()
    assert len(others) == 3
    for one in others:
        finish(state, one)
    keep(state)
    assert state.is_enough(1)
    first = state.take(1)[0].batch()["prompt_uid"].to_pylist()
    assert set(first) == {"q1@1", "q2@1"}
    state.ask(drawn(state, state.room(2, False)), version=2)
    for one in list(state.prompts.values()):
        if one is not slow:
            finish(state, one)
    assert not state.due(2) and not state.is_enough(2)  # three are finished and two needed, but one is due
    finish(state, slow)
    assert state.due(2)
    keep(state)
    groups, metrics = state.take(2)
    assert set(groups.batch()["prompt_uid"].to_pylist()) == {"q0@1", "q3@1"}
    assert metrics["staleness/waiting"] == 2.0


def test_what_came_too_late_after_a_step_that_was_left_out_is_counted() -> None:
    state = made(num_prompts=2, max_staleness=1)
    state.ask(drawn(state, 4), version=1)
    slow, *others = state.prompts.values()
    for one in others:
        finish(state, one)
    keep(state)
    state.receive(trajectories(slow, 1))
    # The other groups are scored already; a score of the slow one was requested, and no step will collect it.
    assert state.drop_late(3) == [f"{slow.uid}/0"]
    assert state.ready == [] and not state.prompts
    assert state.receive(trajectories(slow, 2)).num_rows == 0  # the prompt was given up
    state.ask(drawn(state, state.room(3, False)), version=3)
    for one in list(state.prompts.values()):
        finish(state, one)
    keep(state)
    assert state.take(3)[1]["staleness/too_late"] == 4.0 and state.too_late == 0


def test_no_more_is_asked_than_the_run_can_use() -> None:
    state = made(num_prompts=4, max_staleness=2, last_step=10)
    assert [state.room(step, False) for step in (1, 8, 9, 10)] == [12, 12, 8, 4]
    assert [state.room(step, True) for step in (1, 8, 9, 10)] == [8, 8, 4, 0]


def test_a_prompt_that_comes_again_has_a_uid_of_its_own() -> None:
    state = made(num_prompts=4)
    state.ask(prompts("a", "b", "a"), version=3)
    state.ask(prompts("a"), version=3)
    state.ask(prompts("a"), version=4)
    assert list(state.prompts) == ["a@3", "b@3", "a@3~2", "a@3~3", "a@4"]
    assert [one.name for one in state.prompts.values()] == ["a", "b", "a", "a", "a"]
    (requests,) = state.prompts["a@3~2"].requests(2, greedy=False)
    assert requests["uid"].to_pylist() == ["a@3~2/0", "a@3~2/1"]


def test_a_prompt_that_was_given_up_and_comes_again_is_answered() -> None:
    """Late answers to the given-up requests are still discarded."""
    state = made(num_prompts=1)
    state.ask(prompts("a"), version=3)
    (old,) = state.prompts.values()
    state.give_up([old])
    state.ask(prompts("a"), version=3)
    (new,) = state.prompts.values()
    assert state.receive(trajectories(old, 2)).num_rows == 0 and not state.finished()
    finish(state, new)
    assert state.finished() == [new] and new.uid == "a@3~2"


def test_trajectories_are_in_the_order_of_their_requests_whatever_came_first() -> None:
    state = made(num_answers=13)
    state.ask(prompts("a"), version=1)
    (asked,) = state.prompts.values()
    samples, greedy = asked.requests(12, greedy=True)
    state.receive(answer(greedy))
    for row in reversed(range(12)):
        state.receive(answer(samples.slice(row, 1)))
    assert asked.table()["uid"].to_pylist() == [*(f"a@1/{k}" for k in range(12)), "a@1/greedy"]
    with pytest.raises(AssertionError, match="came twice"):
        state.receive(answer(greedy))


def test_a_sampler_hears_of_what_was_left_out_by_the_datas_names() -> None:
    state = made(num_prompts=1, options=FILTER)
    state.ask(prompts("dull", "good"), version=1)
    for one in list(state.prompts.values()):
        finish(state, one)
    keep(state, lambda name: [0.5, 0.5] if name == "dull" else [1.0, 0.0])
    groups, metrics = state.take(1)
    uids, scores = groups.prompt_scores()
    assert sorted(zip(uids, scores.tolist(), strict=True)) == [
        ("dull", 0.5), ("dull", 0.5), ("good", 0.0), ("good", 1.0),
    ]  # fmt: skip
    assert groups.batch()["prompt_uid"].to_pylist() == ["good@1", "good@1"]
    assert metrics["filter_groups/dropped"] == 1.0 and metrics["filter_groups/score_before"] == 0.5


def test_groups_that_teach_nothing_are_not_replaced_without_end() -> None:
    """As in the other modes: after max_num_gen_batches generations of gen_batch_size prompts the run ends, with advice."""

    def dull(limit: int, gen_batch_size: int | None, batches: int) -> InFlight:
        options = FilterGroupsConfig(enable=True, max_num_gen_batches=limit)
        state = made(num_prompts=2, max_staleness=1, options=options)
        state.gen_batch_size = gen_batch_size
        for _ in range(batches):
            state.ask(drawn(state, 2), version=1)
            for one in list(state.prompts.values()):
                finish(state, one)
            keep(state, lambda name: [1.0, 0.0] if name == "q0" else [0.5, 0.5])
        return state

    assert len(dull(3, None, batches=2).dropped) == 3
    with pytest.raises(ValueError, match=r"3 generations \(max_num_gen_batches\) gave 1 of the 2 prompts"):
        dull(3, None, batches=3)
    with pytest.raises(ValueError, match="1 generations"):
        dull(1, 4, batches=2)
    assert len(dull(0, None, batches=20).dropped) == 39
    # A step that has its groups is made, however many were left out for it.
    state = dull(3, 4, batches=5)
    state.ask(drawn(state, 1), version=1)
    for one in list(state.prompts.values()):
        finish(state, one)
    keep(state)
    groups, metrics = state.take(1)
    assert groups.complete and metrics["filter_groups/dropped"] == 9.0


def test_a_checkpoint_has_all_of_it(tmp_path) -> None:
    state = made(num_prompts=2, options=FILTER)
    state.ask(drawn(state, 6), version=7)
    whole = list(state.prompts.values())
    for one in whole[:4]:
        finish(state, one)
    state.receive(trajectories(whole[4], 2, rows=[1]))  # one of the two answers
    failed = scores_of(
        state.finished(), lambda name: [1.0, None] if name == "q1" else [0.5, 0.5 * int(name[1:])]
    )
    state.keep(state.finished(), failed)
    assert len(state.ready) == 3 and len(state.dropped) == 1
    state.too_late = 3
    folder, again = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    again.mkdir()
    rest = prompts("x", "y")
    save_in_flight(state, rest, folder)
    other = made(num_prompts=2, options=FILTER)
    assert load_in_flight(other, folder).equals(rest)
    assert (other.drawn, other.too_late) == (6, 3)
    assert list(other.prompts) == ["q4@7", "q5@7"] and all(not one.answers for one in other.prompts.values())
    for uid, one in other.prompts.items():
        mine = state.prompts[uid]
        assert (one.name, one.number, one.version) == (mine.name, mine.number, mine.version)
        assert one.prompt.equals(mine.prompt)
    for mine, its in zip([*state.ready, *state.dropped], [*other.ready, *other.dropped], strict=True):
        assert (mine.uid, mine.name, mine.number, mine.version) == (
            its.uid,
            its.name,
            its.number,
            its.version,
        )
        assert mine.scored.table["uid"].equals(its.scored.table["uid"])  # files' bytes cover other columns
        assert mine.scored.preds == its.scored.preds and mine.scored.errors == its.scored.errors
        for name, values in mine.scored.numbers.items():
            np.testing.assert_array_equal(values, its.scored.numbers[name])
    save_in_flight(other, rest, again)
    for file in folder.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_a_checkpoint_of_nothing(tmp_path) -> None:
    save_in_flight(made(), None, tmp_path)
    other = made()
    assert load_in_flight(other, tmp_path) is None and not other.prompts and not other.ready


def test_versions_are_those_of_trajectories() -> None:
    """`weight_version` may be newer than the version at which a prompt was requested: the request may have waited for an engine."""
    state = made(num_prompts=1, num_answers=1)
    state.ask(prompts("a"), version=3)
    (asked,) = state.prompts.values()
    table = trajectories(asked, 1)
    state.receive(replace_column(table, "weight_version", pa.array([5], pa.int64())))
    state.keep(state.finished(), scores_of([asked], lambda name: [1.0]))
    assert state.take(5)[0].batch()["weight_version"].to_pylist() == [5]
