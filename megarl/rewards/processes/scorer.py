"""Scores samples in worker processes, while others are still being generated.

Guarantees
- `submit` returns at once; `collect` has exactly one Score for every sample that was submitted, once.
- A reward that raises, hangs longer than `reward.timeout`, or kills its process costs its own sample only, whose
  score is then None and whose error says why. Samples that were running in the same process are run again, each
  alone, so that it is known which one it was.
- A worker that is killed or stopped from outside costs nothing: its sample is run once more, alone. One that is stopped is
  killed after `_STOPPED_SECONDS`, also in the middle of a message: nothing waits for a worker to read or to write.
- Workers end with the Scorer, and with the controller, however that ends.

A fault that no sample could survive (a file that a worker cannot import, a worker that dies before it begins) is a RuntimeError
of `collect` or `submit`.

No library's pool keeps these promises: pebble 5.2 leaves the children of a killed worker alive, does not say where a function
hung, and charges a worker that was killed or stopped from outside to its sample; concurrent.futures fails every sample of a
pool in which one process died; and Ray, which could place the processes, is no dependency of this room.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from megarl.rewards.processes.worker import Setup
from megarl.rewards.registry import RewardFunctions, RewardSpec
from megarl.rewards.rules.judge import JudgeSettings, request_headers
from megarl.rewards.sample import Sample, Score
from megarl.util.spans import Spans

if TYPE_CHECKING:
    from megarl.config.schema.commands import EvalConfig, TrainConfig

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
# `-c`, not `-m`: the worker imports from where this process does, and never this process's own main file.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megarl.rewards.processes.worker import main; main(*map(int, sys.argv[2:]))"
)
_REPORT_BYTES = 4000
_MAX_FRAMES = 8
_WORKER = "megarl/rewards/processes/worker.py"
# A worker ends by itself when a sample is over time; this much later it is killed.
_GRACE_SECONDS = 10.0
# While there is work, workers are looked at this often, and killed when they have been stopped this long.
_LOOK_SECONDS = 5.0
_STOPPED_SECONDS = 20.0
# So many workers in a row that die before they can begin are no accident.
_MAX_FAILED_STARTS = 3
_MEANWHILE_SECONDS = 1.0
_READ_BYTES = 1 << 20


def make_scorer(config: TrainConfig | EvalConfig, function: bytes | None = None) -> Scorer:
    """The Scorer that a configuration describes.

    Args:
        function: a reward function in no file, pickled (by cloudpickle); it is used for all samples, whatever the
            configuration says.

    Raises:
        ValueError: a wrong file or name in the configuration, a key of the judge that is not set.
    """
    reward, custom = config.reward, config.custom_reward_function
    judge = JudgeSettings(**asdict(reward.judge))
    if reward.rule == "llm_judge":
        request_headers(judge)
    spec = RewardSpec(
        plugins=tuple(config.plugins),
        function=function,
        custom_path=custom.path,
        custom_name=custom.name,
        custom_kwargs=custom.reward_kwargs or {},
        rule="gsm8k" if reward.gsm8k_rule_reward else reward.rule,
        rule_options={
            "math": {"time_limit": reward.math_time_limit},
            "math_dapo": {"time_limit": reward.math_time_limit},
            "code": {
                "time_limit": reward.code.time_limit,
                "memory_mb": reward.code.memory_mb,
                # Less than a sample's own time, so that a program in time for some tests has their score.
                "total_seconds": 0.8 * reward.timeout,
                "isolation": reward.code.isolation,
            },
            "llm_judge": {"settings": judge},
        },
    )
    return Scorer(
        spec,
        num_workers=reward.num_workers or min(16, max(2, (os.cpu_count() or 1) // 4)),
        timeout=reward.timeout,
        max_concurrency=reward.max_concurrency,
    )


@dataclass(eq=False)
class _Job:
    sample: Sample
    is_async: bool
    alone: bool = False  # a worker died with it and others
    again: bool = False  # a worker was killed or stopped from outside while this was its only job


class Scorer:
    """Workers, and a thread that hands samples to them. A context manager.

    Attributes:
        spans: of samples that were scored, with the number of the `worker`.
    """

    def __init__(
        self, spec: RewardSpec, *, num_workers: int, timeout: float, max_concurrency: int = 32
    ) -> None:
        """
        Args:
            num_workers: processes; each runs one plain function at a time.
            timeout: seconds for one sample.
            max_concurrency: async functions that run at a time, in all workers together.

        Raises:
            ValueError: a wrong file, name or rule in `spec`.
        """
        self.spans = Spans()
        self._functions = RewardFunctions(spec)
        self._timeout = timeout
        self._max_async = max_concurrency
        self._workers = [WorkerProcess(spec, timeout) for _ in range(num_workers)]
        self._waiting: dict[str, deque[_Job]] = {"alone": deque(), "plain": deque(), "async": deque()}
        self._scores: dict[str, Score] = {}
        self._open: dict[str, _Job] = {}  # by uid, jobs that are neither collected nor given up
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._failed_starts, self._next_look = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self._thread.start()

    def check(self, prompts: Iterable[tuple[str, str, str]]) -> None:
        """Check prompts (uid, data source, ground truth), see RewardFunctions.check. ValueError: one cannot be scored."""
        self._functions.check(prompts)

    def submit(self, samples: Sequence[Sample]) -> None:
        """Have samples scored; their uids must differ from all that are neither collected nor given up. A data source without a rule costs
        its samples: where an agent or an environment gives the scores, it may have given none to one trajectory of thousands.

        RuntimeError: workers cannot work.
        """
        with self._changed:
            self._raise_failure()
            for sample in samples:
                assert sample.uid not in self._open, f"uid {sample.uid!r} was submitted twice"
                try:
                    job = _Job(sample, self._functions.of(sample.data_source).is_async)
                except ValueError as error:
                    self._open[sample.uid] = _Job(sample, is_async=False)
                    self._scores[sample.uid] = Score(sample.uid, None, error=str(error))
                    continue
                self._open[sample.uid] = job
                self._waiting["async" if job.is_async else "plain"].append(job)
        self._wake()

    def collect(
        self, meanwhile: Callable[[], object] = lambda: None, uids: Collection[str] | None = None
    ) -> dict[str, Score]:
        """Wait for the scores of submitted samples; uid -> Score. RuntimeError: workers cannot work.

        Args:
            meanwhile: called once a second while waiting; its exceptions end the wait.
            uids: the samples to wait for; unknown ones are ignored, other samples stay. None: all.
        """
        with self._changed:
            wanted = self._chosen(uids)
            while not self._wait_for(wanted, _MEANWHILE_SECONDS):
                meanwhile()
            self._raise_failure()
            for uid in wanted:
                del self._open[uid]
            return {uid: self._scores.pop(uid) for uid in wanted}

    def awaits(self, uids: Collection[str], seconds: float) -> bool:
        """Whether `collect` would wait for one of these samples, also after so many seconds, which this waits for their scores."""
        with self._changed:
            return not self._wait_for(self._chosen(uids), seconds)

    def give_up(self, uids: Collection[str] | None = None) -> None:
        """Forget samples that nobody will collect: scores that still come are dropped, and the uids may be submitted again.

        Args:
            uids: the samples; unknown ones are ignored. None: all.
        """
        with self._changed:
            for uid in self._chosen(uids):
                del self._open[uid]
                self._scores.pop(uid, None)

    def close(self) -> None:
        """End the workers; scores that were not collected are lost."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chosen(self, uids: Collection[str] | None) -> set[str]:
        return self._open.keys() & (self._open if uids is None else uids)

    def _wait_for(self, wanted: set[str], seconds: float) -> bool:
        """Wait for the scores of these samples; returns False if they have not come in time, and no failure either."""
        return self._changed.wait_for(
            lambda: self._failure is not None or self._scores.keys() >= wanted, seconds
        )

    def _is_open(self, job: _Job) -> bool:
        return self._open.get(job.sample.uid) is job

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _raise_failure(self) -> None:
        assert not self._closing, "the Scorer was closed"
        if self._failure is not None:
            raise RuntimeError(f"rewards cannot be computed: {self._failure}") from self._failure

    # The methods below run in the Scorer's thread, the only one that touches workers. It lives as long as they do, because the
    # kernel kills a worker when the thread that started it ends.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._hand_out()
                self._wait()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            for worker in self._workers:
                worker.end()

    def _hand_out(self) -> None:
        """Give workers the jobs that they can take now; when there is work, workers that do not run are started."""
        with self._changed:
            if any(self._waiting.values()):
                for worker in self._workers:
                    if not worker.is_running:
                        worker.start()
            for kind, jobs in self._waiting.items():
                while jobs and (worker := self._free_worker(kind)) is not None:
                    job = jobs.popleft()
                    if self._is_open(job) and not worker.send(job):  # it is dead, which `_wait` will see
                        jobs.appendleft(job)
                        break

    def _free_worker(self, kind: str) -> WorkerProcess | None:
        """A worker that may take a job; async jobs share workers, any other has one for itself."""
        ready = [worker for worker in self._workers if worker.is_ready]
        if kind != "async":
            return next((worker for worker in ready if not worker.jobs), None)
        shared = [worker for worker in ready if all(job.is_async and not job.alone for job in worker.jobs)]
        if not shared or sum(len(worker.jobs) for worker in shared) >= self._max_async:
            return None
        return min(shared, key=lambda worker: len(worker.jobs))

    def _wait(self) -> None:
        """Wait until a worker sends a message, ends or is over time, or until there is more to do."""
        running = [worker for worker in self._workers if worker.is_running]
        deadlines = [worker.oldest + self._timeout + _GRACE_SECONDS for worker in running if worker.jobs]
        seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        at_work = [worker for worker in running if worker.jobs or not worker.is_ready]
        if at_work:
            seconds = _LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS)
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for worker in running:
            for descriptor, events in worker.awaited:
                poll.register(descriptor, events)
        ready = poll.poll(None if seconds is None else math.ceil(1000 * seconds))
        if self._wake_read in (descriptor for descriptor, _ in ready):
            os.read(self._wake_read, 65536)
        # Not at every score: looking costs as much as handing out a sample.
        looks = time.monotonic() >= self._next_look
        if looks:
            self._next_look = time.monotonic() + _LOOK_SECONDS
        for worker in running:
            if worker.jobs and time.monotonic() >= worker.oldest + self._timeout + _GRACE_SECONDS:
                worker.kill_overdue()
            if looks and worker in at_work and worker.stopped_seconds() >= _STOPPED_SECONDS:
                worker.kill()
            worker.flush()
            for job, score in worker.receive():
                self.spans.add("score", score.seconds, {"worker": self._workers.index(worker)})
                self._finish(job, score)
            if worker.has_ended:
                self._bury(worker)
            elif worker.is_ready:
                self._failed_starts = 0

    def _finish(self, job: _Job, score: Score) -> None:
        with self._changed:
            if self._is_open(job):
                self._scores[job.sample.uid] = score
                self._changed.notify_all()

    def _bury(self, worker: WorkerProcess) -> None:
        """Settle the jobs of a worker that ended: a single job was the cause, unless the worker was hit from outside, and gets no
        score; several jobs are tried again, each alone."""
        began, jobs, hit = worker.is_ready, dict(worker.jobs), worker.was_hit
        seconds = time.monotonic() - worker.oldest if jobs else 0.0
        reason = worker.end()
        if not began:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise RuntimeError(f"{self._failed_starts} reward workers ended while they began: {reason}")
        if len(jobs) == 1:
            (job,) = jobs
            if hit and not job.again:
                job.alone = job.again = True
                with self._changed:
                    self._waiting["alone"].append(job)
                return
            self._finish(job, Score(job.sample.uid, None, error=reason, seconds=seconds))
        else:
            for job in jobs:
                job.alone = True
            with self._changed:
                self._waiting["alone"].extend(jobs)


