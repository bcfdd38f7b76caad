"""Compare what a service declares with what is on the broker, and bring the two together.

The functions behind ``events_declare`` and ``events_status``, and what a worker does about its
topology when it starts. Two ways of seeing:

* **plain AMQP** (always there): existence and arguments of every declared exchange and queue.
  It can neither see bindings nor what is left over, and says ``unknown``.
* **the management API** (``MANAGEMENT_URL``): exact, bindings, policies and left-overs included.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from amqp import exceptions as amqp_errors
from celery import Celery

from ..broker import unconnected
from ..conf import Settings
from ..exceptions import BrokerRequirementError, TopologyDriftError, TopologyError
from ..topology import Binding, Exchange, Names, Queue, Role, Topology
from . import drift
from .amqp_api import (
    Amqp,
    Depth,
    Request,
    requirements,
    session,
    to_bind,
    to_declare,
    to_unbind,
)
from .drift import Difference, Item, Plan, Report, Step, Trouble, plan
from .management_api import ManagementApi, ManagementApiError
from .replacement import Replacement

__all__ = [
    "Applied",
    "Difference",
    "Item",
    "ManagementApi",
    "ManagementApiError",
    "Plan",
    "QueueStatus",
    "Report",
    "Status",
    "Step",
    "Trouble",
    "apply",
    "declare",
    "inspect",
    "management",
    "plan",
    "prepare",
    "requirements",
    "status",
    "verify",
]

logger = logging.getLogger(__name__)

_REMEDY: Final = "run manage.py events_declare"


def management(app: Celery, settings: Settings) -> ManagementApi | None:
    """Return the management API of the Celery app's vhost, ``None`` without ``MANAGEMENT_URL``.

    Raises:
        ManagementApiError: the URL cannot be one.
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    if not settings.management_url:
        return None
    vhost = unconnected(app).virtual_host or "/"
    return ManagementApi(settings.management_url, vhost=vhost)


# -- inspect ------------------------------------------------------------------------------


def inspect(
    app: Celery, settings: Settings, topology: Topology, *, api: ManagementApi | None = None
) -> Report:
    """Compare what is declared with what is on the broker; nothing is changed.

    Args:
        api: see bindings, policies and left-overs too; without it they are ``unknown``.

    Raises:
        BrokerUnavailableError: no connection, or it broke.
        ManagementApiError: the management API cannot be read, or is that of another broker.
    """
    with session(app, settings) as amqp:
        items = amqp.inspect([*topology.exchanges, *topology.queues])
        if api is not None:
            api.check_cluster(amqp.server)
            if amqp.vhost != api.vhost:
                raise ManagementApiError(
                    f"the management API was asked for vhost {api.vhost!r}, but the Celery app "
                    f"is connected to vhost {amqp.vhost!r}"
                )
        report = Report(
            topology=topology,
            items=(*items, *_unseen_bindings(topology, items)),
            version=str(amqp.server.get("version", "")),
            vhost=amqp.vhost,
        )
        # Asked last: the answer may be that the connection is closed.
        troubles = requirements(amqp, topology.names, queue_type=settings.queue_type)
        report = replace(report, troubles=troubles)
    return report if api is None else _exact(report, items, api)


def _unseen_bindings(topology: Topology, items: Sequence[Item]) -> list[Item]:
    missing = {(item.kind, item.name) for item in items if item.state == "missing"}
    return [
        Item(entity=binding, state="missing")
        if ("queue", binding.queue) in missing or ("exchange", binding.exchange) in missing
        else Item(
            entity=binding,
            state="unknown",
            note="plain AMQP cannot see bindings; set MANAGEMENT_URL",
        )
        for binding in topology.bindings
    ]


