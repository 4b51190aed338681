"""The planner compared with runs that others measured on real GPUs and published: seconds, and how many times as long the run took.

Nothing is run here: each row's layout goes through the code of `megarl plan step`. Rows and their sources are in
published_rows.py. `--markdown` prints the table of docs/planning.md.

    python benchmarks/published.py
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import log, prod, sqrt
from pathlib import Path
from unittest import mock

import torch
from published_held_out import HELD_OUT
from published_rows import MODELS, NOT_EXPRESSED, ROWS, Row
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megarl.costs import speed
from megarl.costs.engine import spread
from megarl.costs.flops import model_flops
from megarl.costs.hardware import TABLE, Assumptions
from megarl.costs.speed import Machine
from megarl.models import logical_tensors
from megarl.plan.inputs import PlanInputs, read_inputs
from megarl.plan.job import JobPlan, plan_job
from megarl.plan.memory import GIB, plan_memory
from megarl.plan.seconds import Part, lengths

BASE = "recipe:bases/math_grpo"
RESERVE = 6 * GIB
# Seconds of a tensor that is gathered from its ranks, handed over and loaded: NeMo-RL's pull request 3294 has 9.67 s for the 18,867
# of Qwen3-30B-A3B and 18.4 s for the 36,661 of Qwen3-235B-A22B (B200).
GATHERED = 5e-4
# Seconds of each layer in which PyTorch lists the parameters of a mixture of experts (`--listing`: 48 layers 628 us, 94 layers 1,274; one core of
# an AMD EPYC, Python 3.11.7, torch 2.13.0). vLLM does so in every call of `load_weights`, and verl's `sync_rollout_weights` without
# its checkpoint engine makes a call for each tensor.
LISTED = 1.34e-5
PAGEABLE = (
    4.5  # times as long as page-locked: DeepSpeed's pull request 5301 has 4 to 5 on a node of eight GPUs
)
# The heads of other trainers pass over logits in float32, as megarl's torch code does: 40 bytes of a logit forward, 58 backward (2 of
# them to compute it once more); of the weight's gradient 12 bytes an element for each 1,024 tokens.
PLAIN_HEAD = {
    "LOGIT": 20,
    "LOGIT_BACKWARD": 28,
    "HEAD_GRADIENT": 12,
    "head_chunk_tokens": lambda *sizes: 1024,
}
CLOSE, FAR = 1.5, 2.0  # factors


@dataclass(frozen=True)
class Compared:
    """A row and its estimate, in what it measures."""

    row: Row
    planned: float
    parts: dict[str, float]

    @property
    def ratio(self) -> float:
        """How many times as long as planned the run took."""
        ratio = self.row.measured / self.planned
        return 1 / ratio if self.row.measures == "mfu" else ratio

    @property
    def factor(self) -> float:
        return max(self.ratio, 1 / self.ratio)


@contextmanager
def models() -> Iterator[dict[str, str]]:
    """Where config.json of MODELS is, by name."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, facts in MODELS.items():
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(facts))
            found[name] = str(path)
        yield found


def compare(row: Row, folders: dict[str, str]) -> Compared:
    """The planner's words for a row."""
    recipe, keys = BASE, list(row.keys)
    if row.model.startswith("recipe:"):
        recipe = row.model
    else:
        keys.append(f"actor_rollout_ref.model.path={folders.get(row.model, f'recipe:models/{row.model}')}")
    config, inputs = read_inputs(recipe, keys, check=False)
    assumed = Assumptions()
    if row.prompt is not None:
        assumed = replace(assumed, prompt=row.prompt / config.data.max_prompt_length)
    if row.response is not None:
        assumed = replace(assumed, response=row.response / config.data.max_response_length)
    if row.eager:
        assumed = replace(assumed, kernel=assumed.dispatch)
    if row.pageable:
        assumed = replace(assumed, host=assumed.host / PAGEABLE)
    gpu = TABLE[row.gpu]
    machine = Machine(gpu, assumed, config.trainer.n_gpus_per_node)
    memory = plan_memory(config, inputs, round(gpu.memory_gib * GIB), RESERVE)
    with mock.patch.multiple(speed, **PLAIN_HEAD):
        job = plan_job(config, inputs, machine, memory, sync=False, fused=row.fused)
    if row.gathers:
        job = _gathering(job, inputs, row.singly)
    if not row.balanced:
        job = _straggling(job)
    return Compared(row, _planned(row, job, inputs), {phase.name: phase.seconds for phase in job.phases})


