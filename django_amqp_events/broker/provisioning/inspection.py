"""Compare a service's topology with RabbitMQ's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from celery import Celery

from ...conf import Settings
from ..connection import build_connection
from ..reply_texts import Difference
from ..topology import (
    Binding,
    Exchange,
    Names,
    Queue,
    Role,
    Topology,
)
from . import drift
from .amqp_api import ALTERNATE, missing_requirement, session
from .drift import (
    BrokerProblem,
    Item,
    Report,
)
from .management_api import ManagementApi

_ALTERNATE: Final = "alternate-exchange"
REMEDY: Final = "run manage.py events_declare"
STALE: Final = "no longer declared"

#: No method of AMQP shows a policy, and a probe would have to wait for as long as a queue's limits.
UNSEEN_POLICIES: Final = BrokerProblem(
    severity="unknown",
    message="plain AMQP cannot see policies: one that sets message-ttl, expires or max-length on "
    "this service's queues removes events",
    remedy='set AMQP_EVENTS["MANAGEMENT_URL"], then run manage.py events_declare --check',
)


def management(app: Celery, settings: Settings) -> ManagementApi | None:
    """Return the management API of the Celery app's vhost, ``None`` without ``MANAGEMENT_URL``.

    Raises:
        ManagementApiError: the URL is not valid.
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    if not settings.management_url:
        return None
    vhost = build_connection(app).virtual_host or "/"
    return ManagementApi(settings.management_url, vhost=vhost)


def inspect(
    app: Celery, settings: Settings, topology: Topology, *, api: ManagementApi | None = None
) -> Report:
    """Compare the topology with the broker's; nothing is changed.

    Args:
        api: compare bindings, policies and stale entities too; without it bindings and policies
            are ``unknown``.

    Raises:
        BrokerUnavailableError: no connection, or it broke.
        ManagementApiError: the management API cannot be read, or is that of another broker.
    """
    with session(app, settings) as amqp:
        items = amqp.inspect([*topology.exchanges, *topology.queues])
        if api is not None:
            api.check_cluster(amqp.server)
        report = Report(
            topology=topology,
            items=(*items, *_unseen_bindings(topology, items)),
            version=str(amqp.server.get("version", "")),
            vhost=amqp.vhost,
        )
        # Last, since it may close the connection.
        problem = missing_requirement(amqp, topology.names, queue_type=settings.queue_type)
        if problem is not None:
            report = replace(report, problems=(problem,))
    if api is None:
        return replace(report, problems=(*report.problems, UNSEEN_POLICIES))
    return _exact(report, items, api)


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
    """Return the report with everything that only the management API shows."""
    topology, names = report.topology, report.topology.names
    policies = api.policies()
    queues = {queue["name"]: queue for queue in api.queues()}
    exchanges = {exchange["name"]: exchange for exchange in api.exchanges()}
    bindings = dict.fromkeys(api.bindings())
    seen = [_with_alternate(_with_arguments(item, queues), policies or ()) for item in items]
    declared_queues = {queue.name for queue in topology.queues}
    declared_exchanges = {exchange.name for exchange in topology.exchanges}
    declared_bindings = set(topology.bindings)
    for binding in topology.bindings:
        state: Literal["ok", "missing"] = "ok" if binding in bindings else "missing"
        seen.append(Item(entity=binding, state=state))
    for binding in bindings:
        # Others may bind a handler's queue to exchanges of their own.
        ours = binding.exchange in declared_exchanges or drift.left_over_exchange(
            names, binding.exchange
        )
        if binding.queue in declared_queues and binding not in declared_bindings:
            if ours:
                seen.append(Item(entity=binding, state="stale", note=STALE))
            else:
                seen.append(Item(entity=binding, state="ok", note="bound by others"))
    for name, queue in queues.items():
        arguments = queue.get("arguments") or {}
        if name not in declared_queues and drift.left_over_queue(names, name, arguments):
            entity = Queue(name=name, arguments=arguments, role=role_of(names, name))
            seen.append(Item(entity=entity, state="stale", note=STALE))
    for name, exchange in exchanges.items():
        if name not in declared_exchanges and drift.left_over_exchange(names, name):
            exchange_left = Exchange(name=name, type=exchange["type"], role="delay")
            seen.append(Item(entity=exchange_left, state="stale", note=STALE))
    problems = [*report.problems, *_policies(topology, queues, policies)]
    return replace(report, items=tuple(seen), problems=tuple(problems), exact=True)


def role_of(names: Names, name: str) -> Role:
    return "delay" if names.is_delay(name) else "handler"


