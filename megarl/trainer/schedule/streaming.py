"""Batches from a stream of responses that continues from step to step: partial rollouts, and fully asynchronous training.

    partial_rollouts   step k: weights after k - 1 updates into the engines; generate until batch k is complete, interrupt the rest;
                       learn from batch k
    fully_async        step k: the same, but the engines, in a pool of their own, continue while the models learn

Responses that are interrupted at the end of a step or for new weights continue from their last token with the next weights;
`rollout_log_probs` are those of the weights that chose each token.

Guarantees, each asserted by a test, besides those of `InFlight` and of stages/request_queue.py:
- A lost engine costs no trajectory: its in-flight requests are sent again.
- Engines get prompts, and their environments and agents are answered, also while scores are awaited.
- A checkpoint has finished groups, and the prompts of unfinished ones: the run that continues generates all responses to these anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from megarl.cluster import WorkerLost
from megarl.data.files import read_arrow, write_arrow
from megarl.data.trajectories import take
from megarl.trainer.roles.device_memory import share_gpus
from megarl.trainer.roles.types import Roles
from megarl.trainer.roles.weight_sync import sync_weights
from megarl.trainer.run.checkpoints import InFolder
from megarl.trainer.run.run import Run
from megarl.trainer.schedule.collectors import Batches, Collected
from megarl.trainer.schedule.concurrent_views import Background, InterruptedWatch, View, in_background
from megarl.trainer.schedule.in_flight import InFlight, load_in_flight, save_in_flight
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.request_queue import Part, PromptRequests, RequestQueue
from megarl.trainer.stages.rollouts import noise_seed, training_sampling
from megarl.trainer.stages.scoring import Rewards, training_scores

_PROBLEM, _ITS_BATCH = "problem.json", "problem.arrow"


@dataclass
class Streamed(Batches):
    """Batches of partial rollouts and of fully asynchronous training.

    Attributes:
        prompts: endless tables of prompts.
        overlapped: whether the engines continue while the models learn.
        drawn: prompts that were drawn and not sent to engines yet.
        queue: the requests that engines have, and the room for more.
        problem: which number of a group was not finite; raised by the next step.
    """

    prompts: Iterator[pa.Table]
    in_flight: InFlight
    overlapped: bool
    queue: RequestQueue
    drawn: pa.Table | None = None
    problem: NotFinite | None = None

    def of(self, step: int) -> Collected:
        """As `Batches.of`: sync the weights, and generate until the step's batch is complete."""
        in_flight = self.in_flight
        found, self.problem = self.problem, None
        if found is not None:
            raise found
        self._drop_late(step)
        run = replace(self.run, watch=self._watch())
        roles = replace(self.roles, memory=replace(self.roles.memory, run=run))
        with roles.memory.phase("sync"):
            metrics = sync_weights(run, roles, version=step)
        self._collect(
            (run, roles), step, partial(in_flight.room, step, False), lambda: in_flight.is_enough(step)
        )
        if not self.overlapped:
            self._tell(run, "interrupt")
        groups, taken = in_flight.take(step)
        idle, generated = self.queue.take_idle()
        taken["perf/engines_idle"] = idle / max(generated, 1e-9)
        taken |= self.queue.take_counts().metrics()
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

    def _drop_late(self, step: int) -> None:
        """Discard groups that are too old for a step, and the scores of their trajectories, which were requested when these came."""
        self.rewards.scorer.give_up(self.in_flight.drop_late(step))

    def _collect(self, view: View, step: int, room: Callable[[], int], is_done: Callable[[], bool]) -> None:
        """Generate and score for a step's batch until `is_done`; `room`: how many more prompts may be sent to engines."""
        run, roles = view
        while not is_done():
            self._ask(room())
            with roles.memory.phase("generate"):
                self.queue.open(run)
                while not is_done() and not self.in_flight.due(step):
                    self._land(run)
            if self.in_flight.due(step):
                self._score(run, roles, step)
        self.queue.close(run)

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
        """Send engines requests, oldest prompts first, take finished trajectories, and submit them to the rewards."""
        queue, answers = self.queue, self.in_flight.num_answers
        count = sum(answers - len(prompt.answers) for prompt in self.in_flight.prompts.values())
        dealt = queue.deal(self._unsent(), max(1, count - len(queue.engine_of)))
        if not queue.engine_of:
            run.wait([])
            time.sleep(queue.apart)
            return
        parts = [[part for prompt in prompts for part in prompt.content] for prompts in dealt]
        tables = queue.exchange(run, parts)
        if tables:
            self.rewards.submit(self.in_flight.receive(pa.concat_tables(tables)))

    def _tell(self, run: Run, method: str) -> None:
        """Have all engines interrupt their requests, or go on with them; a lost engine is replaced before the next sync."""
        try:
            run.wait(self.roles.engines.call(method))
        except WorkerLost as failure:
            self.roles.restarts.note(failure)

    def _score(self, run: Run, roles: Roles, step: int) -> None:
        """Score finished groups, and keep or discard them."""
        groups, rewards = self.in_flight.finished(), replace(self.rewards, run=run)
        table = pa.concat_tables([one.table() for one in groups]).combine_chunks()
        judge = roles.reward_model
        # Requests go on while the reward model scores, but not on the GPUs that it computes on.
        rests = judge is not None and share_gpus(judge.group, roles.engines)
        if rests:
            self._tell(run, "interrupt")
        try:
            by_model = rewards.ask_model(roles, table, roles.memory.phase)
        except NotFinite as found:
            self.problem = found
            self.in_flight.give_up(groups)
            return
        finally:
            if rests:
                self._tell(run, "go_on")
        with run.timed("reward"):
            if judge is not None and rewards.awaits(table, 0.0):
                # In the reward model's phase the engines' caches may have left their devices, or engines been replaced.
                with roles.memory.held("generate"):
                    self.queue.open(run)
                    self._land_while_awaited(run, rewards, table)
            else:
                self._land_while_awaited(run, rewards, table)
            scored = rewards.collect(table, f"step {step}", by_model)
        config, few = self.config, len(groups) < self.in_flight.num_prompts
        trained = training_scores(
            scored,
            config.reward_model.overlong_buffer,
            config.data,
            config.algorithm.reward_weights or {},
            few,
        )
        self.in_flight.keep(groups, trained)

    def _land_while_awaited(self, run: Run, rewards: Rewards, table: pa.Table) -> None:
        """`_land` until the scores of all trajectories of `table` have come."""
        while rewards.awaits(table, self.queue.apart):
            self._land(run)

    def _unsent(self) -> Iterator[PromptRequests[list[Part]]]:
        """Requests that no engine has and that are not answered, by prompt."""
        rollout, length = self.config.actor_rollout_ref.rollout, self.config.data.max_response_length
        greedy = self.config.algorithm.adv_estimator == "remax"
        for prompt in self.in_flight.prompts.values():
            # Most prompts are with engines; to make the requests of thousands of them takes seconds.
            missing = {
                uid
                for uid in prompt.request_uids(rollout.n, greedy)
                if uid not in prompt.answers and uid not in self.queue.engine_of
            }
            if not missing:
                continue
            samplings = training_sampling(rollout, length, noise_seed(rollout, prompt.version))
            parts: list[Part] = []
            uids: list[str] = []
            for requests, sampling in zip(prompt.requests(rollout.n, greedy), samplings, strict=False):
                names = requests["uid"].to_pylist()
                rows = [row for row, uid in enumerate(names) if uid in missing]
                if rows:
                    parts.append((take(requests, rows), sampling))
                    uids += [names[row] for row in rows]
            yield PromptRequests(uids, len(prompt.prompt["prompt_ids"][0]), length, parts)

    def _busy(self) -> set[str]:
        """Marks of the engines that have requests."""
        return self.queue.marks

    def _watch(self) -> InterruptedWatch:
        watch = self.run.watch
        return InterruptedWatch(watch.idle_timeout, watch.cluster, lambda: None, self._busy)