def _gathering(job: JobPlan, inputs: PlanInputs, singly: bool) -> JobPlan:
    """The same with a weight sync in which every rank gets every tensor whole, one after the other.

    Args:
        singly: whether each is loaded by a call of its own, which lists all parameters first.
    """
    shapes = logical_tensors(inputs.model)
    size = 2 * sum(map(prod, shapes.values()))
    each = GATHERED + (LISTED * inputs.model.num_layers if singly else 0.0)
    seconds = size / job.machine.ring(job.devices, 1) + len(shapes) * each
    first = job.phases[0]
    parts = (replace(first.parts[0], seconds=seconds), *first.parts[1:])
    return replace(job, phases=[replace(first, parts=parts), *job.phases[1:]])


def _straggling(job: JobPlan) -> JobPlan:
    """The same where each rank takes its next texts for a mini-batch, whatever their lengths: the fullest of d ranks with n texts each
    has sqrt(2 ln d / n) standard deviations of a length more than the mean."""
    texts, ranks = lengths(job.config, job.machine), job.actor_layout.dp
    own = (
        job.config.actor_rollout_ref.actor.ppo_mini_batch_size
        * job.config.actor_rollout_ref.rollout.n
        / ranks
    )
    over = 1 + spread(texts.response, texts.longest) * texts.response / texts.total * sqrt(
        2 * log(ranks) / own
    )

    def longer(part: Part) -> Part:
        return replace(part, seconds=part.seconds * over) if part.name == "actor updates" else part

    return replace(job, phases=[replace(each, parts=tuple(map(longer, each.parts))) for each in job.phases])


def _planned(row: Row, job: JobPlan, inputs: PlanInputs) -> float:
    phases = {phase.name: phase for phase in job.phases}
    update = next(part for part in phases["update"].parts if part.name == "actor updates")
    if row.measures == "step":
        return job.seconds
    if row.measures == "rollout":
        return phases["generate"].seconds
    if row.measures == "sync":
        return phases["sync"].parts[0].seconds
    if row.measures == "update":
        return update.seconds
    return _mfu(job, inputs, update.seconds)


def _mfu(job: JobPlan, inputs: PlanInputs, seconds: float) -> float:
    """As verl counts it (verl/utils/flops_counter.py): all of a token's matrices, the embedding among them, and half of the pairs of
    tokens (causal attention), forward and backward, over the peak of all GPUs."""
    flops, model = model_flops(inputs.model), inputs.model
    length = job.tokens / _trajectories(job)
    token = 6 * (flops.active + model.vocab_size * model.hidden_size)
    token += 3 * sum(layer.pair for layer in flops.layers) * length / 2
    return token * job.tokens / seconds / (job.devices * job.machine.gpu.bf16)


def _trajectories(job: JobPlan) -> int:
    return job.config.data.train_batch_size * job.config.actor_rollout_ref.rollout.n


def compare_all(rows: Sequence[Row] = ROWS) -> list[Compared]:
    with models() as folders:
        return [compare(row, folders) for row in rows]


def share(found: Sequence[Compared], factor: float) -> float:
    """Part of the rows that are at most this far off."""
    return sum(each.factor <= factor for each in found) / len(found)


def cells(each: Compared) -> tuple[str, str, str, str, str]:
    row, unit = each.row, "" if each.row.measures == "mfu" else " s"
    measured = f"{row.low:.3g}" if row.low == row.high else f"{row.low:.3g} to {row.high:.3g}"
    return row.name, row.measures, measured + unit, f"{each.planned:.3g}{unit}", f"{each.ratio:.2f}"


HEADS = ("run", "what", "measured", "planned", "took, x planned")


