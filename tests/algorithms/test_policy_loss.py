"""Each policy loss against numbers worked by hand from its paper's formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.aggregate import LOSS_AGG_MODES, LossAggregation, loss_counts, token_weights
from megarl.algorithms.metrics import add_sums, reduce_metrics
from megarl.algorithms.policy_loss import (
    ClipCov,
    KLCov,
    PolicyLossOptions,
    PolicyTokens,
    Sequences,
    actor_loss,
    policy_loss,
    ptx_loss,
    register_policy_loss,
    select_tokens,
    token_covariance,
)
from megarl.algorithms.ragged import segment_ids
from megarl.config.schema.algorithm import POLICY_LOSSES
from megarl.util.plugins import load_plugins
from tests.algorithms.ragged_examples import brief, normal, ragged_masks, repeatable, rows


@pytest.mark.parametrize("loss_mode", POLICY_LOSSES)
def test_given_responses_are_learnt_from_by_the_divergence_alone(loss_mode: str) -> None:
    """The second of two trajectories has no policy loss and no entropy bonus, neither in the value nor in the gradient, whatever its advantages and
    old log-probs are; the first one's results are those that it has by itself."""
    own, mask = torch.tensor([True] * 3 + [False] * 3), torch.tensor([True, True, True, True, True, False])
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.0], dtype=torch.float64)
    old, advantages = normal(6, 1) - 2.0, normal(6, 2)
    divergence, entropy = (normal(6, seed).abs().requires_grad_() for seed in (3, 4))
    log_probs = (old + 0.1 * normal(6, 5)).requires_grad_()
    options = PolicyLossOptions(
        0.2, 0.2, 3.0, entropy_coef=0.1, kl_coef=2.0, kl_kind="full", pg_coef=0.7, loss_mode=loss_mode
    )

    def tokens(rows: slice) -> PolicyTokens:
        return PolicyTokens(
            mask=mask[rows],
            weights=weights[rows],
            old_log_probs=torch.where(own, old, 0.0)[rows],
            advantages=torch.where(own, advantages, 9.0)[rows],
            full_kl=divergence[rows],
            selected=torch.ones(6, dtype=torch.bool)[rows],
            sequences=Sequences((~own).long()[rows], 2),
            own=own[rows],
        )

    loss, sums = actor_loss(log_probs, entropy, tokens(slice(None)), options)
    grads = torch.autograd.grad(loss, [log_probs, entropy, divergence])
    alone, alone_sums = actor_loss(log_probs[:3], entropy[:3], tokens(slice(3)), options)
    wanted = torch.autograd.grad(alone, [log_probs, entropy, divergence], allow_unused=True)
    given = 2.0 * (weights * divergence.detach())[3:5].sum()
    assert loss.item() == pytest.approx((alone.detach() + given).item())
    for found, expected in zip(grads[:2], wanted[:2], strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads[2], 2.0 * weights)
    metrics, own_metrics = reduce_metrics(sums), reduce_metrics(alone_sums)
    assert metrics["actor/given_kl"] == pytest.approx(divergence[3:5].mean().item())
    for name in own_metrics.keys() - {"actor/loss", "actor/kl_loss"}:
        assert metrics[name] == pytest.approx(own_metrics[name]), name


def test_divergences_are_told_by_teacher() -> None:
    tokens = PolicyTokens(
        mask=torch.tensor([True, True, True, False]),
        weights=torch.full((4,), 0.5),
        old_log_probs=torch.zeros(4),
        advantages=torch.zeros(4),
        full_kl=torch.tensor([1.0, 2.0, 4.0, 9.0]),
        judges=torch.tensor([0.0, 1.0, 0.0, 1.0]),
        judge_names=("code", "math", "talk"),
    )
    options = PolicyLossOptions(0.2, 0.2, None, kl_coef=1.0, kl_kind="top_k")
    _, sums = actor_loss(torch.zeros(4), None, tokens, options)
    metrics = reduce_metrics(add_sums([sums, sums]), num_updates=2)
    found = {name: value for name, value in metrics.items() if "teacher" in name}
    assert found == {"actor/teacher_kl/code": 2.5, "actor/teacher_kl/math": 2.0}
    assert metrics["actor/kl_loss"] == 3.5


