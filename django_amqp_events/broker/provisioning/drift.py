"""Compare declared and found: states, differences, and the plan that removes them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..reply_texts import Difference
from ..topology import (
    Binding,
    Exchange,
    Names,
    Queue,
    Role,
    Topology,
)

State = Literal["ok", "missing", "different", "stale", "unknown"]
EntityKind = Literal["exchange", "queue", "binding"]
Action = Literal["declare", "bind", "unbind", "delete", "recreate"]

#: Policy keys that may change how events are handled.
POLICY_CONFLICTS: Final = frozenset(
    {
        "dead-letter-exchange",
        "dead-letter-routing-key",
        "dead-letter-strategy",
        "delivery-limit",
        "expires",
        "max-age",
        "max-length",
        "max-length-bytes",
        "message-ttl",
        "overflow",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An exchange, queue or binding, and its state.

    Attributes:
        entity: as declared; as found on the broker if it is stale.
        state: ``ok``; ``missing``; ``different`` (see *differences*); ``stale``: it belongs to
            this service and is no longer declared; ``unknown``: it cannot be compared.
        differences: over plain AMQP only the first, since RabbitMQ reports no more.
        note: one sentence, or ``""``.
    """

    entity: Exchange | Queue | Binding
    state: State
    differences: tuple[Difference, ...] = ()
    note: str = ""

    @property
    def kind(self) -> EntityKind:
        if isinstance(self.entity, Exchange):
            return "exchange"
        return "queue" if isinstance(self.entity, Queue) else "binding"

    @property
    def name(self) -> str:
        """The entity's name; for a binding ``exchange → queue [routing key] {arguments}``."""
        if isinstance(self.entity, Binding):
            key = f" [{self.entity.routing_key}]" if self.entity.routing_key else ""
            arguments = f" {dict(self.entity.arguments)}" if self.entity.arguments else ""
            return f"{self.entity.exchange} → {self.entity.queue}{key}{arguments}"
        return self.entity.name

    @property
    def role(self) -> Role | None:
        return None if isinstance(self.entity, Binding) else self.entity.role

    def __str__(self) -> str:
        details = "; ".join([*map(str, self.differences), *([self.note] if self.note else [])])
        return f"{self.kind} {self.name}: {self.state}{f' ({details})' if details else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerProblem:
    """A problem of the broker itself or of a policy.

    Attributes:
        severity: ``error``: nothing is declared before it is fixed; ``unknown``: it cannot be
            checked.
    """

    message: str
    remedy: str
    severity: Literal["error", "unknown"] = "error"

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The declared topology compared with the broker's.

    Attributes:
        items: exchanges, queues and bindings in the order in which they are declared, then the
            stale ones.
        exact: the management API was read, so bindings and stale entities are known.
        version: of RabbitMQ.
    """

    topology: Topology
    items: tuple[Item, ...]
    problems: tuple[BrokerProblem, ...] = ()
    exact: bool = False
    version: str = ""
    vhost: str = "/"

    def having(self, *states: State) -> tuple[Item, ...]:
        """Return the items in one of *states*."""
        return tuple(item for item in self.items if item.state in states)

    @property
    def errors(self) -> tuple[BrokerProblem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def result(self) -> Literal["identical", "drift", "unknown"]:
        if self.errors or self.having("missing", "different", "stale"):
            return "drift"
        return "unknown" if self.problems or self.having("unknown") else "identical"


def policy_hurts(key: str, value: object, arguments: Mapping[str, Any]) -> bool:
    """Return True if a policy's key changes how a queue with these arguments handles events.

    Of two numbers RabbitMQ takes the lower one; otherwise the argument wins over the policy.
    """
    argument = arguments.get(f"x-{key}")
    if key not in POLICY_CONFLICTS:
        return False
    if isinstance(value, int) and isinstance(argument, int):
        return value < argument
    return argument is None or key == "max-age"


def left_over_exchange(names: Names, name: str) -> bool:
    """Return True if an undeclared exchange of this name was once declared by this service."""
    return names.is_delay(name) or names.is_window(name)


def left_over_queue(names: Names, name: str, arguments: Mapping[str, Any]) -> bool:
    """Return True if an undeclared queue was once declared by this service.

    The name alone is not enough: ``billing.images`` may be a queue of the project's own Celery
    tasks, or of a service ``images`` with the PREFIX ``billing.``. A handler's queue dead-letters
    into this service's graveyard under its own name.
    """
    if name.startswith(names.handlers):
        return (
            arguments.get("x-dead-letter-exchange") == names.graveyard
            and arguments.get("x-dead-letter-routing-key") == name
        )
    return left_over_exchange(names, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """A change, or a possible change if plain AMQP cannot see the binding."""

    action: Action
    item: Item

    def __str__(self) -> str:
        kind = "" if self.item.kind == "binding" else f"{self.item.kind} "
        return f"{self.action} {kind}{self.item.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes to make, in order.

    Attributes:
        refusals: changes that RabbitMQ would refuse or that must not be made; with any of them
            nothing is changed.
    """

    report: Report
    steps: tuple[PlanStep, ...] = ()
    refusals: tuple[str, ...] = ()