def markdown(found: Sequence[Compared]) -> str:
    """The tables of docs/planning.md: rows that were looked at while the terms were made, and held-out rows."""
    parts = []
    for words, rows in _kinds(found):
        lines = [f"| {' | '.join(HEADS)} |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(cells(each))} |" for each in rows]
        parts += [f"{words}: {summary(rows)}.", "\n".join(lines)]
    return "\n\n".join(parts)


def _kinds(found: Sequence[Compared]) -> list[tuple[str, list[Compared]]]:
    return [
        ("Seen while the terms were made", [each for each in found if each.row not in HELD_OUT]),
        ("Held out", [each for each in found if each.row in HELD_OUT]),
    ]


def summary(found: Sequence[Compared]) -> str:
    close, near = (sum(each.factor <= factor for each in found) for factor in (CLOSE, FAR))
    return f"{close} of {len(found)} rows within a factor of {CLOSE:g}, {near} within {FAR:g}"


def spread_of(found: Sequence[Compared]) -> tuple[float, float]:
    """Between how many times as long as planned eight of ten runs took."""
    tenths = statistics.quantiles([each.ratio for each in found], n=10, method="inclusive")
    return round(tenths[0], 2), round(tenths[-1], 2)


def as_json(found: Sequence[Compared]) -> dict[str, object]:
    rows = [
        asdict(each.row)
        | {
            "held_out": each.row in HELD_OUT,
            "planned": each.planned,
            "ratio": each.ratio,
            "phases": each.parts,
        }
        for each in found
    ]
    return {
        "rows": rows,
        "within": {f"{factor:g}": share(found, factor) for factor in (CLOSE, FAR)},
        "spread": spread_of(found),
        "not_expressed": [asdict(each) for each in NOT_EXPRESSED],
    }


def listing_seconds(layers: int, times: int = 300) -> float:
    """Seconds of a processor in which the parameters of a model are listed, whose layers have the modules of vLLM's Qwen3-MoE."""
    model = torch.nn.ModuleList(_modules(_LAYER) for _ in range(layers))
    found = []
    for _ in range(times):
        begun = time.process_time()
        dict(model.named_parameters())
        found.append(time.process_time() - begun)
    return statistics.median(found)


# Modules by name, and the parameters of those that have some.
_LAYER: dict[str, object] = {
    "input_layernorm": ("weight",),
    "self_attn": {
        **dict.fromkeys(("qkv_proj", "o_proj", "q_norm", "k_norm"), ("weight",)),
        **dict.fromkeys(("rotary_emb", "attn"), ()),
    },
    "post_attention_layernorm": ("weight",),
    "mlp": {"experts": ("w13_weight", "w2_weight"), "gate": ("weight",)},
}


def _modules(parts: object) -> torch.nn.Module:
    module = torch.nn.Module()
    if isinstance(parts, dict):
        for name, inner in parts.items():
            module.add_module(name, _modules(inner))
        return module
    for name in parts:
        module.register_parameter(name, torch.nn.Parameter(torch.empty(1)))
    return module


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="rows, estimates and phases, for programs")
    parser.add_argument("--markdown", action="store_true", help="the tables of docs/planning.md")
    parser.add_argument("--listing", action="store_true", help="measure LISTED on this machine")
    options = parser.parse_args(arguments)
    if options.listing:
        for layers in (48, 94):
            seconds = listing_seconds(layers)
            print(f"{layers} layers: {seconds * 1e6:.0f} us, {seconds / layers * 1e6:.1f} a layer")
        return
    found = compare_all([*ROWS, *HELD_OUT])
    if options.json:
        print(json.dumps(as_json(found), indent=2))
        return
    if options.markdown:
        print(markdown(found))
        return
    console = Console()
    for words, rows in _kinds(found):
        table = Table(*HEADS, box=SIMPLE_HEAD)
        for each in rows:
            table.add_row(*cells(each), style="bold" if each.factor > CLOSE else "")
        console.print(table)
        console.print(f"{words}: {summary(rows)}", highlight=False)
    low, high = spread_of(found)
    console.print(f"eight of ten took {low} to {high} times as long as planned", highlight=False)
    for each in NOT_EXPRESSED:
        console.print(f"not expressed: {each.name}: {each.why}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
