"""The blows to one run of chaos.py: victims, moments and consequences."""

import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from chaos_run import KINDS, AttackedRun

# How often each is dealt; all of them have come once the deck is through.
DECK = (
    *((kind, name) for kind in KINDS if kind != "controller" for name in ("SIGKILL", "SIGKILL", "SIGSTOP")),
    *(("controller", name) for name in ("SIGKILL", "SIGTERM") for _ in range(2)),
)
# Moments: some time into the steps; while a checkpoint is written; while the run starts or recovers.
MOMENTS = {"step": 4, "save": 3, "recovery": 3}
STEP_SECONDS, SAVE_SECONDS, RECOVERY_SECONDS = 4.0, 0.2, 30.0  # within which a moment is drawn
RECOVERED_SECONDS = 400.0  # the longest that a run may take to notice a blow, and to make steps again
_POLL_SECONDS, _SAVE_POLL_SECONDS = 0.05, 0.005


@dataclass
class Blow:
    """A process that was hit, and what came of it.

    Attributes:
        phase: the run's at that moment: start, step or save.
        step: the last one that was finished by then.
        found_in: step and phase as the failure's report has them, where there is one.
        seconds: until it was noticed: a report of the failure, a word in the run's output, a reward worker buried, a stopped
            process ended, the end of the command; None: nobody needed the process any more.
        recovered: whether the run has finished another step, or itself, after that.
        lost: steps that had been finished and were made again.
    """

    run: int
    kind: str
    signal: str
    phase: str
    step: int
    pid: int
    found_in: str = ""
    seconds: float | None = None
    recovered: bool = False
    recovery_seconds: float | None = None
    lost: int = 0


@dataclass
class Deck:
    """Deals kinds and signals: at random, all of them as often as in DECK."""

    random: random.Random
    cards: list[tuple[str, str]] = field(default_factory=list)

    def deal(self, present: dict[str, list[int]]) -> tuple[str, str, int]:
        """The next card whose kind is there: kind, signal, process."""
        assert "controller" in present, present
        while True:
            for index, (kind, name) in enumerate(self.cards):
                if kind in present:
                    del self.cards[index]
                    return kind, name, self.random.choice(sorted(present[kind]))
            self.cards += self.random.sample(DECK, len(DECK))


@dataclass
class _Open:
    """A blow that the run has not recovered from yet; `signs`, `resumed`: of the run before."""

    blow: Blow
    at: float
    signs: int
    resumed: int
    steps_said: int = 0  # when it was noticed


@dataclass
class Attack:
    """Hits a run while `wanted`, and follows it until it has come to its end.

    Attributes:
        struck: is told of each blow.
    """

    run: AttackedRun
    number: int
    deck: Deck
    wanted: Callable[[], bool]
    struck: Callable[[Blow], None]
    _open: list[_Open] = field(default_factory=list)

    def go(self) -> None:
        """Returns when the run has come to its end, or does not recover."""
        self.run.begin()
        draw = self.deck.random
        while self.wanted() and not self._over:
            (moment,) = draw.choices(list(MOMENTS), list(MOMENTS.values()))
            card = None
            if moment == "recovery":
                self._pause(draw.uniform(0, RECOVERY_SECONDS), or_until=lambda: self._is_making_steps)
                if self._is_making_steps:
                    continue
            else:
                self._until(lambda: self._is_making_steps)
                if moment == "step":
                    self._pause(draw.uniform(0, STEP_SECONDS))
                elif not self._over:
                    card = self._deal()  # before, since a save does not wait for it
                    self._until(lambda: self.run.is_saving, _SAVE_POLL_SECONDS)
                    time.sleep(draw.uniform(0, SAVE_SECONDS))
            if self._over or not self.wanted():
                break
            blow = self._strike(card)
            if blow is None:
                break
            self._until(lambda: blow.seconds is not None)  # noqa: B023 - called before the next one
        self._until(lambda: False)

    @property
    def _is_making_steps(self) -> bool:
        """Whether it has recovered from all blows."""
        return not self._open and self.run.phase != "start"

    @property
    def _over(self) -> bool:
        return self.run.finished or self.run.failure is not None

    def _deal(self) -> tuple[str, str, int] | None:
        """The next victim and the blow; None: the run is over."""
        while not self._over:
            if "controller" in (present := self.run.victims()):
                return self.deck.deal(present)
            time.sleep(_POLL_SECONDS)  # it has just been started, or has ended
            self.run.poll()
        return None

    def _strike(self, card: tuple[str, str, int] | None) -> Blow | None:
        run = self.run
        while True:
            card = card or self._deal()
            if card is None:
                return None
            kind, name, pid = card
            phase, step, signs = run.phase, run.last_step, len(run.signs)
            at = time.monotonic()
            if run.hit(pid, signal.Signals[name]):
                break
            card = None  # it has ended by itself
            run.poll()
        blow = Blow(self.number, kind, name, phase, step, pid)
        self._open.append(_Open(blow, at, signs, run.resumed))
        self.struck(blow)
        return blow

    def _pause(self, seconds: float, or_until: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end or or_until())

    def _until(self, condition: Callable[[], bool], poll_seconds: float = _POLL_SECONDS) -> None:
        """Follow the run until a condition holds, or it is over."""
        while not self._over:
            self.run.poll()
            self._follow()
            if condition():
                return
            time.sleep(poll_seconds)
        self._follow()

    def _follow(self) -> None:
        run, now = self.run, time.monotonic()
        for one in list(self._open):
            blow, seconds = one.blow, now - one.at
            if blow.seconds is None and self._is_noticed(one):
                blow.seconds, one.steps_said = seconds, run.steps_said
                blow.found_in = _found_in(run.newest_report()) if "report" in run.signs[one.signs :] else ""
            if run.resumed > one.resumed:
                blow.lost, one.resumed = max(blow.lost, run.lost), run.resumed
            if run.finished or (blow.seconds is not None and run.steps_said > one.steps_said):
                blow.recovered, blow.recovery_seconds = True, seconds
                self._open.remove(one)
            elif run.failure is not None:
                self._open.remove(one)
            elif seconds > RECOVERED_SECONDS:
                run.give_up(f"{blow.signal} to {blow.kind}: no step within {RECOVERED_SECONDS:g} s")

    def _is_noticed(self, one: _Open) -> bool:
        if len(self.run.signs) > one.signs:
            return True
        # Of others than reward workers the end is noticed by Ray long before the run goes by it.
        ends = one.blow.kind == "reward worker" or one.blow.signal == "SIGSTOP"
        return ends and not psutil.pid_exists(one.blow.pid)


def _found_in(report: str | None) -> str:
    """Such as "step 3, step / generate" of a report's head."""
    facts = dict(re.findall(r"^(step|phase): (.*)$", report or "", re.MULTILINE))
    return f"step {facts['step']}, {facts['phase']}" if len(facts) == 2 else ""
