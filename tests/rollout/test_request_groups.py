"""Which data parallel group of an engine answers a request."""

from contextlib import ExitStack

from megarl.rollout.sglang.data_parallel import RequestGroups

A, B, C = [1, 2], [1, 3], [4]


def test_the_samples_of_a_prompt_go_to_one_group_and_prompts_where_there_are_fewest() -> None:
    groups = RequestGroups(2)
    with ExitStack() as running:
        found = [
            running.enter_context(groups.joined(uid, prompt))
            for uid, prompt in (("a/0", A), ("b/0", B), ("a/1", A), ("a/2", A), ("c/0", C))
        ]
    assert found == [0, 1, 0, 0, 1]


def test_those_that_have_ended_do_not_count() -> None:
    groups = RequestGroups(2)
    for uid, prompt in (("a/0", A), ("b/0", B)):
        with groups.joined(uid, prompt) as group:
            assert group == 0


def test_the_turns_of_a_trajectory_go_where_its_first_one_went() -> None:
    groups = RequestGroups(2)
    with groups.joined("a/0", A), groups.joined("b/0", B) as first:
        assert first == 1
    with groups.joined("b/0#1", [*B, 7, 8]) as second:
        assert second == 1


def test_empty_caches_leave_no_preference() -> None:
    groups = RequestGroups(2)
    with groups.joined("a/0", A), groups.joined("b/0", B):
        pass
    groups.forget()
    with groups.joined("b/1", B) as group:
        assert group == 0


def test_an_engine_without_groups_names_none() -> None:
    with RequestGroups(1).joined("a/0", A) as group:
        assert group is None
