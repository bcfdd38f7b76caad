"""Probes: do the processes of this container work, and can this process publish?"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .. import liveness
from ..broker.publisher_pool import publisher_pool
from ..conf import Settings, get_settings
from ..databases import is_locked, non_atomic, table_missing
from ..declare.registry import get_registry
from ..exceptions import BrokerUnavailableError, ConfigurationError
from ..publish import outbox
from . import snapshots
from .alerts import above

logger = logging.getLogger(__name__)

#: Seconds without a turn after which a loop counts as hanging. Its steps take less, except those
#: that wait for RabbitMQ, which turn it.
HANGING_SECONDS: Final = 300.0
#: The parts that ``--part companion`` stands for.
COMPANION: Final = ("relay", "mirror", "batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of a process, and what is wrong with it (``""``: nothing).

    Attributes:
        part: ``""`` if it is not known.
        process: its id, 0 if there is no such process.
    """

    part: str
    process: int
    problem: str


def examine(
    settings: Settings, *, ready: bool, parts: Collection[str] = ()
) -> list[Finding] | None:
    """Examine the processes of a service in this container.

    A process is alive if its loops turn; so it is while RabbitMQ or a database is unreachable. It
    is ready if it also works.

    Args:
        ready: report what is alive but not ready.
        parts: parts that must be there, and the only ones to examine; otherwise any.

    Returns:
        ``None`` if this system does not show its processes.
    """
    states = liveness.read(settings)
    if states is None:
        return None
    findings = []
    for state in states:
        if parts and state.part not in parts:
            continue
        problem = state.problem if ready else ""
        if state.seconds is not None and state.seconds > HANGING_SECONDS:
            problem = f"its loop has not turned for {state.seconds:.0f} s: restart it"
        findings.append(Finding(part=state.part, process=state.process, problem=problem))
    for part in parts:
        if not any(finding.part == part for finding in findings):
            problem = f"no process of this container runs it: start events_{part}"
            findings.append(Finding(part=part, process=0, problem=problem))
    if not findings:
        problem = f"no process of service {settings.service!r} runs in this container"
        findings.append(Finding(part="", process=0, problem=problem))
    return findings


# -- the view ----------------------------------------------------------------------------------


@never_cache
@require_safe
@login_not_required
# An unreachable database would be a server error.
@non_atomic
def health_view(_request: HttpRequest) -> HttpResponse:
    """Answer whether this process can publish: 200, or 503.

    Only that decides: a missing relay or mirror is no reason to take this process out of service.
    The answer contains no secrets and no texts of errors, which are logged.
    """
    document = examine_publishing(get_settings(), datetime.now(UTC))
    return JsonResponse(document, status=200 if document["ok"] else 503)


def examine_publishing(settings: Settings, now: datetime) -> dict[str, Any]:
    """Return whether this process can publish, and what delays its events.

    Returns:
        ``ok``; ``problems``, texts with their remedies; ``database`` and ``broker``, whether they
        are reachable; ``outbox_age``, ``mirror_lag`` and ``snapshot_age`` in seconds. ``None``:
        unknown or not used. With the outbox, the broker is as the last snapshot found it.
    """
    keys = ("database", "broker", "outbox_age", "mirror_lag", "snapshot_age")
    document: dict[str, Any] = {"ok": True, "problems": [], **dict.fromkeys(keys)}
    if get_registry().handlers:
        _add_snapshot(document, settings, now)
    if settings.backend == "amqp":
        (_add_outbox if settings.publish == "outbox" else _add_broker)(document, settings, now)
    return document


def _add_snapshot(document: dict[str, Any], settings: Settings, now: datetime) -> None:
    limits, problems = settings.alerts, document["problems"]
    try:
        newest = snapshots.rows(settings.service).first()
    except Exception as exc:  # noqa: BLE001 - drivers raise errors of their own
        logger.warning("the snapshots cannot be read: %s", exc)
        problems.append(
            "The archive's tables cannot be read. Check the database, and run `manage.py migrate`."
        )
        return
    if newest is not None:
        lag = newest.about.get("mirror", {}).get("lag")
        document |= {"snapshot_age": _age(newest.at, now), "mirror_lag": lag, "broker": newest.seen}
    if newest is None or above(document["snapshot_age"], limits.stale):
        problems.append("There is no recent snapshot. Start `manage.py events_companion`.")
    elif not newest.seen:
        problems.append("RabbitMQ was unreachable at the last snapshot. Check the broker.")
    elif above(document["mirror_lag"], limits.mirror_lag):
        problems.append(
            "Archived events are mirrored late. Start another `manage.py events_mirror`."
        )


def _add_outbox(document: dict[str, Any], settings: Settings, now: datetime) -> None:
    alias, problems = settings.database, document["problems"]
    pending = outbox.rows(alias).filter(service=settings.service, discarded_at__isnull=True)
    try:
        oldest = pending.order_by("pk").values_list("created_at", flat=True).first()
    except Exception as exc:  # noqa: BLE001 - drivers raise errors of their own
        logger.warning("the outbox cannot be read: %s", exc)
        document |= {"ok": False, "database": False}
        problems.append(
            f"Database {alias!r} has no table for the outbox. Run `manage.py migrate`."
            if table_missing(exc)
            else f"The outbox cannot be read, because another process has locked database "
            f"{alias!r}. Check for long transactions."
            if is_locked(exc)
            else f"Events cannot be published, because database {alias!r} is unreachable. Check "
            f"its server, and DATABASES."
        )
        return
    document |= {"database": True, "outbox_age": _age(oldest, now)}
    if above(document["outbox_age"], settings.alerts.outbox_lag):
        problems.append(
            "An event has waited in the outbox for too long. Run `manage.py events_status`."
        )


def _add_broker(document: dict[str, Any], settings: Settings, _now: datetime) -> None:
    try:
        publisher_pool(settings).reach()
    except (BrokerUnavailableError, ConfigurationError) as exc:
        logger.warning("%s", exc)
        document |= {"ok": False, "broker": False}
        document["problems"].append(
            "Events cannot be published, because RabbitMQ is unreachable. Check the broker, and "
            "the broker URL."
        )
    else:
        document["broker"] = True


def _age(since: datetime | None, now: datetime) -> float | None:
    return None if since is None else max(0.0, (now - since).total_seconds())
