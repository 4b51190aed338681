"""How long engines idle while the last responses of a step are generated: prompts dealt as engines have room, beside equal parts.

The trainer's own code (`answer_all`, request_queue.py) deals prompts to simulated engines, whose clock is simulated, too: nothing is
computed, and no time passes. A decode step takes each engine --base milliseconds and --each more for each running request (assumed, of
the order of a 7B model on two H100); prefill takes none. Lengths are drawn: the answers to a prompt are alike, as those to a hard one are
all long. In `equal parts` every engine has the same number of prompts from the beginning, as megarl dealt them before.

Idle: the share of the time until the last response in which an engine has no request, over all engines.

    python benchmarks/dealing.py --out benchmarks/results/dealing.json
"""

import argparse
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from facts import announce, write_report

from megarl.rollout.engine import EngineCapacity, SamplingParams
from megarl.trainer.stages.request_queue import APART
from megarl.trainer.stages.rollouts import answer_all
from megarl.trainer.workers.dispatch import Landed


@dataclass
class SimulatedEngine:
    """Decodes `places` requests at a time, in the order in which they came; `base` + `each` x running seconds a step."""

    places: int
    base: float
    each: float
    now: float = 0.0
    busy: float = 0.0
    steps: float = 0.0  # so far
    running: list[tuple[float, str]] = field(default_factory=list)  # a heap: the step at which a request ends
    queued: deque[tuple[int, str]] = field(default_factory=deque)

    def add(self, requests: Sequence[tuple[int, str]]) -> None:
        """Requests: (tokens of the response, uid)."""
        self.queued.extend(requests)

    def run(self, until: float) -> list[str]:
        """The requests that end by then; its clock stops earlier if all have."""
        ended: list[str] = []
        while True:
            while self.queued and len(self.running) < self.places:
                length, uid = self.queued.popleft()
                heapq.heappush(self.running, (self.steps + length, uid))
            if not self.running:
                return ended
            step = self.base + self.each * len(self.running)
            num = min(self.running[0][0] - self.steps, (until - self.now) / step)
            self.now, self.busy, self.steps = (
                self.now + num * step,
                self.busy + num * step,
                self.steps + num,
            )
            if self.running[0][0] > self.steps + 1e-9:
                self.now = until
                return ended
            ended.append(heapq.heappop(self.running)[1])


class SimulatedGroup:
    """As a worker group of engines, and as the run that waits for its calls; `lengths`: tokens of each response by uid."""

    restarts, blocks = None, None

    def __init__(self, lengths: dict[str, int], engines: int, places: int, base: float, each: float) -> None:
        self.lengths, self.world_size, self.rounds = lengths, engines, 0
        self.engines = [SimulatedEngine(places, base, each) for _ in range(engines)]
        self.processes = [SimpleNamespace(rank=rank, mark=f"{rank}") for rank in range(engines)]

    def call_rank(self, engine: int, method: str, *args: Any) -> tuple[int, str, tuple[Any, ...]]:
        return engine, method, args

    def wait(self, calls: Sequence[tuple[int, str, tuple[Any, ...]]], busy: Any = ()) -> list[Any]:
        """All calls are made at the same time; engines without a request answer at once, others when all of theirs have ended."""
        answers = [getattr(self, method)(self.engines[engine], *args) for engine, method, args in calls]
        now = max(engine.now for engine in self.engines)
        for engine in self.engines:
            engine.now = now
        return answers

    def refuse_silence(self, since: float, processes: Any) -> None:
        pass

    def begin_generation(
        self, engine: SimulatedEngine, of: str, anew: bool
    ) -> tuple[EngineCapacity, list[str]]:
        return EngineCapacity(engine.places, 1 << 40), []

    def land(
        self, engine: SimulatedEngine, seconds: float, parts: Sequence[tuple[pa.Table, Any]], of: str
    ) -> Landed:
        self.rounds += 1
        for requests, _ in parts:
            engine.add([(self.lengths[uid], uid) for uid in requests["uid"].to_pylist()])
        ended = engine.run(engine.now + seconds)
        return Landed(pa.table({"uid": ended}) if ended else None, len(engine.queued), 0.0)

    def figures(self) -> dict[str, float]:
        """Seconds until the last response, and the idle share."""
        seconds = max(engine.now for engine in self.engines)
        return {
            "seconds": seconds,
            "idle": 1.0 - sum(engine.busy for engine in self.engines) / seconds / self.world_size,
        }