def _exact(report: Report, items: Sequence[Item], api: ManagementApi) -> Report:
    """Add what only the management API shows."""
    topology, names = report.topology, report.topology.names
    policies = api.policies()
    # Where policies may not be seen, what they do to each queue may be.
    found_queues = api.queues() if policies is None else api.declared_queues()
    queues = {queue["name"]: queue for queue in found_queues}
    exchanges = {exchange["name"]: exchange for exchange in api.exchanges()}
    bindings = [
        found
        for found in api.bindings()
        if found.get("source") and found.get("destination_type") == "queue"
    ]
    seen = [_with_arguments(item, queues if item.kind == "queue" else exchanges) for item in items]
    declared_queues = {queue.name for queue in topology.queues}
    declared_exchanges = {exchange.name for exchange in topology.exchanges}
    found_bindings = {_binding(found): found for found in bindings}
    for binding in topology.bindings:
        found = found_bindings.get(binding)
        state: Literal["ok", "missing"] = "missing" if found is None else "ok"
        seen.append(Item(entity=binding, state=state))
    declared_bindings = set(topology.bindings)
    for binding, found in found_bindings.items():
        if (
            binding.queue in declared_queues
            and (binding not in declared_bindings or found.get("arguments"))
            and not drift.is_shadow(names, binding.exchange)
        ):
            seen.append(Item(entity=binding, state="stale", note="not declared any more"))
    for name, queue in queues.items():
        if name not in declared_queues and drift.left_over_queue(
            names, name, queue.get("arguments") or {}
        ):
            entity = Queue(
                name=name, arguments=queue.get("arguments") or {}, role=_role(names, name)
            )
            seen.append(Item(entity=entity, state="stale", note=_why_stale(names, name)))
    for name, exchange in exchanges.items():
        if name not in declared_exchanges and drift.left_over_exchange(names, name):
            entity_x = Exchange(name=name, type=exchange["type"], role="delay")
            seen.append(Item(entity=entity_x, state="stale", note=_why_stale(names, name)))
    troubles = [trouble for trouble in report.troubles if trouble.severity == "error"]
    troubles += _unknown_flags(report, api)
    troubles += _policies(topology, queues, exchanges, policies, api.user)
    return replace(report, items=tuple(seen), troubles=tuple(troubles), exact=True)


def _binding(found: Mapping[str, Any]) -> Binding:
    return Binding(
        exchange=found["source"], queue=found["destination"], routing_key=found["routing_key"]
    )


def _role(names: Names, name: str) -> Role:
    return "delay" if name.startswith(names.infrastructure("delay.")) else "handler"


def _why_stale(names: Names, name: str) -> str:
    if drift.is_shadow(names, name):
        return "left by an interrupted --recreate-empty; events_declare moves what it holds back"
    return "not declared any more"


def _with_arguments(item: Item, found: Mapping[str, Mapping[str, Any]]) -> Item:
    """Replace the one difference that RabbitMQ told by all that the management API shows."""
    entity = item.entity
    there = found.get(item.name)
    if there is None or item.state == "missing" or isinstance(entity, Binding):
        # The API lists what exists a moment later; AMQP knows better.
        return item
    if isinstance(entity, Queue):
        declared: dict[str, Any] = dict(entity.arguments)
        actual = {"x-queue-type": there.get("type"), **(there.get("arguments") or {})}
    else:
        declared = {"type": entity.type, "internal": False, **entity.arguments}
        actual = {
            "type": there.get("type"),
            "internal": bool(there.get("internal")),
            **(there.get("arguments") or {}),
        }
    declared |= {"durable": True, "auto_delete": False}
    actual |= {key: there.get(key) for key in ("durable", "auto_delete")}
    differences = tuple(
        Difference(argument=key, declared=_text(declared, key), found=_text(actual, key))
        for key in sorted(declared.keys() | actual.keys())
        if _text(declared, key) != _text(actual, key)
    )
    own = [difference for difference in differences if difference.argument in declared]
    if item.state == "different" or own:
        return replace(item, state="different", differences=differences or item.differences)
    # Arguments that RabbitMQ does not compare, such as where a leader is placed.
    note = "; ".join(map(str, differences))
    return replace(item, state="ok", note=note)


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unknown_flags(report: Report, api: ManagementApi) -> list[Trouble]:
    """Ask the API about feature flags that could not be probed."""
    unknown = [trouble for trouble in report.troubles if trouble.severity == "unknown"]
    if not unknown:
        return []
    flags = api.feature_flags()
    if flags is None:
        return unknown
    return [
        Trouble(
            severity="error",
            message=f"RabbitMQ {report.version} has the feature flag {flag} disabled, without "
            f"which dead letters can be lost",
            remedy=f"run rabbitmqctl enable_feature_flag {flag}",
        )
        for flag in ("quorum_queue", "stream_queue")
        if flags.get(flag, "enabled") != "enabled"
    ]