def test_actor_loss_by_hand():
    # 2 live tokens, weights 1/2, ratio 1, A = 1 and -3: pg loss = (-1 + 3) / 2 = 1
    # entropy 0.4 and 0.8: bonus 0.6. KL (mse): r = 0.2 and -0.4: (0.02 + 0.08) / 2 = 0.05
    # loss = 1 - 0.1 * 0.6 + 2 * 0.05 = 1.04
    old = torch.tensor([-1.0, -2.0, -9.0])
    tokens = PolicyTokens(
        mask=torch.tensor([True, True, False]),
        weights=torch.tensor([0.5, 0.5, 0.0]),
        old_log_probs=old,
        advantages=torch.tensor([1.0, -3.0, 7.0]),
        ref_log_probs=torch.tensor([-1.2, -1.6, math.nan]),
    )
    log_probs = old.clone().requires_grad_()
    entropy = torch.tensor([0.4, 0.8, math.nan], requires_grad=True)
    options = PolicyLossOptions(0.2, 0.2, 3.0, entropy_coef=0.1, kl_coef=2.0, kl_kind="mse")
    loss, sums = actor_loss(log_probs, entropy, tokens, options)
    loss.backward()
    assert loss.item() == pytest.approx(1.04)
    # 0.5 * (-A) + 2 * 0.5 * r: -0.5 + 0.2 and 1.5 - 0.4
    torch.testing.assert_close(log_probs.grad, torch.tensor([-0.3, 1.1, 0.0]))
    torch.testing.assert_close(entropy.grad, torch.tensor([-0.05, -0.05, 0.0]))
    assert reduce_metrics(sums) == pytest.approx(
        {
            "actor/loss": 1.04,
            "actor/pg_loss": 1.0,
            "actor/kl_loss": 0.05,
            "actor/entropy": 0.6,
            "actor/ratio_mean": 1.0,
            "actor/ppo_kl": 0.0,
            "actor/log_ratio_abs": 0.0,
            "actor/pg_clipfrac": 0.0,
            "actor/pg_clipfrac_lower": 0.0,
        }
    )


def test_the_entropy_is_only_measured_without_a_coefficient():
    old, mask = torch.tensor([-1.0]), torch.tensor([True])
    tokens = PolicyTokens(mask, torch.ones(1), old, torch.ones(1))
    log_probs = old.clone().requires_grad_()
    entropy = torch.tensor([0.4], requires_grad=True)
    loss, sums = actor_loss(log_probs, entropy, tokens, PolicyLossOptions(0.2, 0.2, 3.0))
    loss.backward()
    assert loss.item() == -1.0
    assert entropy.grad is None
    assert sums["actor/entropy"].item() == pytest.approx(0.4)
    assert "actor/entropy" not in actor_loss(log_probs, None, tokens, PolicyLossOptions(0.2, 0.2, 3.0))[1]


def test_importance_weights_multiply_the_policy_loss_alone():
    old = torch.tensor([-1.0, -2.0])
    entropy = torch.tensor([0.4, 0.8])
    options = PolicyLossOptions(0.2, 0.2, 3.0, entropy_coef=0.1, kl_coef=1.0, kl_kind="abs")

    def run(weights):
        tokens = PolicyTokens(
            torch.tensor([True, True]),
            torch.full((2,), 0.5),
            old,
            torch.tensor([1.0, -3.0]),
            old - 1,
            rollout_is_weights=weights,
        )
        return actor_loss(old, entropy, tokens, options)[0].item()

    # pg (-1 + 3) / 2 = 1, or (-0.5 + 6) / 2 = 2.75; bonus 0.06; KL 1
    assert run(None) == pytest.approx(1 - 0.06 + 1)
    assert run(torch.tensor([0.5, 2.0])) == pytest.approx(2.75 - 0.06 + 1)


def options_of(mode):
    return PolicyLossOptions(
        0.2, 0.3, 2.0, entropy_coef=0.01, kl_coef=0.1, kl_kind="low_var_kl", loss_mode=mode, ppo_kl_coef=0.7
    )


