"""Report every queue of a service, its depth, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from amqp import exceptions as amqp_errors
from celery import Celery

from ..broker.provisioning import drift
from ..broker.provisioning.amqp_api import Amqp, Depth, session
from ..broker.provisioning.inspection import REMEDY, role_of
from ..broker.provisioning.management_api import ManagementApi
from ..broker.topology import (
    Names,
    Queue,
    Role,
    Topology,
)
from ..conf import Settings

# -- status -------------------------------------------------------------------------------

Severity = Literal["ok", "warning", "error", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """A queue with its depth and status.

    Attributes:
        state: as in a :class:`Report`; ``missing`` queues have no figures.
        ready: messages that wait for a consumer.
        unacked: messages in the hands of consumers; ``None`` without the management API.
        total: all messages, dead letters under way included; ``None`` likewise. Management
            figures are some seconds old.
        consumers: live.
        published, delivered: messages that come in and go out per second; ``None`` where the
            management API has no statistics of it.
        meaning: one sentence.
    """

    name: str
    role: Role
    state: Literal["ok", "missing", "stale", "unknown"]
    severity: Severity
    meaning: str
    ready: int | None = None
    unacked: int | None = None
    total: int | None = None
    consumers: int | None = None
    published: float | None = None
    delivered: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """All queues of a service.

    Attributes:
        exact: the management API was read: totals, and queues that are left over.
    """

    queues: tuple[QueueStatus, ...]
    exact: bool
    version: str = ""
    vhost: str = "/"

    @property
    def result(self) -> Literal["ok", "error", "unknown"]:
        """The worst of all: an error first, then what could not be seen."""
        severities = {queue.severity for queue in self.queues}
        if "error" in severities:
            return "error"
        return "unknown" if "unknown" in severities else "ok"


def status(
    app: Celery, settings: Settings, topology: Topology, *, api: ManagementApi | None = None
) -> Status:
    """Return the depth, consumers and status of every queue.

    Raises:
        BrokerUnavailableError: no connection, or it broke.
        ManagementApiError: the management API cannot be read, or is that of another broker.
    """
    names = topology.names
    with session(app, settings) as amqp:
        figures: dict[str, dict[str, Any]] = {}
        queues: list[tuple[Queue, bool]] = [(queue, False) for queue in topology.queues]
        if api is not None:
            api.check_cluster(amqp.server)
            figures = {queue["name"]: queue for queue in api.queues()}
            declared = {queue.name for queue in topology.queues}
            queues += [
                (Queue(name=name, role=role_of(names, name)), True)
                for name, found in figures.items()
                if name not in declared
                and drift.left_over_queue(names, name, found.get("arguments") or {})
            ]
        found_queues = tuple(
            _status_of(amqp, names, queue, figures.get(queue.name, {}), stale=stale)
            for queue, stale in queues
        )
        return Status(
            queues=found_queues,
            exact=api is not None,
            version=str(amqp.server.get("version", "")),
            vhost=amqp.vhost,
        )


def _status_of(
    amqp: Amqp, names: Names, queue: Queue, figures: Mapping[str, Any], *, stale: bool
) -> QueueStatus:
    try:
        depth = amqp.depth(queue.name)
    except amqp_errors.ChannelError as exc:
        return QueueStatus(
            name=queue.name,
            role=queue.role,
            state="unknown",
            severity="unknown",
            meaning=f"cannot be seen: {exc.reply_text}",
        )
    if depth is None:
        return QueueStatus(
            name=queue.name,
            role=queue.role,
            state="missing",
            severity="error",
            meaning=f"missing: {REMEDY}",
        )
    unacked = figures.get("messages_unacknowledged")
    stuck = 0
    if figures.get("messages") is not None:
        # Ready and consumers are live; the rest is as old as the API's figures.
        ready_then = figures.get("messages_ready") or 0
        stuck = max(0, figures["messages"] - ready_then - (unacked or 0))
    total = depth.ready + (unacked or 0) + stuck if figures.get("messages") is not None else None
    if stale:
        severity, meaning = _stale_meaning(names, queue, total or depth.ready, depth.consumers)
    elif stuck and queue.role not in ("dead", "abyss"):
        severity, meaning = _stuck_meaning(amqp, queue, stuck)
    else:
        severity, meaning = _meaning(names, queue, depth, unacked=unacked or 0, stuck=stuck)
    return QueueStatus(
        name=queue.name,
        role=queue.role,
        state="stale" if stale else "ok",
        severity=severity,
        meaning=meaning,
        ready=depth.ready,
        unacked=unacked,
        total=total,
        consumers=depth.consumers,
        published=_rate(figures, "publish_details"),
        delivered=_rate(figures, "deliver_get_details"),
    )


def _rate(figures: Mapping[str, Any], what: str) -> float | None:
    found = ((figures.get("message_stats") or {}).get(what) or {}).get("rate")
    return float(found) if isinstance(found, (int, float)) else None


def _stale_meaning(
    names: Names, queue: Queue, messages: int, consumers: int
) -> tuple[Severity, str]:
    if drift.is_shadow(names, queue.name):
        return "error", f"a recreation was interrupted: {REMEDY} to finish it"
    if queue.role == "delay" and messages:
        return "ok", f"not declared any more; {messages} delayed return by themselves"
    if messages and not consumers:
        return "error", (
            f"not declared any more, and {_events(messages)} in it: declare its handler again "
            f"and start a worker; or run `manage.py events_recover {queue.name}`, and replay them"
        )
    return "warning", f"not declared any more: {REMEDY} --delete-stale"


def _stuck_meaning(amqp: Amqp, queue: Queue, stuck: int) -> tuple[Severity, str]:
    """Tell dead letters that cannot leave from those that are just leaving."""
    target = queue.arguments.get("x-dead-letter-exchange", "")
    what = f"{_events(stuck)} past due" if queue.role == "delay" else f"{_events(stuck)} rejected"
    try:
        there = not target or amqp.exchange_exists(target)
    except amqp_errors.ChannelError:
        there = True
    if not there:
        return "error", f"{what}, but {target} is missing: {REMEDY}"
    # RabbitMQ repeats a dead letter that found no way after three minutes.
    return "warning", (
        f"{what}, on the way to {target}: if that lasts more than 3 minutes, {REMEDY} --check"
    )


def _meaning(
    names: Names, queue: Queue, depth: Depth, *, unacked: int, stuck: int
) -> tuple[Severity, str]:
    own = queue.name.removeprefix(names.prefix)
    ready, consumers = depth.ready, depth.consumers
    match queue.role:
        case "handler":
            if ready and not consumers:
                return "error", (
                    f"{_events(ready, verb=True)} for {own}, nobody consumes: start a worker"
                )
            if ready:
                return "ok", f"{_events(ready, verb=True)} for {own}, consumed"
            if unacked:
                return "ok", f"{_events(unacked)} being handled"
            return "ok", "empty" if consumers else "empty, nobody consumes: start a worker"
        case "delay":
            seconds = (queue.arguments.get("x-message-ttl") or 0) // 1000
            if ready:
                return "ok", f"{ready} delayed, the next returns within {seconds} s"
            return "ok", "empty"
        case "archive":
            # Failures, and the outcomes of replays.
            return _emptied_by(
                (ready, unacked, consumers),
                "message",
                ("be mirrored", "being mirrored"),
                "run `manage.py events_mirror` or events_worker",
            )
        case "graveyard":
            return _emptied_by(
                (ready, unacked, consumers),
                "isolated event",
                ("be run alone", "being run alone"),
                "run `manage.py events_reaper` or events_worker",
            )
        case "dead" if ready or unacked or stuck:
            number = max(ready, unacked + stuck, 1)
            what = f"poison: {_events(number)} that ended the reaper"
            if consumers:
                return "error", f"{what}, on the way to the archive, unread; look at its log"
            return "error", f"{what}, and nobody archives: run `manage.py events_reaper`"
        case "abyss" if ready or unacked or stuck:
            number = max(ready, unacked + stuck, 1)
            return "error", (
                f"poison: {_events(number)} that killed whoever took them; look at the logs of "
                f"workers and reaper, then run `manage.py events_recover`"
            )
        case _:
            return "ok", "empty"


def _emptied_by(
    figures: tuple[int, int, int], kind: str, purpose: tuple[str, str], remedy: str
) -> tuple[Severity, str]:
    """Describe a queue that one of our processes empties.

    Args:
        figures: ready, unacked, consumers.
        purpose: what it waits for, and what is being done with what is unacked.
    """
    ready, unacked, consumers = figures
    if ready:
        number = f"{ready} {kind}{'' if ready == 1 else 's'} wait{'s' if ready == 1 else ''}"
        waiting = f"{number} to {purpose[0]}"
        if consumers:
            return "ok", f"{waiting}, consumed"
        return "error", f"{waiting}, nobody consumes: {remedy}"
    if unacked:
        return "ok", f"{unacked} {kind}{'' if unacked == 1 else 's'} {purpose[1]}"
    return "ok", "empty" if consumers else f"empty, nobody consumes: {remedy}"


def _events(number: int, *, verb: bool = False) -> str:
    noun = "event" if number == 1 else "events"
    return f"{number} {noun}" + (f" wait{'s' if number == 1 else ''}" if verb else "")