class WorkerProcess:
    """The controller's side of a worker: starts it, exchanges messages with it, and tells how it ended.

    It can be started again after its end. Used by one thread.
    """

    def __init__(self, spec: RewardSpec, timeout: float) -> None:
        self._setup = Setup(spec, timeout)
        self._process: subprocess.Popen | None = None
        self.is_ready = False
        self.jobs: dict[_Job, float] = {}  # its jobs -> when each was sent (time.monotonic)
        self._stopped_since: float | None = None

    @property
    def is_running(self) -> bool:
        """Started, and not yet found to have ended."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    @property
    def was_hit(self) -> bool:
        """Whether it ended for another reason than its job: killed (by hand, for want of memory), or stopped before."""
        assert self._process is not None
        return self._overdue or self._stopped_since is not None or self._process.returncode == -signal.SIGKILL

    @property
    def oldest(self) -> float:
        """When the oldest of its jobs was sent; it must have one."""
        return min(self.jobs.values())

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """For `select.poll`: that it sends a message, takes more of the messages to it, or ends."""
        more = select.POLLOUT if self._unsent else 0
        return [(self._socket.fileno(), select.POLLIN | more), (self._ended, select.POLLIN)]

    def start(self) -> None:
        here, there = socket.socketpair()
        self._report = os.memfd_create("megarl_reward_report")
        arguments = [json.dumps(sys.path), str(there.fileno()), str(self._report), str(os.getpid())]
        with there:
            # A session of its own: Ctrl-C is for the controller, and everything that rewards start dies at once.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(), self._report),
                start_new_session=True,
            )
        # A pidfd in addition to the socket, which children of a reward may hold open after the worker's end.
        self._ended = os.pidfd_open(self._process.pid)
        self._socket = here
        self._unsent: deque[memoryview] = deque()  # messages, and the rest of one that is sent in part
        self._received = bytearray()  # messages, and the beginning of one that has come in part
        self._by_key: dict[str, _Job] = {}
        self.is_ready, self._overdue, self._stopped_since = False, False, None
        self.jobs = {}
        self._unsent.append(_as_sent(self._setup))
        self.flush()  # it may be dead already, which `has_ended` tells

    def send(self, job: _Job) -> bool:
        """Hand over a sample; False if the worker has ended."""
        assert self.is_ready
        # In place of the uid, which a job that was given up may share with one that came after it.
        key = str(id(job))
        self._unsent.append(_as_sent(replace(job.sample, uid=key)))
        if not self.flush():
            return False
        self._by_key[key] = job
        self.jobs[job] = time.monotonic()
        return True

    def flush(self) -> bool:
        """Send what the socket has room for, without waiting for the worker, which may be stopped; False if the worker has ended."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()
            return False
        return True

    def receive(self) -> list[tuple[_Job, Score]]:
        """The scores that have come. RuntimeError: the worker cannot set itself up."""
        scores = []
        if self.has_ended:
            self._kill_group()  # its other processes may hold the socket, and reading it would not end
        is_open = self._read()
        for message in _taken(self._received):
            if self.is_ready:
                job = self._by_key.pop(message.uid)
                del self.jobs[job]
                scores.append((job, replace(message, uid=job.sample.uid)))
            elif message is None:
                self.is_ready = True
            else:
                raise RuntimeError(message)
        if not is_open:
            # It is ending: its exit code is of interest, a moment's delay is not.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            self.kill()
        return scores

    def _read(self) -> bool:
        """Take what has come, without waiting for the rest of a message, which a stopped worker does not send; False if the socket is closed."""
        try:
            while some := self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT):
                self._received += some
        except BlockingIOError:
            return True
        except ConnectionResetError:
            pass
        return False

    def stopped_seconds(self) -> float:
        """Seconds since it was first seen stopped (SIGSTOP, a debugger); 0: it is not."""
        assert self._process is not None
        if self.has_ended:
            return 0.0
        if psutil.Process(self._process.pid).status() not in _STOPPED:
            self._stopped_since = None
            return 0.0
        if self._stopped_since is None:
            self._stopped_since = time.monotonic()
        return time.monotonic() - self._stopped_since

    def kill_overdue(self) -> None:
        """Kill it because it is over time and has not ended by itself."""
        self._overdue = True
        self.kill()

    def kill(self) -> None:
        """Kill it and all that it started; `has_ended` is true afterwards."""
        assert self._process is not None
        self._kill_group()
        self._process.kill()
        self._process.wait()

    def end(self) -> str:
        """Kill its remaining processes; returns how it ended."""
        if self._process is None:
            return ""
        self.kill()
        reason = self._reason()
        self._socket.close()
        os.close(self._ended)
        os.close(self._report)
        self._process, self.is_ready, self.jobs = None, False, {}
        return reason

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # its number is its group's: it began a session
            os.killpg(self._process.pid, signal.SIGKILL)

    def _reason(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        report = os.pread(self._report, _REPORT_BYTES, 0).decode(errors="replace").strip()
        if report.startswith("Timeout"):
            return "\n".join([f"no result within {self._setup.timeout:g} s; it was at", *_stack(report)])
        if self._stopped_since is not None:
            return f"its process was stopped, and killed after {time.monotonic() - self._stopped_since:.0f} s of that"
        if self._overdue:
            return f"no result within {self._setup.timeout:g} s, and its process did not end by itself"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "\n".join([f"its process {how}", *_stack(report)])


def _as_sent(message: object) -> memoryview:
    """A message as `Connection.send` of Python 3.11 to 3.13 writes it, which does not return before the other side reads: its length, then
    its pickle."""
    content = pickle.dumps(message)
    number = len(content)
    length = struct.pack("!i", number) if number <= 0x7FFFFFFF else struct.pack("!iQ", -1, number)
    return memoryview(length + content)


def _taken(received: bytearray) -> Iterator[Any]:
    """The complete messages in `received`, in the form of `_as_sent`; they are removed from it."""
    while len(received) >= (start := 4 if received[:1] < b"\x80" else 12):
        (number,) = (
            struct.unpack_from("!i", received) if start == 4 else struct.unpack_from("!Q", received, 4)
        )
        if len(received) < start + number:
            return
        content = bytes(received[start : start + number])
        del received[: start + number]
        yield pickle.loads(content)


def _stack(report: str) -> list[str]:
    """The frames in faulthandler's report that are the reward's own, innermost first."""
    frames = [line for line in report.splitlines() if line.startswith("  File ")]
    own = list(itertools.takewhile(lambda frame: _WORKER not in frame and "/asyncio/" not in frame, frames))
    return own[:_MAX_FRAMES]