def plan(report: Report, *, delete_stale: bool = False, recreate_empty: bool = False) -> Plan:
    """Return the plan that removes the differences in a report.

    Args:
        delete_stale: delete stale entities that are empty and unused.
        recreate_empty: delete and declare again the infrastructure's queues whose arguments differ,
            if they are empty and unused. Both need a report of the management API.
    """
    names = report.topology.names
    refusals = [str(problem) for problem in report.errors]
    for wanted, option in ((delete_stale, "--delete-stale"), (recreate_empty, "--recreate-empty")):
        if wanted and not report.exact:
            refusals.append(
                f"{option} needs the management API, which alone shows whether a queue is empty; "
                f'set AMQP_EVENTS["MANAGEMENT_URL"]'
            )
    steps: list[PlanStep] = []
    recreated: set[str] = set()
    for item in report.items:
        match item.state:
            case "missing":
                steps.append(
                    PlanStep(action="bind" if item.kind == "binding" else "declare", item=item)
                )
            case "unknown" if item.kind == "binding":
                steps.append(PlanStep(action="bind", item=item))
            case "different" if recreate_empty and _can_be_recreated(item):
                recreated.add(item.name)
                steps.append(PlanStep(action="recreate", item=item))
            case "different":
                refusals.append(f"{item}; {_immutable(item)}")
            case "stale" if delete_stale:
                action: Action = "unbind" if item.kind == "binding" else "delete"
                steps.append(PlanStep(action=action, item=item))
            case _:
                pass
    # Recreating a queue also binds it.
    steps = [
        step
        for step in steps
        if not (isinstance(step.item.entity, Binding) and step.item.entity.queue in recreated)
    ]
    return Plan(
        report=report,
        steps=tuple(sorted(steps, key=lambda step: _rank(step, names))),
        refusals=tuple(refusals),
    )


def _rank(step: PlanStep, names: Names) -> int:
    # Bindings to the shared exchange come last, so that the first event finds the return exchange,
    # graveyard and archive declared.
    entity = step.item.entity
    match step.action:
        case "declare":
            return 0 if isinstance(entity, Exchange) else 1
        case "bind":
            return 3 if isinstance(entity, Binding) and entity.exchange == names.events else 2
        case "unbind":
            return 4
        case "recreate":
            return 5
        case "delete":
            return 6 if isinstance(entity, Queue) else 7


def _can_be_recreated(item: Item) -> bool:
    # A handler's queue would miss what is published meanwhile.
    return item.kind == "queue" and item.role not in ("handler", "history")


def _immutable(item: Item) -> str:
    if item.role == "events":
        return (
            "other services share this exchange, so it cannot be recreated: choose another "
            'AMQP_EVENTS["EXCHANGE"], or agree with the owners of these services'
        )
    if item.kind == "exchange":
        return (
            "arguments cannot be changed: stop this service's workers, delete the exchange (it "
            "holds no messages), then run manage.py events_declare"
        )
    if item.role == "history":
        return (
            "arguments cannot be changed: restore the limits of HISTORY, on which all services "
            "with this exchange agree, or delete the queue with its past events, then run "
            "manage.py events_declare"
        )
    if item.role == "handler":
        return (
            "arguments cannot be changed: restore the setting that it was declared with; or give "
            "the handler another QUEUE, then move the old queue's events with manage.py "
            "events_recover"
        )
    return (
        "arguments cannot be changed: wait until the queue is empty, then run manage.py "
        "events_declare --recreate-empty, or restore the setting that it was declared with"
    )