def equal_parts(group: SimulatedGroup, requests: pa.Table, samples: int) -> None:
    """Every engine gets the same number of prompts at the beginning."""
    uids, prompts = requests["uid"].to_pylist(), requests.num_rows // samples
    bounds = [samples * round(part * prompts / group.world_size) for part in range(group.world_size + 1)]
    for engine, start, end in zip(group.engines, bounds, bounds[1:], strict=False):
        engine.add([(group.lengths[uid], uid) for uid in uids[start:end]])
        engine.run(math.inf)


def draw(options: argparse.Namespace, seed: int) -> tuple[pa.Table, dict[str, int]]:
    """Requests, and how long their responses are: log-normal over prompts, and around their prompt's length."""
    random = np.random.default_rng(seed)
    of_prompt = random.normal(math.log(options.median), options.spread, options.prompts)
    lengths = np.exp(
        of_prompt[:, None] + random.normal(0.0, options.within, (options.prompts, options.samples))
    )
    names = [f"p{row}" for row in range(options.prompts)]
    uids = [f"{name}/{sample}" for name in names for sample in range(options.samples)]
    requests = pa.table(
        {
            "uid": uids,
            "prompt_uid": [name for name in names for _ in range(options.samples)],
            "prompt_ids": pa.array([[1] * 200] * len(uids), pa.list_(pa.int32())),
        }
    )
    tokens = np.clip(lengths, 16, options.longest).astype(int).ravel()
    return requests, dict(zip(uids, tokens.tolist(), strict=True))


def compare(options: argparse.Namespace, places: int) -> dict[str, Any]:
    """Both ways, with so many requests at a time in each engine; means over the draws."""
    draws = [compare_once(options, places, seed) for seed in range(options.draws)]
    means = {
        way: {name: float(np.mean([one[way][name] for one in draws])) for name in ("seconds", "idle")}
        for way in ("equal_parts", "as_room")
    }
    waves = options.prompts * options.samples / options.engines / places
    return {"places": places, "waves": waves, **means, "draws": draws}


def compare_once(options: argparse.Namespace, places: int, seed: int) -> dict[str, Any]:
    """Both ways for one draw of lengths."""
    requests, lengths = draw(options, seed)
    engine = (lengths, options.engines, places, options.base / 1000, options.each / 1000)
    before, after = SimulatedGroup(*engine), SimulatedGroup(*engine)
    equal_parts(before, requests, options.samples)
    answer_all(after, after, [(requests, SamplingParams(max_new_tokens=options.longest))], lambda table: None)
    return {"equal_parts": before.figures(), "as_room": after.figures(), "calls": after.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16, help="of a prompt")
    parser.add_argument(
        "--places", type=int, nargs="+", default=[256, 128, 64, 32], help="requests at a time"
    )
    parser.add_argument("--median", type=float, default=1500.0, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--spread", type=float, default=0.8, help="of the logarithm of a prompt's length")
    parser.add_argument(
        "--within", type=float, default=0.4, help="of the logarithm of an answer's, around it"
    )
    parser.add_argument("--base", type=float, default=6.0, help="milliseconds of a decode step")
    parser.add_argument("--each", type=float, default=0.05, help="milliseconds more for each running request")
    parser.add_argument("--draws", type=int, default=5, help="of lengths")
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    facts = announce(("pyarrow", "numpy"))
    print(
        f"{options.engines} engines, {options.prompts} prompts x {options.samples} of up to {options.longest} tokens; "
        f"engines are called each {APART * options.engines:g} s"
    )
    print("\n           requests  equal parts          as there is room")
    print("places     a place   seconds    idle      seconds    idle")
    results = [compare(options, places) for places in options.places]
    for found in results:
        before, after = found["equal_parts"], found["as_room"]
        print(
            f"{found['places']:6} {found['waves']:12.1f} {before['seconds']:10.0f} {before['idle']:7.1%} "
            f"{after['seconds']:12.0f} {after['idle']:7.1%}"
        )
    sizes = {name: value for name, value in vars(options).items() if name not in ("out", "places")}
    write_report(options.out, **facts, **sizes, results=results)


if __name__ == "__main__":
    main()