def _policies(
    topology: Topology,
    queues: Mapping[str, Mapping[str, Any]],
    exchanges: Mapping[str, Mapping[str, Any]],
    policies: Sequence[Mapping[str, Any]] | None,
    user: str,
) -> list[Trouble]:
    """Find policies that would change what becomes of events."""
    hits: dict[tuple[str, str], list[str]] = {}
    unseen = False
    for queue in topology.queues:
        found = queues.get(queue.name)
        if policies is not None:
            # Not what the API calls effective: that is seconds old.
            for policy in _effective(policies, queue):
                _collect(hits, repr(policy["name"]), policy.get("definition"), queue.name)
        elif found is None:
            unseen = True
        else:
            by = [found.get("policy"), found.get("operator_policy")]
            who = " and ".join(repr(name) for name in by if name)
            _collect(hits, who, found.get("effective_policy_definition"), queue.name)
    troubles = [
        Trouble(
            severity="error",
            message=f"policy {who} sets {keys} on {_some(names)}, which changes what becomes of "
            f"events (one queue that refuses or drops is felt by all)",
            remedy="narrow its pattern so that it leaves this service's queues alone, or clear it",
        )
        for (who, keys), names in hits.items()
    ]
    replay = exchanges.get(topology.names.replay, {})
    for policy in policies or ():
        if policy["name"] == replay.get("policy") and "alternate-exchange" in policy["definition"]:
            troubles.append(
                Trouble(
                    severity="error",
                    message=f"policy {policy['name']!r} gives {topology.names.replay} an "
                    f"alternate exchange, so that a replay to nowhere would seem to arrive",
                    remedy="narrow its pattern so that it leaves this exchange alone, or clear it",
                )
            )
    if unseen:
        troubles.append(
            Trouble(
                severity="unknown",
                message=f"user {user!r} may not see policies, so whether one will limit the "
                f"queues that are missing is not known",
                remedy="give it the tag 'policymaker' or 'administrator', or look again once "
                "they are declared",
            )
        )
    return troubles


def _collect(
    hits: dict[tuple[str, str], list[str]], who: str, definition: object, queue: str
) -> None:
    # A queue without a policy has an empty list for a definition.
    keys = drift.POLICY_CONFLICTS.intersection(
        definition if isinstance(definition, Mapping) else ()
    )
    if keys:
        hits.setdefault((who, ", ".join(sorted(keys))), []).append(queue)


def _effective(policies: Iterable[Mapping[str, Any]], queue: Queue) -> list[Mapping[str, Any]]:
    """Return the policy and the operator policy that a queue will get when it is declared."""
    kind = queue.arguments.get("x-queue-type", "quorum")
    chosen: dict[bool, Mapping[str, Any]] = {}
    for policy in sorted(policies, key=lambda policy: policy.get("priority") or 0):
        if policy.get("apply-to") not in ("all", "queues", f"{kind}_queues"):
            continue
        try:
            matches = re.search(policy["pattern"], queue.name)
        except re.error:  # PCRE that Python does not know: better a warning too many
            matches = True  # type: ignore[assignment]
        if matches:
            chosen[bool(policy.get("operator"))] = policy
    return list(chosen.values())