def make_case(ragged, seed):
    """All inputs of all losses, for each token; log-probs differ from the old ones by normal noise times 0.5."""
    mask, offsets = ragged
    count = mask.numel()
    old = normal(count, seed)
    return {
        "mask": mask,
        "offsets": offsets,
        "log_probs": old + 0.5 * normal(count, seed + 1),
        "entropy": normal(count, seed + 2).abs(),
        "old_log_probs": old,
        "advantages": normal(count, seed + 3),
        "ref_log_probs": normal(count, seed + 4),
        "rollout_is_weights": normal(count, seed + 5).abs(),
        "selected": normal(count, seed + 6) > 0.5,
    }


COLUMNS = ("old_log_probs", "advantages", "ref_log_probs", "rollout_is_weights", "selected")


def run_parts(case, mode, aggregation, parts):
    """The gradients and metrics if `parts` (trajectory numbers) are the micro-batches of one mini-batch."""
    mask, offsets = case["mask"], case["offsets"]
    weights = token_weights(aggregation, mask, offsets, loss_counts(mask, offsets)).double()
    log_probs, entropy = (case[name].clone().requires_grad_() for name in ("log_probs", "entropy"))
    all_sums = []
    for part in parts:
        pieces = [torch.arange(offsets[row], offsets[row + 1]) for row in part]
        index = torch.cat([torch.zeros(0, dtype=torch.int64), *pieces])
        ids = torch.arange(len(part)).repeat_interleave(
            torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)
        )
        tokens = PolicyTokens(
            mask=mask[index],
            weights=weights[index],
            **{name: case[name][index] for name in COLUMNS},
            sequences=Sequences(ids, len(part)),
        )
        loss, sums = actor_loss(log_probs[index], entropy[index], tokens, options_of(mode))
        loss.backward()
        all_sums.append(sums)
    return log_probs.grad, entropy.grad, reduce_metrics(add_sums(all_sums))


every_loss = st.sampled_from(POLICY_LOSSES)


@repeatable
@given(ragged_masks(), every_loss, st.sampled_from(LOSS_AGG_MODES), st.integers(0, 2**31), st.data())
def test_micro_batches_and_ranks_add_up_to_the_mini_batch(ragged, mode, agg, seed, data):
    """The loss, gradient and metrics of any split of the trajectories over micro-batches and data parallel ranks, in any order, equal those of one
    call over all trajectories."""
    case, n = make_case(ragged, seed), ragged[1].numel() - 1
    owner = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    order = data.draw(st.permutations(range(n)))
    parts = [[row for row in order if owner[row] == k] for k in range(4)]
    whole = run_parts(case, mode, LossAggregation(agg, 5.0), [list(range(n))])
    split = run_parts(case, mode, LossAggregation(agg, 5.0), [part for part in parts if part])
    torch.testing.assert_close(split[0], whole[0])
    torch.testing.assert_close(split[1], whole[1])
    assert split[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-9)


@brief
@given(
    ragged_masks(),
    st.sampled_from([mode for mode in POLICY_LOSSES if mode not in ("gspo", "gmpo", "topr")]),
    st.integers(0, 2**31),
    st.data(),
)
def test_token_losses_may_be_split_within_a_trajectory(ragged, mode, seed, data):
    """Context parallelism splits them so; tests/trainer/test_policy_updates.py has the losses of complete trajectories."""
    case, count = make_case(ragged, seed), ragged[0].numel()
    owner = torch.tensor(
        data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), dtype=torch.int64
    )
    weights = normal(count, seed + 9).abs()

    def run(parts):
        log_probs = case["log_probs"].clone().requires_grad_()
        total = []
        for part in parts:
            columns = {name: case[name][part] for name in COLUMNS}
            tokens = PolicyTokens(mask=case["mask"][part], weights=weights[part], **columns)
            loss, sums = policy_loss(log_probs[part], tokens, options_of(mode))
            loss.backward()
            total.append(sums)
        return log_probs.grad, reduce_metrics(add_sums(total))

    whole = run([torch.arange(count)])
    split = run([(owner == k).nonzero().flatten() for k in range(3)])
    torch.testing.assert_close(split[0], whole[0])
    assert split[1] == pytest.approx(whole[1], rel=1e-9, abs=1e-9)


