"""The controller's work in a step of a run with 1,024 ranks, in seconds of its process.

The trainer's own code (sync_weights, generate, evaluate_models, update, and the moves of memory between them) drives a group
of 1,024 ranks for each role, and engines on the same devices, over a real Ray. The ranks are simulated: a few processes play
all of them and answer with zeros of the real sizes, and a few more play the relays. Engines
give at once what would finish between two of their tables. So every call, every result, and all that is planned, put into the
object store, gathered and merged is real; not seen are the network (one machine), Ray's connections to 1,024 processes, and all
that ranks compute. The rest of the controller's work in a step is measured with --whole: it computes advantages, and writes the
trajectories.

Controller seconds are those of its process's processor, which a busy machine changes little; wall seconds have the simulated
ranks' own work in them, which shares the machine's few cores with the controller.

    python benchmarks/dispatch.py --out benchmarks/results/dispatch.json
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import ray
from dispatch_ranks import ENGINE_RANKS, SimulatedGroup, SimulatedRelayedGroup
from facts import announce, write_report
from rich.console import Console

from megarl.cluster import ResourcePool
from megarl.cluster.relays import MOST_RANKS
from megarl.config import TrainConfig, load_config, resolve
from megarl.data.trajectories import (
    append_column,
    expand_prompts,
    ragged,
    sequence_lengths,
    write_trajectories,
)
from megarl.layout.grid import ParallelLayout
from megarl.rollout.engine import SamplingParams
from megarl.trainer.roles.device_memory import device_memory
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.roles.types import SyncFacts, VersionFacts
from megarl.trainer.roles.weight_sync import sync_weights
from megarl.trainer.run.run import Run
from megarl.trainer.stages.advantages import compute_batch_advantages, make_controls
from megarl.trainer.stages.request_queue import APART
from megarl.trainer.stages.rollouts import generate
from megarl.trainer.stages.updates import evaluate_models, learning_columns, update
from megarl.trainer.workers.dispatch import READ, MicroBatching, columns_of

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 8  # of a prompt
UPDATES = 4  # mini-batches of a step
STEP = 60.0  # seconds, of which the controller's dispatch is a part
KINDS = {
    "GRPO": ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false",
             "actor_rollout_ref.actor.use_kl_loss=true"),
    "PPO": ("algorithm.adv_estimator=gae",),
}  # fmt: skip
# As where models and engines share GPUs: what a phase does not need leaves the devices.
COLOCATED = (
    *(f"{role}.megatron.{part}_offload=true" for role in ("actor_rollout_ref.actor", "critic")
      for part in ("param", "grad", "optimizer")),
    "actor_rollout_ref.ref.megatron.param_offload=true",
    "actor_rollout_ref.rollout.free_cache_engine=true",
)  # fmt: skip
DISPATCH = ("sync", "generate", "evaluate_models", "update")


class Meter:
    """Seconds by phase: wall, of this process's processor, and of the processors of Ray's servers."""

    def __init__(self) -> None:
        processes = ray._private.worker._global_node.all_processes
        pids = [processes[name][0].process.pid for name in ("raylet", "gcs_server")]
        self._servers = [psutil.Process(pid) for pid in pids]
        self.phases: dict[str, dict[str, float]] = {}

    def _now(self) -> tuple[float, float, float]:
        servers = sum(sum(process.cpu_times()[:2]) for process in self._servers)
        return time.perf_counter(), time.process_time(), servers

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._now()
        yield
        spent = [after - start for after, start in zip(self._now(), before, strict=True)]
        self.phases[name] = dict(zip(("wall", "controller", "ray_servers"), spent, strict=True))


def settings(kind: str, num_prompts: int, tokens: int) -> TrainConfig:
    """A real configuration; its model and layout are not used."""
    overrides = (
        f"data.train_batch_size={num_prompts}", f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts // UPDATES}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}", *KINDS[kind], *COLOCATED,
    )  # fmt: skip
    return resolve(load_config(TrainConfig, ROOT / "recipes/quickstart_ppo.yaml", overrides))


def prompts(num: int) -> pa.Table:
    return pa.table(
        {
            "uid": [f"p{row}" for row in range(num)],
            "data_source": ["math"] * num,
            "ground_truth": ["0"] * num,
            "extra_info": ["{}"] * num,
            "prompt_ids": pa.array(
                [list(range(100 + row % 200)) for row in range(num)], pa.list_(pa.int32())
            ),
        }
    )


def one_step(
    run: Run, roles: SimpleNamespace, config: TrainConfig, asked: pa.Table, step: int, dump: Path | None
) -> dict:
    """The phases of a step, and what they moved; rewards are drawn."""
    meter, controls, held = (
        Meter(),
        make_controls(config.algorithm, config.actor_rollout_ref.actor, num_steps=10),
        roles.memory.held,
    )
    with meter.phase("sync"), held("sync"):
        sync_weights(run, roles, step)
    with meter.phase("generate"), held("generate"):
        requests = expand_prompts(asked, SAMPLES)
        batch = generate(run, roles.engines, requests, SamplingParams(), lambda table: None)
    scores = np.random.default_rng(step).integers(0, 2, batch.num_rows).astype(np.float32)
    batch = append_column(batch, "score", scores)
    sent = [columns_of(batch, READ).nbytes]
    with meter.phase("evaluate_models"), held("evaluate_models"):
        batch = evaluate_models(run, roles, batch, config, step)
    if dump is None:
        made = ("token_level_rewards", "advantages") + (("returns",) if roles.critic is not None else ())
        batch = with_zeros(batch, made)
    else:
        with meter.phase("advantages"):
            batch, _ = compute_batch_advantages(batch, config.algorithm, controls.kl)
        with meter.phase("save trajectories"):
            write_trajectories(batch, dump)
        dump.unlink()
    sent.append(learning_columns(batch, config.actor_rollout_ref.actor).nbytes)
    with meter.phase("update"):
        update(run, roles, batch, config, controls, step, step)
    return {
        "phases": meter.phases,
        "tokens": int(sequence_lengths(batch).sum()),
        "bytes_put": sent,
        "dispatch": sum(meter.phases[name]["controller"] for name in DISPATCH),
    }


def with_zeros(batch: pa.Table, names: tuple[str, ...]) -> pa.Table:
    """Columns of the sizes that `compute_batch_advantages` gives."""
    _, offsets = ragged(batch, "response_mask")
    for name in names:
        batch = append_column(batch, name, (np.zeros(offsets[-1], np.float32), offsets))
    return batch


def deaths_checked(run: Run) -> float:
    """Seconds of a look at whether any rank has died: `wait` takes one every quarter of a second."""
    ranks = [process for group in run.groups for process in group.processes]
    begun = time.process_time()
    assert not any(rank.is_dead for rank in ranks)
    return time.process_time() - begun


def start(options: argparse.Namespace, folder: Path) -> tuple[Run, SimpleNamespace]:
    """The groups: actor (with the reference), critic, engines."""
    layout = ParallelLayout(options.ranks, tp=options.tp, pp=options.pp, sp=options.tp > 1)
    cut = MicroBatching(
        mini_batch_size=options.trajectories // UPDATES,
        max_tokens=4 * options.longest,
        micro_batch_size=None,
        pair_share=1e-5,
    )
    run = Run(folder, Console(file=sys.stderr))
    pool = ResourcePool("hosts", 1, options.hosts, use_gpu=False)
    run.pools["hosts"] = pool
    ranks = ("dispatch_ranks:Ranks", pool, options.hosts, options.ranks, {"layout": layout}, folder)
    relayed = partial(SimulatedRelayedGroup, most=options.share) if options.share else SimulatedGroup
    actor, critic = (run.start(relayed(role, *ranks)) for role in ("actor", "critic"))
    num_engines = max(1, options.ranks // ENGINE_RANKS)
    tables = options.generation / (APART * num_engines)  # of an engine, which gives them so far apart
    at_once = max(1, round(options.trajectories / num_engines / tables))
    lengths = {"shortest": options.shortest, "longest": options.longest, "at_once": at_once}
    engines = ("dispatch_ranks:Engines", pool, options.hosts, num_engines, lengths, folder)
    started = run.start(SimulatedGroup("engine", *engines))
    sent = VersionFacts(account={}, received=(0,) * (num_engines * ENGINE_RANKS), num_buckets=1)
    return run, SimpleNamespace(
        actor=Role(actor, layout, cut),
        ref=Role(actor, layout, cut),
        critic=Role(critic, layout, cut),
        engines=started,
        sync=SyncFacts(sent, None, ENGINE_RANKS, skip_unchanged=True),
        restarts=SimpleNamespace(served=lambda version: None),  # no engine is lost
        teachers={},
        judges={},  # engines of references
    )


def measure(options: argparse.Namespace, kind: str, run: Run, roles: SimpleNamespace) -> dict:
    """Steps of one kind; the first, in which connections are made, counts only in `first`."""
    num_prompts = options.trajectories // SAMPLES
    config, asked = settings(kind, num_prompts, 4 * options.longest), prompts(num_prompts)
    used = roles if kind == "PPO" else SimpleNamespace(**{**vars(roles), "critic": None})
    judges = {} if used.ref is None else {"ref": used.ref}
    used.memory = device_memory(config, run, used.actor, used.engines, used.critic, judges, None)
    used.memory.steps = 2  # its account, for which all processes are asked in the first two steps and every tenth, is not made
    dump = run.folder / "trajectories.parquet" if options.whole else None
    first, *steps = [one_step(run, used, config, asked, step, dump) for step in range(1, options.steps + 2)]
    best = min(steps, key=lambda step: step["dispatch"])
    return {"kind": kind, "first": first, "steps": steps, "dispatch": best["dispatch"], "best": best}


def show(found: dict) -> None:
    best = found["best"]
    print(
        f"\n{found['kind']}: {best['tokens']:,} tokens, put {' + '.join(f'{n >> 20} MiB' for n in best['bytes_put'])}"
    )
    print("phase              controller      wall   Ray's servers")
    for name, spent in best["phases"].items():
        print(f"{name:17} {spent['controller']:9.2f} s {spent['wall']:8.2f} s {spent['ray_servers']:10.2f} s")
    share = found["dispatch"] / STEP
    print(
        f"dispatch ({', '.join(DISPATCH)}): {found['dispatch']:.2f} s of the controller, {share:.1%} of a step of {STEP:g} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=4, help="processes that play the ranks of a role")
    parser.add_argument(
        "--share", type=int, default=MOST_RANKS, help="ranks that a relay calls; 0: no relays"
    )
    parser.add_argument("--trajectories", type=int, default=8192)
    parser.add_argument("--shortest", type=int, default=2048, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument(
        "--generation", type=float, default=STEP / 2, help="seconds over which engines answer"
    )
    parser.add_argument("--steps", type=int, default=4, help="that count, after a first one")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--store-gib", type=float, default=8.0, help="Ray's object store, at most")
    parser.add_argument(
        "--whole", action="store_true", help="also compute advantages and write the trajectories"
    )
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    facts = announce(("ray", "pyarrow", "numpy"))
    # A real Ray, whose processes play all ranks; then the steps of each kind on the same ranks.
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            address="local",
            num_cpus=options.hosts,
            num_gpus=0,
            object_store_memory=int(options.store_gib * 2**30),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
            _temp_dir=f"{folder}/ray",
        )
        run, roles = start(options, Path(folder))
        try:
            looked = deaths_checked(run)
            print(
                f"actor and critic: {options.ranks} ranks each (TP{options.tp} x PP{options.pp} x DP{roles.actor.layout.dp}), "
                f"{roles.engines.world_size} engines; played by {(5 if options.share else 3) * options.hosts} processes"
            )
            print(f"a look at the health of all ranks: {1000 * looked:.1f} ms")
            results = []
            for kind in options.kinds:
                results.append(measure(options, kind, run, roles))
                show(results[-1])
        finally:
            for group in run.groups:
                group.shutdown()
            ray.shutdown()
    sizes = {name: getattr(options, name) for name in ("ranks", "tp", "pp", "share", "hosts", "trajectories")}
    write_report(options.out, **facts, **sizes, seconds_of_a_look=looked, results=results)


if __name__ == "__main__":
    main()
