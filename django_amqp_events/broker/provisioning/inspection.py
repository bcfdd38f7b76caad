"""Compare what a service declares with what RabbitMQ has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from celery import Celery

from ...conf import Settings
from ..connection import build_connection
from ..topology import (
    Binding,
    Exchange,
    Names,
    Queue,
    Role,
    Topology,
)
from . import drift
from .amqp_api import requirements, session
from .drift import (
    BrokerProblem,
    Difference,
    Item,
    Report,
)
from .management_api import ManagementApi, ManagementApiError

REMEDY: Final = "run manage.py events_declare"


def management(app: Celery, settings: Settings) -> ManagementApi | None:
    """Return the management API of the Celery app's vhost, ``None`` without ``MANAGEMENT_URL``.

    Raises:
        ManagementApiError: the URL cannot be one.
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    if not settings.management_url:
        return None
    vhost = build_connection(app).virtual_host or "/"
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
                name=name, arguments=queue.get("arguments") or {}, role=role_of(names, name)
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


def role_of(names: Names, name: str) -> Role:
    return "delay" if name.startswith(names.infrastructure("delay.")) else "handler"


def _why_stale(names: Names, name: str) -> str:
    if drift.is_shadow(names, name):
        return "left by an interrupted --recreate-empty; events_declare moves what it holds back"
    return "not declared any more"


def _with_arguments(item: Item, found: Mapping[str, Mapping[str, Any]]) -> Item:
    """Replace the one difference that RabbitMQ reported by all that the management API shows."""
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


def _unknown_flags(report: Report, api: ManagementApi) -> list[BrokerProblem]:
    """Ask the API about feature flags that could not be probed."""
    unknown = [trouble for trouble in report.troubles if trouble.severity == "unknown"]
    if not unknown:
        return []
    flags = api.feature_flags()
    if flags is None:
        return unknown
    return [
        BrokerProblem(
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
) -> list[BrokerProblem]:
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
        BrokerProblem(
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
                BrokerProblem(
                    severity="error",
                    message=f"policy {policy['name']!r} gives {topology.names.replay} an "
                    f"alternate exchange, so that a replay to nowhere would seem to arrive",
                    remedy="narrow its pattern so that it leaves this exchange alone, or clear it",
                )
            )
    if unseen:
        troubles.append(
            BrokerProblem(
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