@brief
@given(
    ragged_masks(), every_loss, st.integers(0, 2**31), st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
)
def test_what_stands_on_masked_tokens_never_matters(ragged, mode, seed, poison):
    case, mask = make_case(ragged, seed), ragged[0]
    parts = [list(range(ragged[1].numel() - 1))]
    poisoned = {
        name: torch.where(mask, column, poison) if column.is_floating_point() else column
        for name, column in case.items()
    }
    poisoned["selected"] = torch.where(mask, case["selected"], True)
    clean = run_parts(case, mode, LossAggregation("seq-mean-token-mean"), parts)
    found = run_parts(poisoned, mode, LossAggregation("seq-mean-token-mean"), parts)
    assert torch.equal(clean[0], found[0]) and torch.equal(clean[1], found[1])
    assert clean[2] == found[2]
    assert not clean[0][~mask].any()


@brief
@given(ragged_masks(), every_loss, st.integers(0, 2**31))
def test_a_trajectory_without_a_live_token_changes_nothing(ragged, mode, seed):
    case, (mask, offsets) = make_case(ragged, seed), ragged
    n = offsets.numel() - 1
    live = [row for row, part in enumerate(rows(offsets)) if bool(mask[part].any())]
    with_all = run_parts(case, mode, LossAggregation("seq-mean-token-mean"), [list(range(n))])
    if not live:
        assert not with_all[0].any()
        return
    without = run_parts(case, mode, LossAggregation("seq-mean-token-mean"), [live])
    torch.testing.assert_close(without[0], with_all[0])
    assert without[2] == pytest.approx(with_all[2], rel=1e-9, abs=1e-12)


@brief
@given(ragged_masks(), every_loss, st.integers(0, 2**31))
def test_on_policy_every_loss_has_the_gradient_of_the_policy(ragged, mode, seed):
    """With equal log-probs the gradient is -weight A at each token (gmpo: with the trajectory's one advantage)."""
    mask, offsets = ragged
    owner = segment_ids(offsets)
    old, weights = normal(mask.numel(), seed), normal(mask.numel(), seed + 1).abs()
    advantages = normal(offsets.numel() - 1, seed + 2)[owner]
    tokens = PolicyTokens(
        mask,
        weights,
        old,
        advantages,
        selected=torch.zeros_like(mask),
        sequences=Sequences(owner, offsets.numel() - 1),
    )
    log_probs = old.clone().requires_grad_()
    loss, sums = policy_loss(log_probs, tokens, PolicyLossOptions(0.2, 0.3, 3.0, loss_mode=mode))
    loss.backward()
    expected = -weights * advantages * mask
    if mode == "gmpo":  # a trajectory's gradient is shared out evenly over its tokens
        for part in rows(offsets):
            live = mask[part]
            expected[part] = expected[part].sum() * live / max(int(live.sum()), 1)
    torch.testing.assert_close(log_probs.grad, expected)
    assert sums["actor/ratio"] == sums["actor/tokens"] == mask.sum()
    assert sums["actor/ppo_kl"] == sums.get("actor/pg_clipfrac", 0) == 0


def test_a_file_of_the_users_adds_a_policy_loss(tmp_path):
    file = tmp_path / "my_loss.py"
    file.write_text(
        "from megarl.algorithms.policy_loss import register_policy_loss\n"
        "@register_policy_loss('squared')\n"
        "def squared(log_probs, tokens, options):\n"
        "    losses = -tokens.advantages * log_probs ** 2\n"
        "    return losses, {'actor/squares': (log_probs.detach() ** 2).sum().double()}\n"
    )
    load_plugins([str(file)])
    mask = torch.tensor([True, True, False])
    weights, advantages = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 2.0, math.nan])
    log_probs = torch.tensor([-1.0, -3.0, math.nan])
    tokens = PolicyTokens(mask, weights, log_probs, advantages)
    loss, sums = policy_loss(log_probs, tokens, PolicyLossOptions(0.2, 0.2, 3.0, loss_mode="squared"))
    assert loss.item() == -0.5 * 1 - 0.5 * 18
    assert reduce_metrics(sums)["actor/squares"] == 5.0


