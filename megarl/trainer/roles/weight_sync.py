"""Sends the actor's weights to all engines: connected once, sent before every rollout, and before every validation to engines of its own.

Where engines serve adapters, the weights go with the first version, and again when an engine has lost them.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from megarl.cluster import WorkerLost
from megarl.rollout.engine import SyncReport
from megarl.trainer.roles.types import SyncFacts, VersionFacts
from megarl.trainer.workers.dispatch import ENGINES
from megarl.weight_sync.sender import SendReport
from megarl.weight_sync.sync_plan import SyncPlan

if TYPE_CHECKING:
    from megarl.cluster import WorkerGroup
    from megarl.trainer.roles.types import Roles
    from megarl.trainer.run.run import Run


def connect(run: Run, actor: WorkerGroup, engines: WorkerGroup, plan: SyncPlan, timeout: float) -> SyncFacts:
    """Give each rank its share of the plan, and tell the engines the addresses of the actor's ranks.

    To be called again after an engine was restarted.

    Args:
        timeout: seconds that the two sides wait for each other.
    """
    sources, targets = plan.shares()
    to = engines.role
    one_machine = len({*actor.hosts, *engines.hosts}) == 1
    hosts = ["127.0.0.1" if one_machine else host for host in actor.hosts]
    per_rank = [(share, host, timeout, to) for share, host in zip(sources, hosts, strict=True)]
    addresses = run.wait(actor.call_each("open_outbox", per_rank))
    if (hub := addresses[0].hub) is not None:
        run.wait(actor.call("join_exchange", hub, to))
    tp, parts = plan.engines.tp, engines.parts
    each = tp // parts
    of_processes = [targets[first : first + each] for first in range(0, len(targets), each)]
    written = run.wait(
        engines.call_parts("write_inboxes", [(shares, addresses, timeout) for shares in of_processes])
    )
    of_engines = [written[first : first + parts] for first in range(0, len(written), parts)]
    run.wait(engines.call_each("connect", [(list(chain(*inboxes)),) for inboxes in of_engines]))

    exchanges = [share.exchange for share in (*sources, *targets) if share.exchange is not None]
    peers = max((len(exchange.peers) for exchange in exchanges), default=0)

    def facts(complete: bool) -> VersionFacts:
        first = 0 if complete else plan.frozen
        received = tuple(plan.bytes_received(complete))
        account = plan.account(complete) | {"peers_max": peers}
        return VersionFacts(account, received, len(plan.buckets) - first)

    adapters = facts(complete=False) if plan.adapters is not None else None
    return SyncFacts(facts(complete=True), adapters, tp, plan.skip_unchanged)


def sync_weights(run: Run, roles: Roles, version: int) -> dict[str, float]:
    """Give every engine the actor's weights as `version`; nothing is served in between.

    If an engine is lost during it and can be restarted, the sync is repeated.

    Returns: bytes by link, memory, and the seconds of each part, as metrics.
    """
    while True:
        try:
            metrics = _sync_once(run, roles.actor.group, roles.engines, roles.sync, version)
        except WorkerLost as failure:
            roles.restarts.replace_lost(failure)
            with roles.memory.held("sync"):
                pass  # back onto the devices, which were freed for the start of an engine
        else:
            roles.restarts.served(version)
            run.mark(f"weights {version}")
            return metrics


def sync_eval_weights(run: Run, roles: Roles, version: int) -> dict[str, float]:
    """Give the engines of concurrent validation, none of which generates, the actor's weights as `version`; lost ones are replaced
    before.

    Returns: as `sync_weights`, with names that begin with "eval_sync/".
    """
    found, failure = roles.eval, None
    assert found is not None
    while True:
        found.restarts.replace_lost(failure)
        try:
            metrics = _sync_once(run, roles.actor.group, found.group, found.sync, version)
        except WorkerLost as loss:
            failure = loss
        else:
            found.restarts.served(version)
            run.mark(f"weights {version} for validation")
            return {f"eval_{name}": value for name, value in metrics.items()}


def _sync_once(
    run: Run, actor: WorkerGroup, engines: WorkerGroup, facts: SyncFacts, version: int
) -> dict[str, float]:
    phase = "sync" if engines.role == ENGINES else f"{engines.role}_sync"
    with run.timed(f"{phase}_begin"):
        held = run.wait(engines.call("begin_update", version))
    held_by_rank = dict(enumerate(engine for engine in held for _ in range(facts.engine_ranks)))
    served = facts.adapters is not None
    complete = not served or None in held
    with run.timed(f"{phase}_send"):
        known = held_by_rank if facts.skip_unchanged else None
        sending = actor.call(
            "send_weights", version, known, merged=not served, complete=complete, to=engines.role
        )
        results = run.wait([*sending, *engines.call("receive_weights", complete)])
    with run.timed(f"{phase}_finish"):
        reports = run.wait(engines.call("finish_update"))
    return sync_metrics(facts.complete if complete else facts.adapters, results[: len(sending)], reports)


def sync_metrics(facts: VersionFacts, sent: list[SendReport], reports: list[SyncReport]) -> dict[str, float]:
    """The plan's bytes, and the ranks' measurements: bytes, memory, and seconds of the slowest rank in each phase."""
    written = [count for report in reports for count in report.bytes_written]
    kept = [count for report in reports for count in report.bytes_kept]
    drafts = sum(sum(report.bytes_draft) for report in reports)
    for rank, (planned, *found) in enumerate(zip(facts.received, written, kept, strict=True)):
        if planned != sum(found):
            raise RuntimeError(f"engine rank {rank} took {sum(found)} bytes, the plan has {planned} for it")
    seconds = {name: max(one.seconds[name] for one in sent) for name in sent[0].seconds}
    received = {
        name: max(max(report.phase_seconds[name]) for report in reports) for name in reports[0].phase_seconds
    }
    return {
        **{f"sync/{name}": float(value) for name, value in facts.account.items()},
        "sync/bytes_unchanged": float(sum(kept)),
        **({"sync/bytes_draft_verified": float(drafts)} if drafts else {}),
        "sync/bytes_written_max_per_rank": float(max(written)),
        "sync/trainer_buffer_bytes_max": float(max(one.buffer_bytes for one in sent)),
        "sync/engine_buffer_bytes_max": float(max(max(report.buffer_bytes) for report in reports)),
        "sync/buckets": float(facts.num_buckets),
        "sync/seconds_pack": seconds["pack"],
        "sync/seconds_wait_for_engine": seconds["wait"],
        "sync/seconds_wait_for_trainer": received["wait"],
        "sync/seconds_write": received["write"],
        "sync/seconds_verify": received["verify"],
    }
