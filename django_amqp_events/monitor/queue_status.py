"""Report every queue of a service, its depth, and what it means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal

from amqp import exceptions as amqp_errors
from celery import Celery

from ..broker.provisioning import drift
from ..broker.provisioning.amqp_api import Amqp, session
from ..broker.provisioning.inspection import role_of
from ..broker.provisioning.management_api import ManagementApi
from ..broker.queue_depth import Depth
from ..broker.topology import (
    Names,
    Queue,
    Role,
    Topology,
)
from ..conf import Settings
from ..reasons import Reason

Severity = Literal["ok", "warning", "error", "unknown"]

#: Seconds to wait for the answers of workers.
ANSWERS_TIMEOUT: Final = 1.0

#: What workers answer to ``stats``, by their names.
Workers = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """A queue with its depth and status.

    Attributes:
        ready, consumers: live.
        unacked, total: from the management API, some seconds old; ``None`` without it. The total
            includes dead letters in transfer.
        paused: no worker consumes it now, but one will by itself.
        prefetch: prefetch counts of all workers together by reason, as in
            ``worker.prefetch.Why``; ``None`` if no worker was asked.
    """

    name: str
    role: Role
    state: Literal["ok", "missing", "stale", "unknown"]
    severity: Severity
    meaning: Reason
    ready: int | None = None
    unacked: int | None = None
    total: int | None = None
    consumers: int | None = None
    paused: bool = False
    prefetch: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """All queues of a service.

    Attributes:
        exact: the management API was read, so totals and left-over queues are included.
    """

    queues: tuple[QueueStatus, ...]
    exact: bool
    version: str = ""
    vhost: str = "/"

    @property
    def result(self) -> Literal["ok", "error", "unknown"]:
        """Return the worst severity; ``error`` is worse than ``unknown``."""
        severities = {queue.severity for queue in self.queues}
        if "error" in severities:
            return "error"
        return "unknown" if "unknown" in severities else "ok"


def status(
    app: Celery,
    settings: Settings,
    topology: Topology,
    *,
    api: ManagementApi | None = None,
    ask: float | None = None,
) -> Status:
    """Return the depth, consumers and status of every queue.

    Args:
        ask: seconds to wait for the answers of workers; ``None`` asks them only if events wait in a
            queue without consumers. A solo worker does not answer while it handles an event, and
            none without remote control.

    Raises:
        BrokerUnavailableError: no connection, or it broke.
        ManagementApiError: the management API is unreadable or belongs to another broker.
    """
    names = topology.names
    with session(app, settings) as amqp:
        stats: dict[str, dict[str, Any]] = {}
        queues: list[tuple[Queue, bool]] = [(queue, False) for queue in topology.queues]
        if api is not None:
            api.check_cluster(amqp.server)
            stats = {queue["name"]: queue for queue in api.queues()}
            declared = {queue.name for queue in topology.queues}
            queues += [
                (Queue(name=name, role=role_of(names, name)), True)
                for name, of_queue in stats.items()
                if name not in declared
                and drift.left_over_queue(names, name, of_queue.get("arguments") or {})
            ]
        answers = cache(partial(_ask_workers, amqp, app, ask or ANSWERS_TIMEOUT))
        paused = cache(lambda: _paused(answers()))
        found_queues = tuple(
            _status_of(
                amqp,
                names,
                queue,
                stats.get(queue.name, {}),
                stale=stale,
                paused=paused,
                prefetch=_prefetch(answers(), queue.name) if ask is not None else None,
            )
            for queue, stale in queues
        )
        return Status(
            queues=found_queues,
            exact=api is not None,
            version=str(amqp.server.get("version", "")),
            vhost=amqp.vhost,
        )


def _ask_workers(amqp: Amqp, app: Celery, timeout: float) -> Workers:
    try:
        return amqp.ask_workers(app, timeout)
    except amqp_errors.ChannelError:
        return {}  # this user may not use remote control


def _parts(workers: Workers) -> Iterator[Mapping[str, Any]]:
    """Return what the bootsteps of workers say of their queues."""
    for answer in workers.values():
        yield answer.get("amqp_events") or {}


def _paused(workers: Workers) -> Collection[str]:
    """Return the queues that workers do not consume now, but will by themselves."""
    return {queue for part in _parts(workers) for queue in part.get("paused", ())}


def _prefetch(workers: Workers, queue: str) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for part in _parts(workers):
        windows = part.get("prefetch_counts") or {}
        if queue in windows:
            count, why = windows[queue]
            counts[why] += count
    return dict(sorted(counts.items()))


def _status_of(
    amqp: Amqp,
    names: Names,
    queue: Queue,
    stats: Mapping[str, Any],
    *,
    stale: bool,
    paused: Callable[[], Collection[str]],
    prefetch: Mapping[str, int] | None,
) -> QueueStatus:
    build = partial(QueueStatus, name=queue.name, role=queue.role, prefetch=prefetch)
    if "leader" in stats and not stats["leader"]:
        # Asked for its depth, RabbitMQ closes the connection, or answers 0 whatever is in it.
        return build(state="unknown", severity="error", meaning=Reason("queue-no-leader"))
    try:
        depth = amqp.depth(queue.name)
    except amqp_errors.ChannelError as exc:
        meaning = Reason("queue-unreadable", reply=exc.reply_text)
        return build(state="unknown", severity="unknown", meaning=meaning)
    if depth is None:
        return build(state="missing", severity="error", meaning=Reason("queue-missing"))
    unacked = stats.get("messages_unacknowledged")
    stuck = 0
    if stats.get("messages") is not None:
        ready_then = stats.get("messages_ready") or 0
        stuck = max(0, stats["messages"] - ready_then - (unacked or 0))
    total = depth.ready + (unacked or 0) + stuck if stats.get("messages") is not None else None
    idle = not stale and queue.role == "handler" and depth.ready and not depth.consumers
    # A worker that is down has no unacked events; one with long runs does not consume for now.
    is_paused = bool(idle and (unacked or queue.name in paused()))
    if stale:
        severity, meaning = _stale_meaning(names, queue, total or depth.ready, depth.consumers)
    elif stuck and queue.role not in ("dead", "abyss"):
        severity, meaning = _stuck_meaning(amqp, queue, stuck)
    else:
        severity, meaning = _meaning(
            names, queue, depth, unacked=unacked or 0, stuck=stuck, paused=is_paused
        )
    return build(
        state="stale" if stale else "ok",
        severity=severity,
        meaning=meaning,
        ready=depth.ready,
        unacked=unacked,
        total=total,
        consumers=depth.consumers,
        paused=is_paused,
    )


def _stale_meaning(
    names: Names, queue: Queue, messages: int, consumers: int
) -> tuple[Severity, Reason]:
    if queue.role == "delay" and messages:
        return "ok", Reason("queue-stale-delayed", number=messages)
    # A window has copies of events that the handler's queue got.
    if messages and not consumers and not names.is_window(queue.name):
        return "error", Reason("queue-stale-events", count=messages, name=queue.name)
    return "warning", Reason("queue-stale")


def _stuck_meaning(amqp: Amqp, queue: Queue, stuck: int) -> tuple[Severity, Reason]:
    """Distinguish dead letters that cannot be transferred from those in transfer."""
    target = queue.arguments.get("x-dead-letter-exchange", "")
    what = Reason("queue-past-due" if queue.role == "delay" else "queue-rejected", count=stuck)
    try:
        there = not target or amqp.exchange_exists(target)
    except amqp_errors.ChannelError:
        there = True
    if not there:
        return "error", Reason("queue-dead-letters-kept", what=what, exchange=target)
    # RabbitMQ retries a dead letter after three minutes.
    return "warning", Reason("queue-dead-letters", what=what, exchange=target)


def _meaning(
    names: Names, queue: Queue, depth: Depth, *, unacked: int, stuck: int, paused: bool
) -> tuple[Severity, Reason]:
    own = queue.name.removeprefix(names.prefix)
    ready, consumers = depth.ready, depth.consumers
    match queue.role:
        case "handler" if paused:
            return "ok", Reason("queue-paused", count=ready, name=own)
        case "graveyard" if not ready and not unacked:
            return "ok", Reason("empty")  # a reaper runs while there is something to isolate
        case "handler" | "archive" | "graveyard" as role:
            if not ready and unacked:
                return "ok", Reason(f"queue-active-{role}", count=unacked)
            what = (
                Reason(f"queue-waiting-{role}", count=ready, name=own) if ready else Reason("empty")
            )
            if not consumers:
                remedy = Reason(f"queue-remedy-{role}")
                unconsumed = Reason("queue-unconsumed", what=what, remedy=remedy)
                return "error" if ready else "ok", unconsumed
            return "ok", Reason("queue-consumed", what=what) if ready else what
        case "history":
            return "ok", Reason("queue-history", number=ready)
        case "delay" if ready:
            seconds = (queue.arguments.get("x-message-ttl") or 0) // 1000
            return "ok", Reason("queue-delayed", number=ready, seconds=seconds)
        case "dead" | "abyss" if ready or unacked or stuck:
            poison = max(ready, unacked + stuck, 1)
            if queue.role == "abyss":
                return "error", Reason("queue-poison-abyss", count=poison)
            code = "queue-poison-consumed" if consumers else "queue-poison-unconsumed"
            return "error", Reason(code, count=poison)
        case _:
            return "ok", Reason("empty")