def test_unknown_losses_and_taken_names_are_refused():
    with pytest.raises(ValueError, match=r"policy_loss.loss_mode='gspoo' is unknown; known: cispo, clip_cov"):
        policy_loss(
            torch.zeros(0),
            PolicyTokens(torch.zeros(0, dtype=torch.bool), *[torch.zeros(0)] * 3),
            PolicyLossOptions(1, 1, 3, loss_mode="gspoo"),
        )
    with pytest.raises(ValueError, match="'gspo' is already registered"):
        register_policy_loss("gspo")(lambda log_probs, tokens, options: None)


# Live: log-probs -1, -2, -3, -2 (mean -2), advantages 2, 0, -4, 2 (mean 0): covariances 1*2, 0*0, -1*-4, 0*2.
OLD = torch.tensor([-1.0, math.nan, -2.0, -3.0, -2.0])
ADVANTAGES = torch.tensor([2.0, math.nan, 0.0, -4.0, 2.0])
MASK = torch.tensor([True, False, True, True, True])


def test_covariance_by_hand():
    assert token_covariance(OLD, ADVANTAGES, MASK).tolist() == [2.0, 0.0, 0.0, 4.0, 0.0]


def test_the_largest_share_pays_a_kl():
    assert select_tokens(KLCov(0.5), OLD, ADVANTAGES, MASK, 0).tolist() == [True, False, False, True, False]
    # a quarter of the tokens, and at least one
    for share in (0.25, 0.0002):
        found = select_tokens(KLCov(share), OLD, ADVANTAGES, MASK, 0)
        assert found.tolist() == [False, False, False, True, False]


def test_tokens_between_the_bounds_are_drawn():
    # covariances above 1 and below 5: tokens 0 and 3; a quarter of 4 tokens is one of them, a share of 1 is both
    drawn = {
        tuple(select_tokens(ClipCov(0.25, 1, 5), OLD, ADVANTAGES, MASK, seed).tolist()) for seed in range(20)
    }
    assert drawn == {(True, False, False, False, False), (False, False, False, True, False)}
    both = select_tokens(ClipCov(1.0, 1, 5), OLD, ADVANTAGES, MASK, 0)
    assert both.tolist() == [True, False, False, True, False]
    assert not select_tokens(ClipCov(1.0, 4, 5), OLD, ADVANTAGES, MASK, 0).any()


@repeatable
@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(0, 2**31),
    st.sampled_from([ClipCov(0.3, -0.5, 0.5), KLCov(0.3)]),
)
def test_no_more_than_the_share_and_none_that_is_masked(flags, seed, rule):
    mask = torch.tensor(flags)
    chosen = select_tokens(rule, normal(len(flags), seed), normal(len(flags), seed + 1), mask, seed)
    assert not (chosen & ~mask).any()
    assert int(chosen.sum()) <= max(int(0.3 * int(mask.sum())), 1)
    again = select_tokens(rule, normal(len(flags), seed), normal(len(flags), seed + 1), mask, seed)
    assert torch.equal(chosen, again)


def test_a_mini_batch_without_live_tokens():
    none = torch.zeros(3, dtype=torch.bool)
    for rule in (ClipCov(1.0, -9, 9), KLCov(1.0)):
        assert not select_tokens(rule, torch.ones(3), torch.ones(3), none, 0).any()
    assert pytest.approx(0) == float(token_covariance(torch.ones(3), torch.ones(3), none).sum())


# clip_low 0.2, clip_high 0.28, clip_c 3, weights 0.2; the last token is masked.
#   A   ratio  -A ratio  -A clip(ratio)   loss
#   1   1.5    -1.5      -1.28            -1.28  clipped
#   1   0.5    -0.5      -0.8             -0.5
#  -1   0.5     0.5       0.8              0.8   clipped
#  -1   2       2         1.28             2
#  -2   4       8         2.56             6     dual clip: 2 * 3
RATIOS = [1.5, 0.5, 0.5, 2.0, 4.0]
TOKEN_ADVANTAGES = [1.0, 1.0, -1.0, -1.0, -2.0]
OLD_LOG_PROBS = [-1.0, -2.0, -0.5, -1.5, -3.0]
LOG_PROBS = [old + math.log(ratio) for old, ratio in zip(OLD_LOG_PROBS, RATIOS, strict=True)]