def _with_arguments(item: Item, queues: Mapping[str, Mapping[str, Any]]) -> Item:
    """Return a queue with all its differences; over AMQP, RabbitMQ reports only the first."""
    entity = item.entity
    there = queues.get(item.name)
    if there is None or item.state == "missing" or not isinstance(entity, Queue):
        # The API is seconds old, so AMQP's answer counts.
        return item
    declared = {**entity.arguments, "durable": True, "auto_delete": False}
    actual = {"x-queue-type": there.get("type"), **(there.get("arguments") or {})}
    actual |= {key: there.get(key) for key in ("durable", "auto_delete")}
    differences = tuple(
        Difference(argument=key, declared=_text(declared, key), found=_text(actual, key))
        for key in sorted(declared.keys() | actual.keys())
        if _text(declared, key) != _text(actual, key)
    )
    own = [difference for difference in differences if difference.argument in declared]
    if item.state == "different" or own:
        return replace(item, state="different", differences=differences or item.differences)
    # Arguments that RabbitMQ does not compare, such as the location of a leader.
    note = item.note or "; ".join(map(str, differences))
    return replace(item, state="ok", note=note)


def _with_alternate(item: Item, policies: Iterable[Mapping[str, Any]]) -> Item:
    """Return the shared exchange with a note, if a policy gives it an alternate exchange."""
    if item.role != "events" or item.state != "ok" or isinstance(item.entity, Binding):
        return item
    applied = _effective(policies, item.entity)
    if any(_ALTERNATE in (policy.get("definition") or ()) for policy in applied):
        return replace(item, note=ALTERNATE)
    return item


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _policies(
    topology: Topology,
    queues: Mapping[str, Mapping[str, Any]],
    policies: Sequence[Mapping[str, Any]] | None,
) -> list[BrokerProblem]:
    """Return the policies that would change how events are handled."""
    hits: dict[tuple[str, str], list[str]] = {}
    for queue in topology.queues:
        actual = queues.get(queue.name)
        if policies is not None:
            # The API's effective definition is seconds old.
            for policy in _effective(policies, queue):
                _collect(hits, repr(policy["name"]), policy.get("definition"), queue)
        elif actual is not None:
            by = [actual.get("policy"), actual.get("operator_policy")]
            who = " and ".join(repr(name) for name in by if name)
            _collect(hits, who, actual.get("effective_policy_definition"), queue)
    for exchange in topology.exchanges:
        # One in the arguments wins. Of the exchange that services share, it takes no event.
        if exchange.role != "events" and _ALTERNATE not in exchange.arguments:
            for policy in _effective(policies or (), exchange):
                _collect(hits, repr(policy["name"]), policy.get("definition"), exchange)
    return [
        BrokerProblem(
            message=f"policy {who} sets {keys} on {some(names)}, which can remove, refuse or "
            f"divert this service's messages",
            remedy="change its pattern so that it does not match this service's queues and "
            "exchanges, or clear it",
        )
        for (who, keys), names in hits.items()
    ]


def _collect(
    hits: dict[tuple[str, str], list[str]],
    who: str,
    definition: object,
    entity: Exchange | Queue,
) -> None:
    # The definition of a queue without a policy is an empty list.
    values = definition if isinstance(definition, Mapping) else {}
    if isinstance(entity, Queue):
        keys = [key for key in values if drift.policy_hurts(key, values[key], entity.arguments)]
    else:
        keys = [key for key in values if key == _ALTERNATE]
    if keys:
        hits.setdefault((who, ", ".join(sorted(keys))), []).append(entity.name)


def _effective(
    policies: Iterable[Mapping[str, Any]], entity: Exchange | Queue
) -> list[Mapping[str, Any]]:
    """Return the policy and the operator policy that will apply to a queue or exchange."""
    kinds = ["all", "exchanges"]
    if isinstance(entity, Queue):
        kind = entity.arguments.get("x-queue-type", "quorum")
        kinds = ["all", "queues", "streams" if kind == "stream" else f"{kind}_queues"]
    chosen: dict[bool, Mapping[str, Any]] = {}
    for policy in sorted(policies, key=lambda policy: policy.get("priority") or 0):
        if policy.get("apply-to") not in kinds:
            continue
        try:
            matches = re.search(policy["pattern"], entity.name)
        except re.error:  # PCRE syntax that Python does not have: report it rather than miss it
            matches = True  # type: ignore[assignment]
        if matches:
            chosen[bool(policy.get("operator"))] = policy
    return list(chosen.values())


def some(names: Sequence[str], limit: int = 3) -> str:
    """Return the first of several names and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
