"""Batches from a stream of responses that continues from step to step: partial rollouts, and fully asynchronous training.

    partial_rollouts   step k: weights after k - 1 updates into the engines; generate until batch k is complete, interrupt the rest;
                       learn from batch k
    fully_async        step k: the same, but the engines, in a pool of their own, continue while the models learn

Responses that are interrupted at the end of a step or for new weights continue from their last token with the next weights;
`rollout_log_probs` are those of the weights that chose each token.

Guarantees, each asserted by a test, besides those of `InFlight`:
- An engine gets a few requests more than it runs at once (rollout.max_num_seqs): the next one goes to the engine with most room.
- A lost engine costs no trajectory: its in-flight requests are sent again.
- A checkpoint has finished groups, and the prompts of unfinished ones: the run that continues generates all responses to these anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from megarl.cluster import WorkerLost
from megarl.data.files import read_arrow, write_arrow
from megarl.data.trajectories import take
from megarl.trainer.roles.types import Roles
from megarl.trainer.roles.weight_sync import sync_weights
from megarl.trainer.run.checkpoints import InFolder
from megarl.trainer.run.run import Run
from megarl.trainer.schedule.collectors import Batches, Collected
from megarl.trainer.schedule.concurrent_views import Background, InterruptedWatch, View, in_background
from megarl.trainer.schedule.in_flight import InFlight, InFlightPrompt, load_in_flight, save_in_flight
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.rollouts import noise_seed, training_sampling
from megarl.trainer.stages.scoring import training_scores

# The longest time that a call waits for finished trajectories; it returns at once if there are any.
LAND_SECONDS = 0.2
# Requests sent to an engine, as a multiple of those that it runs at once: the surplus fills places that become free between calls.
_WINDOW = 1.25
_PROBLEM, _ITS_BATCH = "problem.json", "problem.arrow"


@dataclass
class Streamed(Batches):
    """Batches of partial rollouts and of fully asynchronous training.

    Attributes:
        prompts: endless tables of prompts.
        overlapped: whether the engines continue while the models learn.
        drawn: prompts that were drawn and not sent to engines yet.
        engine_of: the number of the engine that has a request, by the request's uid.
        problem: which number of a group was not finite; raised by the next step.
    """

    prompts: Iterator[pa.Table]
    in_flight: InFlight
    overlapped: bool
    drawn: pa.Table | None = None
    engine_of: dict[str, int] = field(default_factory=dict)
    problem: NotFinite | None = None

    def of(self, step: int) -> Collected:
        """As `Batches.of`: sync the weights, and generate until the step's batch is complete."""
        in_flight = self.in_flight
        found, self.problem = self.problem, None
        if found is not None:
            raise found
        in_flight.drop_late(step)
        run = replace(self.run, watch=self._watch())
        roles = replace(self.roles, memory=replace(self.roles.memory, run=run))
        with roles.memory.phase("sync"):
            metrics = sync_weights(run, roles, version=step)
        self._collect(
            (run, roles), step, partial(in_flight.room, step, False), lambda: in_flight.is_enough(step)
        )
        if not self.overlapped:
            self._interrupt(run)
        groups, taken = in_flight.take(step)
        table = groups.batch()
        first, last = (table[name].to_numpy() for name in ("weight_version", "last_weight_version"))
        staleness = {
            "staleness/mean": float((step - first).mean()),
            "staleness/max": float((step - first).max()),
            "staleness/of_several_versions": float((first != last).mean()),
        }
        return Collected(step, table, *groups.prompt_scores(), metrics | taken | staleness)

    @contextmanager
    def during_learning(self, step: int) -> Iterator[View]:
        """Continue generating until the end of the block if `overlapped`.

        Raises:
            The exceptions of generating, at the next call that the block waits for.
        """
        if not self.overlapped or step >= self.in_flight.last_step:
            yield self.run, self.roles
            return
        told = threading.Event()
        room = partial(self.in_flight.room, step, True)

        def generate(view: View) -> None:
            self._collect(view, step + 1, room, told.is_set)

        def join(background: Background[None], collector: Run, learner: Run) -> None:
            with self.run.timed("meanwhile_end"):
                background.result(look=lambda: learner.wait([]))
            seconds = collector.seconds.items()
            self.run.seconds |= {f"meanwhile/{name}": taken for name, taken in seconds}

        goes_on = self.config.trainer.on_nonfinite == "skip"
        with in_background(
            self.run, self.roles, step, "collect-meanwhile", generate, join, goes_on, self._busy
        ) as learner:
            try:
                yield learner
            finally:
                told.set()

    @property
    def folders(self) -> Mapping[str, InFolder]:
        return {"under_way": self}

    def save(self, folder: Path) -> None:
        """Save finished groups, and the prompts of unfinished ones."""
        save_in_flight(self.in_flight, self.drawn, folder)
        if self.problem is not None:
            (folder / _PROBLEM).write_text(json.dumps(str(self.problem)), encoding="utf-8")
            write_arrow(self.problem.batch, folder / _ITS_BATCH)

    def load(self, folder: Path) -> None:
        """Continue from saved groups and prompts."""
        self.drawn = load_in_flight(self.in_flight, folder)
        if (folder / _PROBLEM).exists():
            text = json.loads((folder / _PROBLEM).read_text(encoding="utf-8"))
            self.problem = NotFinite(text, read_arrow(folder / _ITS_BATCH))

    def _collect(self, view: View, step: int, room: Callable[[], int], is_done: Callable[[], bool]) -> None:
        """Generate and score for a step's batch until `is_done`; `room`: how many more prompts may be sent to engines."""
        run, roles = view
        while not is_done():
            self._ask(room())
            with roles.memory.phase("generate"):
                self._launch_missing(run)
                while not is_done() and not self.in_flight.due(step):
                    self._land(run)
            if self.in_flight.due(step):
                self._score(run, roles, step)

    def _ask(self, count: int) -> None:
        """Draw `count` prompts and add them to the in-flight ones."""
        while count:
            if self.drawn is None or not self.drawn.num_rows:
                self.drawn = next(self.prompts)
            some = self.drawn.slice(0, count)
            self.in_flight.ask(some, self.roles.restarts.version)
            self.drawn = self.drawn.slice(some.num_rows)
            count -= some.num_rows

    def _land(self, run: Run) -> None:
        """Take finished trajectories, submit them to the rewards, and send the engines more requests."""
        if not self.engine_of:
            run.wait([])
            time.sleep(LAND_SECONDS)
            return
        try:
            tables = run.wait(self.roles.engines.call("land", LAND_SECONDS))
            finished = [table for table in tables if table is not None]
            if finished:
                table = pa.concat_tables(finished)
                for uid in table["uid"].to_pylist():
                    self.engine_of.pop(uid, None)
                self.rewards.submit(self.in_flight.receive(table))
                self._launch(run)
        except WorkerLost as failure:
            run.revive(failure)
            self._launch_missing(run)

    def _launch_missing(self, run: Run) -> None:
        """Ask the engines which requests they have, and launch all others: new ones, and those lost with an engine or its reply."""
        while True:
            if run.restarts is not None:
                run.restarts.serve_all()
            try:
                held = run.wait(self.roles.engines.call("in_flight"))
                self.engine_of = {uid: engine for engine, uids in enumerate(held) for uid in uids}
                self._launch(run)
                return
            except WorkerLost as failure:
                run.revive(failure)

    def _interrupt(self, run: Run) -> None:
        """Interrupt the engines; a lost one is replaced before the next sync."""
        try:
            run.wait(self.roles.engines.call("interrupt"))
        except WorkerLost as failure:
            self.roles.restarts.note(failure)

    def _score(self, run: Run, roles: Roles, step: int) -> None:
        """Score finished groups, and keep or discard them."""
        groups, rewards = self.in_flight.finished(), replace(self.rewards, run=run)
        table = pa.concat_tables([one.table() for one in groups]).combine_chunks()
        try:
            by_model = rewards.ask_model(roles, table, roles.memory.phase)
        except NotFinite as found:
            self.problem = found
            self.in_flight.give_up(groups)
            return
        with run.timed("reward"):
            scored = rewards.collect(table, f"step {step}", by_model)
        config, few = self.config, len(groups) < self.in_flight.num_prompts
        trained = training_scores(scored, config.reward_model.overlong_buffer, config.data, may_all_fail=few)
        self.in_flight.keep(groups, trained)

    def _launch(self, run: Run) -> None:
        """Send engines as many requests as they have room for, oldest prompts first; all requests of a prompt go to one engine."""
        engines = self.roles.engines
        loads = [0] * engines.world_size
        for engine in self.engine_of.values():
            loads[engine] += 1
        window = int(_WINDOW * self.config.actor_rollout_ref.rollout.max_num_seqs)
        parts: list[list] = [[] for _ in loads]
        for prompt in self.in_flight.prompts.values():
            engine = min(range(len(loads)), key=loads.__getitem__)
            if loads[engine] >= window:
                break
            for requests, sampling in self._missing(prompt):
                parts[engine].append((requests, sampling))
                loads[engine] += requests.num_rows
                self.engine_of |= dict.fromkeys(requests["uid"].to_pylist(), engine)
        if any(parts):
            run.wait(engines.call_each("launch", [(part,) for part in parts]))

    def _missing(self, prompt: InFlightPrompt) -> Iterator[tuple[pa.Table, object]]:
        """Requests of a prompt that no engine has and that are not answered."""
        rollout, length = self.config.actor_rollout_ref.rollout, self.config.data.max_response_length
        greedy = self.config.algorithm.adv_estimator == "remax"
        samplings = training_sampling(rollout, length, noise_seed(rollout, prompt.version))
        for requests, sampling in zip(prompt.requests(rollout.n, greedy), samplings, strict=False):
            uids = requests["uid"].to_pylist()
            rows = [
                row for row, uid in enumerate(uids) if uid not in prompt.answers and uid not in self.engine_of
            ]
            if rows:
                yield take(requests, rows), sampling

    def _busy(self) -> set[str]:
        """Marks of the engines that have requests."""
        working = {*self.engine_of.values()}
        return {process.mark for process in self.roles.engines.processes if process.rank in working}

    def _watch(self) -> InterruptedWatch:
        watch = self.run.watch
        return InterruptedWatch(watch.idle_timeout, watch.cluster, lambda: None, self._busy)