def hand_example(selected=None, ids=None):
    old = torch.tensor([*OLD_LOG_PROBS, math.nan], dtype=torch.float64)
    log_ratio = torch.tensor([*map(math.log, RATIOS), 0.0], dtype=torch.float64)
    tokens = PolicyTokens(
        mask=torch.tensor([True] * 5 + [False]),
        weights=torch.full((6,), 0.2, dtype=torch.float64),
        old_log_probs=old,
        advantages=torch.tensor([*TOKEN_ADVANTAGES, math.inf], dtype=torch.float64),
        selected=None if selected is None else torch.tensor(selected),
        sequences=None if ids is None else Sequences(torch.tensor(ids), max(ids) + 1),
    )
    return (old + log_ratio).requires_grad_(), tokens


def run(mode, clip_c=3.0, selected=None, ids=None, **options):
    """(loss, gradient, sums) of the example."""
    log_probs, tokens = hand_example(selected, ids)
    loss, sums = policy_loss(
        log_probs,
        tokens,
        PolicyLossOptions(**{"clip_low": 0.2, "clip_high": 0.28, **options}, clip_c=clip_c, loss_mode=mode),
    )
    loss.backward()
    return loss.item(), log_probs.grad.tolist(), {name: value.item() for name, value in sums.items()}


