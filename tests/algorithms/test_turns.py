"""GiGPO against the paper's formulas: worked by hand, and computed turn by turn in plain Python."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import AdvantageBatch, AdvantageOptions, compute_advantages
from megarl.algorithms.turns import Turns, shared_states
from tests.algorithms.ragged_examples import brief, offsets_of


def hand() -> AdvantageBatch:
    """Two trajectories of a prompt, whose turns have two tokens, the second one masked: a wins in its second turn, b loses in its third. Both begin
    in the state `start`, and b comes back to it; a's second turn and b's third are in the state `door`."""
    return AdvantageBatch(
        token_level_rewards=torch.tensor([0.0, 0.0, 1.0, 0.0] + [0.0] * 6),
        mask=torch.tensor([True, False] * 5),
        offsets=offsets_of([4, 6]),
        prompt_uids=["p", "p"],
        turns=Turns(torch.arange(0, 10, 2), ["start", "door", "start", "start", "door"]),
    )


def test_by_hand() -> None:
    # A_E = 1 - 1/2 and 0 - 1/2. Returns with gamma 0.5: a 0.5, 1; b 0, 0, 0. start: 0.5, 0, 0 of mean 1/6; door: 1, 0 of mean 1/2.
    options = AdvantageOptions(gamma=0.5, norm_by_std=False, step_weight=2.0)
    found = compute_advantages("gigpo", hand(), options).advantages
    expected = torch.tensor([0.5 + 2 / 3, 0.5 + 1.0, -0.5 - 1 / 3, -0.5 - 1 / 3, -0.5 - 1.0])
    torch.testing.assert_close(found[::2], expected)
    assert not found[1::2].any()
    alone = replace(hand(), prompt_uids=["p", "q"])  # b's turns in start: a group with equal returns
    assert not compute_advantages("gigpo", alone, options).advantages.any()


def test_without_the_comparison_of_turns_it_is_grpo() -> None:
    for norm in (True, False):
        options = AdvantageOptions(gamma=0.5, norm_by_std=norm, step_weight=0.0)
        found, expected = (compute_advantages(name, hand(), options).advantages for name in ("gigpo", "grpo"))
        torch.testing.assert_close(found, expected)


def test_turns_in_a_state_of_their_own_say_nothing() -> None:
    batch = hand()
    unlike = replace(batch, turns=replace(batch.turns, states=list("vwxyz")))
    options = AdvantageOptions(gamma=0.5)
    found, expected = (compute_advantages(name, unlike, options).advantages for name in ("gigpo", "grpo"))
    torch.testing.assert_close(found, expected)
    assert shared_states(unlike.mask, unlike.offsets, unlike.turns, ["p", "p"]) == 0.0
    assert shared_states(batch.mask, batch.offsets, batch.turns, ["p", "p"]) == 1.0
    assert shared_states(batch.mask, batch.offsets, batch.turns, ["p", "q"]) == pytest.approx(2 / 5)


def test_the_turns_must_be_there() -> None:
    with pytest.raises(ValueError, match="'gigpo' needs the turns of each trajectory; the batch has none"):
        compute_advantages("gigpo", replace(hand(), turns=None), AdvantageOptions())


Turn = tuple[str, list[float], int]  # state, rewards of live tokens, masked tokens after them


def by_definition(
    trajectories: Sequence[tuple[str, list[Turn]]], gamma: float, weight: float, norm: bool
) -> list[float]:
    """A number for each turn, by equations 3, 5, 6, 7 and 8. Turns without live tokens are left out."""

    def compared(own: float, group: list[float]) -> float:
        if len(group) < 2:
            return 0.0
        lead = own - statistics.mean(group)
        return lead / (statistics.stdev(group) + 1e-6) if norm else lead

    episodes, steps = {}, {}
    rows = []
    for uid, turns in trajectories:
        rewards = [sum(own) for _, own, _ in turns if own]
        returns = [sum(gamma**k * later for k, later in enumerate(rewards[t:])) for t in range(len(rewards))]
        if rewards:
            episodes.setdefault(uid, []).append(sum(rewards))
        states = [state for state, own, _ in turns if own]
        for state, value in zip(states, returns, strict=True):
            steps.setdefault((uid, state), []).append(value)
            rows.append((uid, sum(rewards), state, value))
    return [
        compared(total, episodes[uid]) + weight * compared(value, steps[uid, state])
        for uid, total, state, value in rows
    ]


turns_of_one = st.lists(
    st.tuples(
        st.sampled_from("st"), st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=2), st.integers(0, 2)
    ),
    min_size=1,
    max_size=3,
)


@brief
@given(
    st.lists(st.tuples(st.sampled_from("pq"), turns_of_one), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 2),
    st.booleans(),
)
def test_it_equals_its_definition(
    trajectories: list[tuple[str, list[Turn]]], gamma: float, weight: float, norm: bool
) -> None:
    rewards, mask, starts, states, lengths = [], [], [], [], []
    kept = []
    for uid, turns in trajectories:
        before, own = len(mask), []
        for state, live, masked in turns:
            if not live and not masked:  # a turn has at least one token
                continue
            own.append((state, live, masked))
            starts.append(len(mask))
            states.append(state)
            rewards += [*live, *[0.0] * masked]
            mask += [True] * len(live) + [False] * masked
        lengths.append(len(mask) - before)
        kept.append((uid, own))
    batch = AdvantageBatch(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
        offsets_of(lengths),
        prompt_uids=[uid for uid, _ in trajectories],
        turns=Turns(torch.tensor(starts, dtype=torch.int64), states),
    )
    found = compute_advantages(
        "gigpo", batch, AdvantageOptions(gamma, norm_by_std=norm, step_weight=weight)
    ).advantages
    assert not found[~batch.mask].any()
    live_turns = [live for _, own in kept for _, live, _ in own if live]
    expected = [
        value
        for value, live in zip(by_definition(kept, gamma, weight, norm), live_turns, strict=True)
        for _ in live
    ]
    assert found[batch.mask].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
