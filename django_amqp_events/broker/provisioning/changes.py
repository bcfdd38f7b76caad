"""Apply a plan to the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from amqp import exceptions as amqp_errors
from celery import Celery

from ...callables import nothing
from ...conf import Settings
from ...exceptions import TopologyDriftError, TopologyError
from ..topology import Binding, Names
from .amqp_api import (
    Amqp,
    Request,
    session,
    to_bind,
    to_declare,
    to_unbind,
)
from .binding_records import bind_recorded, delete_window, record_bound, unrecorded
from .drift import Plan, PlanStep, Report
from .inspection import REMEDY
from .management_api import ManagementApi
from .replacement import Replacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The result of applying a plan.

    Attributes:
        done: the steps that were carried out.
        refused: the steps that were not, each with its reason, such as a queue that holds messages
            or has consumers. The bindings of these queues are restored.
    """

    done: tuple[PlanStep, ...] = ()
    refused: tuple[tuple[PlanStep, str], ...] = ()


#: Steps that check a queue first; all others are single requests.
_LATER: Final = frozenset({"recreate", "delete"})


def apply(
    app: Celery,
    settings: Settings,
    plan: Plan,
    *,
    api: ManagementApi | None = None,
    progress: Callable[[str], object] = nothing,
) -> Applied:
    """Carry out a plan.

    Args:
        api: needed for steps that delete or recreate, and to see what another process has bound.
        progress: called often, with a sentence about what is done.

    Raises:
        TopologyDriftError: the plan has refusals; nothing was changed.
        TopologyError: the broker refused a step; those before it are done.
        BrokerUnavailableError: no connection, or it broke.
    """
    if plan.refusals:
        raise TopologyDriftError("nothing was changed:" + joined(plan.refusals))
    bound = unrecorded(app, settings, _bindings(plan.report, settings))
    if not plan.steps and not bound:
        return Applied()
    done: list[PlanStep] = []
    refused: list[tuple[PlanStep, str]] = []

    def finish(step: PlanStep, reason: str = "") -> None:
        if reason:
            refused.append((step, reason))
        else:
            done.append(step)
        progress(f"{len(done) + len(refused)} of {len(plan.steps)} steps")

    with session(app, settings) as amqp:
        now = [step for step in plan.steps if step.action in ("declare", "bind")]
        unbinds = [step for step in plan.steps if step.action == "unbind"]
        later = [step for step in plan.steps if step.action in _LATER]
        current: PlanStep | str = plan.steps[0] if plan.steps else "record the bindings"
        try:
            unbound = _first_bindings(now, settings)
            if bound or unbound:
                # Another process may be binding queues that have no record yet.
                current = "declare the lock"
                amqp.lock(Names.of(settings).lock)
            if unbound and api is not None:
                # It may have bound these.
                there = api.bindings()
                planned = [step.item.entity for step in unbound]
                bound += [one for one in there if one in planned]
                unbound = [step for step in unbound if step.item.entity not in there]
            for current in now:
                if current not in unbound:
                    amqp.call(_request(current))
                    finish(current)
            if bound:
                record_bound(app, settings, amqp, bound)
            if unbound:
                current = unbound[0]
                bindings = [step.item.entity for step in unbound]
                bind_recorded(app, settings, amqp, cast("list[Binding]", bindings))
                for step in unbound:
                    finish(step)
            # Last, so that each event is routed by the old binding or by the new one.
            for current in unbinds:
                amqp.call(_request(current))
                finish(current)
            if later:
                current = later[0]
                if api is None:
                    raise TopologyError(
                        f"the management API is needed to {current}; set "
                        f"AMQP_EVENTS['MANAGEMENT_URL']"
                    )
                replacement = Replacement(
                    topology=plan.report.topology, session=amqp, api=api, progress=progress
                )
                _replace(replacement, later, finish)
        except amqp_errors.ChannelError as exc:
            raise _refused(current, exc, len(done), plan) from exc
    return Applied(done=tuple(done), refused=tuple(refused))


def _first_bindings(steps: Iterable[PlanStep], settings: Settings) -> list[PlanStep]:
    """Return the steps that bind a handler's queue to the events for the first time."""
    return [
        step
        for step in steps
        if step.item.state == "missing" and _is_recorded(step.item.entity, settings)
    ]


def _bindings(report: Report, settings: Settings) -> list[Binding]:
    """Return the bindings of handlers' queues to the events that exist, or may exist."""
    return [
        cast("Binding", item.entity)
        for item in report.having("ok", "stale", "unknown")
        if _is_recorded(item.entity, settings)
    ]


def _is_recorded(entity: object, settings: Settings) -> bool:
    names = Names.of(settings)
    return (
        settings.history is not None
        and isinstance(entity, Binding)
        and entity.exchange == names.events
        and entity.queue != names.history
    )


def _refused(
    step: PlanStep | str, exc: amqp_errors.ChannelError, done: int, plan: Plan
) -> TopologyError:
    so_far = f"{done} of {len(plan.steps)} steps are done" if done else "nothing was changed"
    return TopologyError(
        f"RabbitMQ refused to {step}: {exc.reply_text}; {so_far}. To continue, {_hint(exc)}"
    )


def _request(step: PlanStep) -> Request:
    entity = step.item.entity
    if not isinstance(entity, Binding):
        return to_declare(entity)
    return to_unbind(entity) if step.action == "unbind" else to_bind(entity)


def _replace(
    replacement: Replacement, steps: Sequence[PlanStep], finish: Callable[[PlanStep, str], None]
) -> None:
    topology, names = replacement.topology, replacement.topology.names
    declared = {queue.name: queue for queue in topology.queues}
    # Together, since each waits for statistics.
    reasons = replacement.delete(
        {
            step.item.name: declared[step.item.name] if step.action == "recreate" else None
            for step in steps
            if step.item.kind == "queue" and not names.is_window(step.item.name)
        }
    )
    # drift.plan() has sorted them: an exchange comes after the queue of its name.
    for step in steps:
        name = step.item.name
        if names.is_window(name):
            delete_window(replacement.session, name)
        elif step.item.kind == "exchange":
            reasons[name] = _delete_exchange(replacement.session, name)
        finish(step, reasons.get(name, ""))


def _delete_exchange(amqp: Amqp, name: str) -> str:
    try:
        amqp.call(lambda channel: channel.exchange_delete(name, if_unused=True))
    except amqp_errors.PreconditionFailed:
        return "something is still bound to it"
    return ""


def _hint(exc: amqp_errors.ChannelError) -> str:
    if isinstance(exc, amqp_errors.AccessRefused):
        return (
            "give this user the configure, write and read permissions, or declare as another user "
            'and set AMQP_EVENTS["TOPOLOGY"] to "external"'
        )
    return f"check the broker's log, then {REMEDY} again"


def joined(lines: Sequence[str], limit: int = 8) -> str:
    shown = [*lines[:limit], *([f"… and {len(lines) - limit} more"] if len(lines) > limit else [])]
    return "".join(f"\n  - {line}" for line in shown)