ROOT_1, ROOT_2, BOUND = 0.375 ** (1 / 3), math.sqrt(8), math.log(1.28)
HALF = 0.5 ** (1 / 3)
GATES = [
    0.731059,
    0.268941,
    0.119203,
    0.982014,
    0.9999938558,
]  # sigmoid(tau (ratio - 1)), tau 2 for A > 0, else 4
SLOPES = [4 * gate * (1 - gate) * ratio for gate, ratio in zip(GATES, RATIOS, strict=True)]
CHOSEN = [False, True, True, False, False, True]
TRAJECTORIES = [0, 0, 0, 1, 1, 1]  # ratios 1.5, 0.5, 0.5 and 2, 4
# For each loss: its options, the loss of each token, the derivative by the token's log-prob, and sums.
BY_HAND = {
    # The derivative is -A ratio where the ratio's own branch holds, else 0.
    "vanilla": ({}, [-1.28, -0.5, 0.8, 2, 6], [0, -0.5, 0, 2, 0], {"pg_clipfrac": 2, "pg_clipfrac_lower": 1}),
    "vanilla without the dual clip": (
        {"clip_c": None}, [-1.28, -0.5, 0.8, 2, 8], [0, -0.5, 0, 2, 8], {"pg_clipfrac": 2, "pg_clipfrac_lower": 0}
    ),
    # s = (3/8)^(1/3) = 0.721125 and 8^(1/2). With A = 1 it is not clipped, as -0.8 < -0.721125; with A = -1 it is 0.8.
    "gspo": (
        {"ids": TRAJECTORIES},
        [-ROOT_1, -ROOT_1, 0.8, ROOT_2, 2 * ROOT_2],
        [-ROOT_1, -ROOT_1, 0, ROOT_2, 2 * ROOT_2],  # through each token's own log-prob: -A s
        {"pg_clipfrac": 1},
    ),
    # Bounds of +-ln 1.28: for A > 0 1.5 becomes 1.28 and 0.5 stays, for A < 0 0.5 becomes 1 / 1.28, 2 and 4 stay. The geometric
    # means are (1.28 * 0.5 / 1.28)^(1/3) and 8^(1/2); a token that is not clipped has sum(-A) * mean / count.
    "gmpo": (
        {"ids": TRAJECTORIES, "clip_low": BOUND, "clip_high": BOUND},
        [-HALF, -HALF, HALF, ROOT_2, 2 * ROOT_2],
        [0, -HALF / 3, 0, 3 * ROOT_2 / 2, 3 * ROOT_2 / 2],
        {"pg_clipfrac": 2},
    ),
    # Weights 1.28, 0.8, 0.8, 1.28, 1.28 on -A log-prob; the log-probs are those of `hand_example`.
    "cispo": (
        {},
        [-1.28 * LOG_PROBS[0], -0.8 * LOG_PROBS[1], 0.8 * LOG_PROBS[2], 1.28 * LOG_PROBS[3], 2.56 * LOG_PROBS[4]],
        [-1.28, -0.8, 0.8, 1.28, 2.56],
        {"pg_clipfrac": 5},
    ),
    # -A 4 / tau times the gate; its slope is 4 sigmoid (1 - sigmoid) ratio.
    "sapo": (
        {"tau_pos": 2.0, "tau_neg": 4.0},
        [-2 * GATES[0], -2 * GATES[1], GATES[2], GATES[3], 2 * GATES[4]],
        [-SLOPES[0], -SLOPES[1], SLOPES[2], SLOPES[3], 2 * SLOPES[4]],
        {},
    ),
    # PPO without dual clip, tokens 1 and 2 left out.
    "clip_cov": (
        {"selected": CHOSEN}, [-1.28, 0, 0, 2, 8], [0, 0, 0, 2, 8], {"pg_clipfrac": 2, "cov_selected": 2}
    ),
    # -A ratio, plus 0.5 |ln 0.5| on tokens 1 and 2; their log ratio is negative, so their derivative is less by 0.5.
    "kl_cov": (
        {"selected": CHOSEN, "ppo_kl_coef": 0.5},
        [-1.5, -0.5 + 0.5 * math.log(2), 0.5 + 0.5 * math.log(2), 2, 8],
        [-1.5, -0.5 - 0.5, 0.5 - 0.5, 2, 8],
        {"cov_selected": 2},
    ),
    "gpg": (
        {},
        [-LOG_PROBS[0], -LOG_PROBS[1], LOG_PROBS[2], LOG_PROBS[3], 2 * LOG_PROBS[4]],
        [-1, -1, 1, 1, 2],
        {},
    ),
    # The trajectories' ratios are 3/8 and 8: with A < 0, the only token of the first has the factor 3/8, those of the second have 1.
    "topr": (
        {"ids": TRAJECTORIES},
        [-LOG_PROBS[0], -LOG_PROBS[1], 0.375 * LOG_PROBS[2], LOG_PROBS[3], 2 * LOG_PROBS[4]],
        [-1, -1, 0.375, 1, 2],
        {"topr_taper": 0.625},
    ),
    # Probabilities move by 0.18, -0.07, -0.30, 0.22 and 0.15: token 2, with A < 0, falls by more than 0.2. The ratio 4 is truncated to 3.
    "dppo_tv": (
        {},
        [-1.5 * LOG_PROBS[0], -0.5 * LOG_PROBS[1], 0, 2 * LOG_PROBS[3], 6 * LOG_PROBS[4]],
        [-1.5, -0.5, 0, 2, 6],
        {"pg_clipfrac": 1},
    ),
    # The KL is 0.068 for token 0, which rises, and 0.196 for token 2, which falls; the others move against their advantages.
    "dppo_kl": (
        {"clip_low": 0.19, "clip_high": 0.06},
        [0, -0.5 * LOG_PROBS[1], 0, 2 * LOG_PROBS[3], 6 * LOG_PROBS[4]],
        [0, -0.5, 0, 2, 6],
        {"pg_clipfrac": 2},
    ),
    "dppo_kl within its bounds": (
        {"clip_low": 0.2, "clip_high": 0.07, "clip_c": None},
        [-1.5 * LOG_PROBS[0], -0.5 * LOG_PROBS[1], 0.5 * LOG_PROBS[2], 2 * LOG_PROBS[3], 8 * LOG_PROBS[4]],
        [-1.5, -0.5, 0.5, 2, 8],
        {"pg_clipfrac": 0},
    ),
}  # fmt: skip
# Sums of every loss; ppo_kl sums the differences old - new.
SUMS = {
    "tokens": 5,
    "ppo_kl": -math.log(1.5 * 0.5 * 0.5 * 2 * 4),
    "log_ratio_abs": math.log(1.5 * 2 * 2 * 2 * 4),
    "ratio": 8.5,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_losses_by_hand(name):
    options, losses, slopes, own_sums = BY_HAND[name]
    loss, gradient, sums = run(name.split()[0], **options)
    rel = 1e-3 if name == "sapo" else 1e-6
    assert loss == pytest.approx(0.2 * sum(losses), rel=1e-5 if name == "sapo" else 1e-6)
    assert gradient == pytest.approx([*(0.2 * slope for slope in slopes), 0], rel=rel, abs=1e-7)
    expected = {"pg_loss": loss, **SUMS, **own_sums}
    assert sums == pytest.approx({f"actor/{key}": value for key, value in expected.items()})


def test_a_broken_token_leaves_the_loss_finite():
    one = torch.ones(1)
    for mode in ("vanilla", "gspo", "kl_cov"):
        log_probs = torch.tensor([0.0], requires_grad=True)
        tokens = PolicyTokens(
            one.bool(),
            one,
            torch.tensor([-500.0]),
            -one,
            selected=~one.bool(),
            sequences=Sequences(torch.tensor([0]), 1),
        )
        loss, _ = policy_loss(log_probs, tokens, PolicyLossOptions(0.2, 0.2, None, loss_mode=mode))
        loss.backward()
        assert loss.item() == pytest.approx(math.exp(20.0))
        assert log_probs.grad.item() == 0.0


def test_gspo_and_gmpo_sum_over_all_ranks_that_hold_a_trajectory():
    # A rank that holds only the first token; `all_reduce` adds the other ranks' part of each sum.
    log_probs, tokens = hand_example()
    index = torch.tensor([0])
    others = iter(
        [torch.tensor([math.log(0.25)]), torch.tensor([2.0])]
    )  # log ratios of tokens 1 and 2; their count
    part = PolicyTokens(
        tokens.mask[index],
        tokens.weights[index],
        tokens.old_log_probs[index],
        tokens.advantages[index],
        sequences=Sequences(torch.tensor([0]), 1, lambda own: own + next(others)),
    )
    options = PolicyLossOptions(0.2, 0.28, None, loss_mode="gspo")
    assert policy_loss(log_probs[index], part, options)[0].item() == pytest.approx(-0.2 * 0.375 ** (1 / 3))


def test_the_mean_negative_log_likelihood_of_learnt_tokens_times_the_coefficient():
    """Worked by hand: of the log-probs -1, -3 and -2 the second is not learnt; with coefficient 0.5 the loss is 0.5 * (1 + 2) / 2."""
    log_probs = torch.tensor([-1.0, -3.0, -2.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    loss, sums = ptx_loss(log_probs, torch.full((3,), 0.5 / 2), mask)
    loss.backward()
    assert loss.item() == pytest.approx(0.75)
    assert log_probs.grad.tolist() == [-0.25, 0.0, -0.25]
    assert {name: value.item() for name, value in sums.items()} == {
        "actor/ptx_loss": 3.0,
        "actor/ptx_tokens": 2.0,
    }


def test_the_logged_loss_counts_texts_alone():
    sums = {"actor/tokens": 10.0, "actor/entropy": 5.0, "actor/ptx_loss": 6.0, "actor/ptx_tokens": 4.0}
    assert reduce_metrics(sums, num_updates=2) == pytest.approx({"actor/entropy": 0.5, "actor/ptx_loss": 1.5})
    sums |= {"actor/mtp_loss": 9.0, "actor/mtp_tokens": 3.0}
    assert reduce_metrics(sums, num_updates=2)["actor/mtp_loss"] == pytest.approx(3.0)
    sums |= {"actor/indexer_loss": 1.0, "actor/indexer_tokens": 4.0}
    found = reduce_metrics(sums, num_updates=2)
    assert found["actor/indexer_loss"] == pytest.approx(0.25) and "actor/indexer_tokens" not in found
    assert "actor/indexer_loss" not in reduce_metrics(sums | {"actor/indexer_tokens": 0.0}, num_updates=2)