def _some(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# -- apply --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of a plan.

    Attributes:
        done: the steps that were carried out.
        refused: steps that were left undone, each with the reason: queues that turned out to
            hold messages or to have consumers. They are bound as before.
    """

    done: tuple[Step, ...] = ()
    refused: tuple[tuple[Step, str], ...] = ()


Progress = Callable[[Step, int, int], None]
#: Steps that look before they leap; all others are requests that are sent ahead.
_LATER: Final = frozenset({"recreate", "drain", "delete"})


def apply(
    app: Celery,
    settings: Settings,
    plan: Plan,
    *,
    api: ManagementApi | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
    wait: float = 0.0,
    patience: float = 60.0,
) -> Applied:
    """Carry out a plan.

    Args:
        api: needed for steps that delete or recreate.
        progress: called after each step with the step, its number and the number of steps.
        notice: called with a sentence when something is waited for.
        wait: seconds that a queue is given to run empty, and its consumers to leave.
        patience: seconds to wait for fresh figures of the management API.

    Raises:
        TopologyDriftError: the plan has refusals; nothing was changed.
        TopologyError: the broker refused a step; those before it are done.
        BrokerUnavailableError: no connection, or it broke.
    """
    if plan.refusals:
        raise TopologyDriftError("nothing was changed:" + _joined(plan.refusals))
    if not plan.steps:
        return Applied()
    done: list[Step] = []
    refused: list[tuple[Step, str]] = []

    def finish(step: Step, reason: str = "") -> None:
        if reason:
            refused.append((step, reason))
        else:
            done.append(step)
        if progress is not None:
            progress(step, len(done) + len(refused), len(plan.steps))

    with session(app, settings) as amqp:
        now = [step for step in plan.steps if step.action not in _LATER]
        later = [step for step in plan.steps if step.action in _LATER]
        answers = amqp.ask([_request(step) for step in now])
        current = plan.steps[0]
        try:
            for current in now:
                next(answers)
                finish(current)
            if not later:
                return Applied(done=tuple(done))
            current = later[0]
            if api is None:
                raise TopologyError(f"to {current} the management API is needed")
            replacement = Replacement(
                app,
                settings,
                plan.report.topology,
                amqp,
                api,
                wait=wait,
                patience=patience,
                notice=notice,
            )
            _replace(replacement, amqp, plan, finish)
        except amqp_errors.ChannelError as exc:
            raise TopologyError(
                f"RabbitMQ refused to {current}: {exc.reply_text}; {_hint(exc)}"
            ) from exc
    return Applied(done=tuple(done), refused=tuple(refused))


def _request(step: Step) -> Request:
    entity = step.item.entity
    if not isinstance(entity, Binding):
        return to_declare(entity)
    return to_unbind(entity) if step.action == "unbind" else to_bind(entity)


def _replace(
    replacement: Replacement, amqp: Amqp, plan: Plan, finish: Callable[[Step, str], None]
) -> None:
    def steps(action: str) -> dict[str, Step]:
        return {
            step.item.name: step
            for step in plan.steps
            if step.action == action and isinstance(step.item.entity, Queue)
        }

    recreate = steps("recreate")
    reasons = replacement.recreate(
        [step.item.entity for step in recreate.values() if isinstance(step.item.entity, Queue)]
    )
    for name, step in recreate.items():
        finish(step, reasons.get(name, ""))
    for step in plan.steps:
        if step.action == "drain":
            for queue in plan.report.topology.queues:
                if drift.shadow(plan.report.topology.names, queue.name) == step.item.name:
                    replacement.drain(queue)
            finish(step, "")
    delete = steps("delete")
    reasons = replacement.delete(delete)
    for name, step in delete.items():
        finish(step, reasons.get(name, ""))
    for step in plan.steps:
        if step.action == "delete" and isinstance(step.item.entity, Exchange):
            finish(step, _delete_exchange(amqp, step.item.name))


def _delete_exchange(amqp: Amqp, name: str) -> str:
    try:
        amqp.call(lambda channel: channel.exchange_delete(name, if_unused=True))
    except amqp_errors.PreconditionFailed:
        return "something is still bound to it"
    return ""


def _hint(exc: amqp_errors.ChannelError) -> str:
    if isinstance(exc, amqp_errors.AccessRefused):
        return (
            "give this user the configure, write and read permissions, or have somebody else "
            'declare and set AMQP_EVENTS["TOPOLOGY"] to "external"'
        )
    return f"look at the broker's log, then {_REMEDY} again"


def _joined(lines: Sequence[str], limit: int = 8) -> str:
    shown = [*lines[:limit], *([f"… and {len(lines) - limit} more"] if len(lines) > limit else [])]
    return "".join(f"\n  - {line}" for line in shown)


# -- what a worker does -------------------------------------------------------------------


def verify(app: Celery, settings: Settings, topology: Topology) -> Report:
    """Make sure that the broker has what is declared; plain AMQP only, and nothing is changed.

    What this user may not see is tolerated: with ``TOPOLOGY = "external"`` in silence, else with
    a warning in the log.

    Raises:
        TopologyDriftError: exchanges or queues are missing or different; each is named.
        BrokerRequirementError: the broker lacks a version or feature flag.
        BrokerUnavailableError: no connection, or it broke.
    """
    report = inspect(app, settings, topology)
    if report.errors:
        raise BrokerRequirementError("; ".join(str(trouble) for trouble in report.errors))
    lines = [str(item) for item in report.having("missing", "different") if item.kind != "binding"]
    if lines:
        raise TopologyDriftError(
            f"the topology of service {settings.service!r} does not fit on vhost "
            f"{report.vhost!r}; {_REMEDY}:{_joined(lines)}"
        )
    unseen = [item for item in report.having("unknown") if item.kind != "binding"]
    if unseen and settings.topology != "external":
        logger.warning(
            "%d exchanges and queues of service %r could not be compared, the first: %s; "
            'give the user configure permission, or set AMQP_EVENTS["TOPOLOGY"] to "external"',
            len(unseen),
            settings.service,
            unseen[0],
        )
    return report


def declare(
    app: Celery, settings: Settings, topology: Topology, *, progress: Progress | None = None
) -> Report:
    """Declare what is missing, over plain AMQP; what is different is refused beforehand.

    Returns:
        the report from before.

    Raises:
        TopologyDriftError: something is different; nothing was changed.
        TopologyError, BrokerUnavailableError: as :func:`apply`.
    """
    report = inspect(app, settings, topology)
    apply(app, settings, plan(report), progress=progress)
    return report


def prepare(app: Celery, settings: Settings, topology: Topology) -> Report:
    """Do what ``TOPOLOGY`` says when a worker starts; errors as :func:`verify`, :func:`declare`."""
    if settings.topology == "auto":
        return declare(app, settings, topology)
    return verify(app, settings, topology)


# -- status -------------------------------------------------------------------------------

Severity = Literal["ok", "warning", "error", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """One queue and what its figures mean.

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
    """Say how many messages wait where, who consumes them, and what that means.

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
                (Queue(name=name, role=_role(names, name)), True)
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
            meaning=f"missing: {_REMEDY}",
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
        return "error", f"a recreation was interrupted: {_REMEDY} to finish it"
    if queue.role == "delay" and messages:
        return "ok", f"not declared any more; {messages} delayed return by themselves"
    if messages and not consumers:
        return "error", (
            f"not declared any more, and {_events(messages)} in it: declare its handler again "
            f"and start a worker; or run `manage.py events_recover {queue.name}`, and replay them"
        )
    return "warning", f"not declared any more: {_REMEDY} --delete-stale"


def _stuck_meaning(amqp: Amqp, queue: Queue, stuck: int) -> tuple[Severity, str]:
    """Tell dead letters that cannot leave from those that are just leaving."""
    target = queue.arguments.get("x-dead-letter-exchange", "")
    what = f"{_events(stuck)} past due" if queue.role == "delay" else f"{_events(stuck)} rejected"
    try:
        there = not target or amqp.exchange_exists(target)
    except amqp_errors.ChannelError:
        there = True
    if not there:
        return "error", f"{what}, but {target} is missing: {_REMEDY}"
    # RabbitMQ repeats a dead letter that found no way after three minutes.
    return "warning", (
        f"{what}, on the way to {target}: if that lasts more than 3 minutes, {_REMEDY} --check"
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
    """Say what a queue that a process of ours empties has in it.

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
