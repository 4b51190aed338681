"""The data that the controller sends to ranks: specs of models and updates, and each data parallel rank's rows of tables.

Tables travel by reference: every rank gets the same object of Ray's store, and the numbers of its own rows. Results come from one
rank of each data parallel rank and are put into the table's order. Importable without torch's distributed parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.aggregate import LossAggregation, LossCounts
from megarl.algorithms.policy_loss import ClipCov, KLCov, PolicyLossOptions
from megarl.algorithms.preference import Pairs, ranking_pairs
from megarl.config import LoraConfig, MegatronConfig, OptimConfig, TrainedModelConfig
from megarl.data.balance import (
    aligned_total,
    plan_figures,
    plan_groups,
    plan_mini_batches,
    sequence_costs,
    shared_tokens,
    sums_of,
)
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS
from megarl.data.routing import ROUTED_EXPERTS, list_of_binary
from megarl.data.sessions import num_sessions, request_of
from megarl.data.trajectories import (
    GIVEN,
    TEACHER,
    Blocks,
    append_column,
    from_ragged,
    list_lengths,
    ragged,
    replace_column,
    sequence_lengths,
    take,
)
from megarl.layout.grid import ParallelLayout
from megarl.rollout.engine import EngineCounts

TRAINING = "training"  # the owner of an engine's requests that training has in flight from call to call
# Roles of engines: for the rollouts, and for concurrent validation.
ENGINES, EVAL_ENGINES = "rollout", "eval"
NAMED = "megarl.trainer.workers.model:named"  # around each call of a rank with a model


@dataclass(frozen=True)
class PredictionTraining:
    """How a model's layers of multi-token prediction are trained: the weight of their loss, and whether it has no gradient for the rest
    of the model."""

    coef: float
    detached: bool


def prediction_training(model: TrainedModelConfig) -> PredictionTraining | None:
    """How the section of a model has its multi-token prediction layers trained; None: they are not trained."""
    return PredictionTraining(model.mtp_loss_coef, model.mtp_detached) if model.mtp == "train" else None


def indexer_coef(model: TrainedModelConfig) -> float | None:
    """The weight of the loss of a model's indexers; None: they are not trained."""
    return model.indexer_loss_coef if model.indexer == "train" else None


@dataclass(frozen=True)
class ModelSpec:
    """One Megatron model and how it is trained.

    Attributes:
        head: "lm" or "value".
        optim: None for a model that is only evaluated.
        num_updates: optimizer steps of the run, over which learning rates may decay.
        timeout: seconds after which a collective that not all ranks joined is an error.
        plugins: the user's files, as absolute paths, that the ranks import before anything is looked up by name.
        lora: the adapters that are trained instead of the weights, if their rank is not 0.
        share_prompts: the option by which trajectories of one prompt compute the prompt once; None: it is not set.
        router_replay: "rollout": routers choose the experts that trajectories came with; "trainer": those that `compute_log_probs`
            has recorded; None: their own.
        mtp: how layers of multi-token prediction are trained; None: the model is built without them.
        indexer_coef: weight of the loss of the indexers of sparse attention; None: they are not trained.
        tokenizer: folder of the tokenizer that its checkpoints come with; None: `path`.
    """

    path: str
    head: str
    megatron: MegatronConfig
    optim: OptimConfig | None
    num_updates: int
    timeout: float
    plugins: tuple[str, ...] = ()
    lora: LoraConfig = field(default_factory=LoraConfig)
    share_prompts: str | None = None
    router_replay: str | None = None
    mtp: PredictionTraining | None = None
    indexer_coef: float | None = None
    tokenizer: str | None = None

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, and nothing of the model but a value head."""
        return self.optim is not None and self.lora.rank > 0


@dataclass(frozen=True)
class PolicyUpdate:
    """How the actor is updated in a step.

    Attributes:
        aggregation: from token losses to a mini-batch's loss.
        select: which tokens of each mini-batch the loss treats apart; None: none.
        target_kl: after a mini-batch whose ppo_kl (nats a token) is over this, the step's later ones are left out; None: never.
        seed: of the step's random choices.
        expert_bias_update_rate: by how much each mini-batch moves the biases of routers; 0: they stay.
        router_z_loss_coef: of the router z-loss; 0: there is none.
    """

    aggregation: LossAggregation
    options: PolicyLossOptions
    select: ClipCov | KLCov | None
    target_kl: float | None
    seed: int
    expert_bias_update_rate: float = 0.0
    router_z_loss_coef: float = 0.0


@dataclass(frozen=True)
class MicroBatching:
    """How a role's rows are divided into mini- and micro-batches; exactly one of the limits is set.

    Attributes:
        mini_batch_size: trajectories of an optimizer step.
        max_tokens, micro_batch_size: the most tokens, or trajectories, of a micro-batch.
        pair_share: as in `sequence_costs`: the share of attention in the cost of a trajectory.
        share_prompts: whether trajectories of one prompt are kept together (`shared_prompts`).
        token_multiple: `MegatronConfig.token_multiple`, to which ranks fill up their parts of a micro-batch.
    """

    mini_batch_size: int
    max_tokens: int | None
    micro_batch_size: int | None
    epochs: int = 1
    shuffle: bool = False
    pair_share: float = 0.0
    share_prompts: bool = False
    token_multiple: int = 1


RowColumns = tuple[list[int], dict[str, tuple[np.ndarray, np.ndarray]]]
"""The results of a rank or an engine: row numbers, and by column the (flat values, offsets) of one list for each of these rows."""

# The columns of trajectories that ranks read: to compute columns, and to learn.
READ = ("uid", "prompt_ids", "response_ids", "response_mask", ROUTED_EXPERTS, KEPT_IDS, KEPT_COUNTS)
LEARNT = (*READ, GIVEN, TEACHER, "old_log_probs", "advantages", "rollout_is_weights", "values", "returns")

# Prefix of a layer's number in the key of an update's results that says how uneven the layer's routing was (`expert_load.violations`).
EXPERT_VIOLATION = "expert_violation/"
ROUTER_Z_LOSS = "router_z_loss"  # key of an update's results: the loss without its coefficient

Plan = list[list[list[list[int]]]]
"""By mini-batch, by data parallel rank, by micro-batch: row numbers."""


@dataclass
class Plans:
    """Plans for the last trajectories' lengths, each made once and shared by a step's passes and by roles of the same layout and
    limits. A plan depends on its arguments alone."""

    read: tuple[bytes, ...] = ()
    made: dict[tuple[object, ...], Plan] = field(default_factory=dict)

    def of(self, table: pa.Table, layout: ParallelLayout, batching: MicroBatching, seed: int = 0) -> Plan:
        """As `plan_mini_batches`. `seed`: of the order, if `batching.shuffle`."""
        lengths = sequence_lengths(table)
        shared = None
        if batching.share_prompts:
            shared = shared_tokens(ragged(table, "prompt_ids")[0], list_lengths(table, "prompt_ids"))
        number = _num_mini_batches(table, batching)
        read = (lengths.tobytes(), b"" if shared is None else shared.tobytes(), str(number).encode())
        if read != self.read:
            self.read, self.made = read, {}
        key = (layout.dp, _schedule_multiple(layout), batching, seed if batching.shuffle else 0)
        if key not in self.made:
            self.made[key] = _plan(lengths, shared, layout, batching, seed, number)
        return self.made[key]


def _plan(
    lengths: np.ndarray,
    shared: np.ndarray | None,
    layout: ParallelLayout,
    batching: MicroBatching,
    seed: int,
    num_mini_batches: int | None = None,
) -> Plan:
    limits = asdict(batching) | {"num_dp": layout.dp, "seed": seed, "multiple_of": _schedule_multiple(layout)}
    pair_share = limits.pop("pair_share")
    del limits["share_prompts"], limits["token_multiple"]
    if shared is not None and num_mini_batches is None:
        together = plan_groups(lengths, shared, pair_share=pair_share, **limits)
        if together is not None:
            return together
    costs = sequence_costs(lengths, pair_share)
    return plan_mini_batches(lengths, costs=costs, num_mini_batches=num_mini_batches, **limits)


def _num_mini_batches(table: pa.Table, batching: MicroBatching) -> int | None:
    """The number of mini-batches, where `mini_batch_size` counts sessions; None: each trajectory is a session, or there is one mini-batch."""
    if batching.mini_batch_size >= table.num_rows or "uid" not in table.column_names:
        return None
    sessions = num_sessions(table)
    return None if sessions == table.num_rows else -(-sessions // batching.mini_batch_size)


def with_idle_rows(batch: pa.Table, layouts: Iterable[ParallelLayout]) -> pa.Table:
    """The trajectories, filled up with copies of the shortest one that have no live token, so that every layout can plan them: sessions may
    give any number of trajectories. The copies belong to the last session.
    """
    unit = math.lcm(*(rows_to_share(1, layout) for layout in layouts))
    missing = -batch.num_rows % unit
    if not missing:
        return batch
    idle = take(batch, [int(sequence_lengths(batch).argmin())] * missing)
    last = request_of(batch["uid"][batch.num_rows - 1].as_py())
    names = pa.array([f"{last}.idle{number}" for number in range(missing)], pa.string())
    mask, offsets = ragged(idle, "response_mask")
    idle = replace_column(
        replace_column(idle, "uid", names), "response_mask", from_ragged(mask & False, offsets)
    )
    return pa.concat_tables([batch, idle]).combine_chunks()


def forward_plan(
    table: pa.Table, layout: ParallelLayout, batching: MicroBatching, plans: Plans | None = None
) -> list[list[list[int]]]:
    """All rows of a table as one batch: by data parallel rank, by micro-batch, row numbers.

    plans: plans that were made before; None: none.
    """
    one_batch = replace(batching, mini_batch_size=table.num_rows, epochs=1, shuffle=False)
    return (plans or Plans()).of(table, layout, one_batch)[0]


def first_pass_plan(plan: Plan, epochs: int) -> list[list[list[int]]]:
    """The mini-batches of the first of `plan`'s epochs one after the other, as one batch.

    Old log-probs computed in the very micro-batches of the first update equal the new ones bit for bit, so
    that the ratio of an on-policy step is 1, on a CPU exactly (docs/reproducibility.md).
    """
    first = plan[: len(plan) // epochs]
    return [[micro for shares in first for micro in shares[dp]] for dp in range(len(plan[0]))]


def plan_rows(
    lengths: np.ndarray,
    layout: ParallelLayout,
    max_tokens: int | None,
    micro_batch_size: int | None = None,
    pair_share: float = 0.0,
) -> list[list[list[int]]]:
    """Rows of these lengths as one batch: by data parallel rank, by micro-batch, row numbers."""
    batching = MicroBatching(len(lengths), max_tokens, micro_batch_size, pair_share=pair_share)
    return _plan(lengths, None, layout, batching, seed=0)[0]


def update_plan(
    table: pa.Table, layout: ParallelLayout, batching: MicroBatching, seed: int, plans: Plans | None = None
) -> tuple[Plan, list[LossCounts]]:
    """The mini-batches of all epochs, and the trained tokens and trajectories of each.

    plans: as for `forward_plan`.
    """
    plan = (plans or Plans()).of(table, layout, batching, seed)
    live = _live_tokens(table)
    counts = []
    for shares in plan:
        rows = live[[row for share in shares for micro in share for row in micro]]
        counts.append(LossCounts(tokens=int(rows.sum()), trajectories=int((rows > 0).sum())))
    return plan, counts


def _live_tokens(table: pa.Table) -> np.ndarray:
    """Tokens of each trajectory that are trained on [rows]; counted in the bitmap, eight to a byte."""
    column = table["response_mask"]
    mask = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    bounds = itertools.pairwise(mask.offsets.to_pylist())
    return np.array([mask.values.slice(a, b - a).true_count for a, b in bounds], dtype=np.int64)


def packing_metrics(
    role: str, plan: Plan, table: pa.Table, layout: ParallelLayout, batching: MicroBatching
) -> dict[str, float]:
    """Metrics of a plan: `perf/<role>/padding`, the share of packed tokens that only make ranks' shares equal,
    the figures of `PlanFigures`, and where prompts are shared `perf/<role>/shared`, the part of all tokens that is not computed."""
    lengths = sequence_lengths(table).astype(np.int64)
    micros = [rows for shares in plan for share in shares for rows in share]
    real = int(sums_of(lengths, micros).sum())
    alignment = {"tp": layout.tp, "cp": layout.cp, "sequence_parallel": layout.sp}
    packed = aligned_total(lengths, micros, **alignment, multiple=batching.token_multiple)
    figures = plan_figures(plan, sequence_costs(lengths, batching.pair_share))
    found = {"padding": 1 - real / packed, **asdict(figures)}
    if batching.share_prompts:
        prompts, of_prompts = table["prompt_ids"].combine_chunks(), list_lengths(table, "prompt_ids")
        shared = [
            shared_tokens(prompts.take(rows).flatten().to_numpy(), of_prompts[rows]).sum() for rows in micros
        ]
        found["shared"] = float(sum(shared) / real)
    return {f"perf/{role}/{name}": value for name, value in found.items()}


def rows_to_share(num_rows: int, layout: ParallelLayout) -> int:
    """The least number of rows, `num_rows` or more, that can always be planned, whatever their lengths."""
    unit = layout.dp * _schedule_multiple(layout)
    return -(-num_rows // unit) * unit


def _schedule_multiple(layout: ParallelLayout) -> int:
    """Megatron's interleaved schedule takes micro-batches in groups of the pipeline's size."""
    return layout.pp if layout.vpp else 1


def columns_of(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """The table with only the columns of these names that it has; others need not travel to every node of a job."""
    return table.select([name for name in table.column_names if name in names])


def merge_columns(table: pa.Table, results: Sequence, blocks: Blocks | None = None) -> pa.Table:
    """Append the columns that the ranks computed (`RowColumns` or None each) in the table's row order, in memory of `blocks`. A row that
    was computed more than once gets its first result."""
    parts = [part for part in results if part is not None]
    rows = np.concatenate([np.asarray(part_rows, dtype=np.int64) for part_rows, _ in parts])
    found, order = np.unique(rows, return_index=True)
    assert np.array_equal(found, np.arange(table.num_rows)), "each row is computed"
    for name in parts[0][1]:
        if parts[0][1][name][0].dtype.kind == "V":  # lists of binary values
            lists = pa.chunked_array([list_of_binary(*columns[name]) for _, columns in parts])
            table = table.append_column(name, take(pa.table({name: lists}), order, blocks)[name])
            continue
        flats = [(np.asarray(columns[name][0], np.float32), columns[name][1]) for _, columns in parts]
        lists = pa.table({name: pa.chunked_array([from_ragged(*flat) for flat in flats])})
        table = append_column(table, name, take(lists, order, blocks)[name].chunk(0))
    return table


@dataclass(frozen=True)
class Landed:
    """The results that an engine returns from time to time while it generates (`EngineWorker.land`).

    Attributes:
        table: trajectories that have finished; None: there are none.
        waiting: requests that the engine has not begun to decode: they wait for a place, for room in the cache or for their prompt.
        busy: seconds since the last call in which it had an unfinished request.
        counts: of its requests since the last call.
    """

    table: pa.Table | None
    waiting: int
    busy: float
    counts: EngineCounts = field(default_factory=EngineCounts)


def compared_texts(rankings: pa.Table) -> tuple[Pairs, torch.Tensor]:
    """The pairs of the rankings' texts, numbered in the order of `texts_of`, and each text's margin [texts] (float32)."""
    pairs, counts = _pairs(rankings)
    return pairs, torch.tensor(rankings["margin"].to_pylist()).repeat_interleave(counts)


def compared_chats(rankings: pa.Table) -> tuple[Pairs, torch.Tensor]:
    """The pairs of the rankings' chats, numbered in the order of `texts_of`, and each one's `ref_log_probs` [chats] (float32)."""
    reference = [value for own in rankings["ref_log_probs"].to_pylist() for value in own]
    return _pairs(rankings)[0], torch.tensor(reference, dtype=torch.float32)


def labels(examples: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the examples are desirable [rows] (bool), and each one's `ref_log_prob` [rows] (float32)."""
    reference = torch.tensor(examples["ref_log_prob"].to_pylist(), dtype=torch.float32)
    return torch.tensor(examples["desirable"].to_pylist(), dtype=torch.bool), reference


def _pairs(rankings: pa.Table) -> tuple[Pairs, torch.Tensor]:
    """The pairs of the rankings' sequences by their scores, and the number of each ranking's sequences [rankings]."""
    scores = rankings["scores"].to_pylist()
    counts = torch.tensor([len(own) for own in scores])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    flat = torch.tensor([score for own in scores for score in own], dtype=torch.float64)
    return ranking_pairs(flat, offsets), counts
