"""Probes: do the processes of this container work, and can this process publish?"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .. import liveness
from ..broker.publisher_pool import publisher_pool
from ..conf import Settings, get_settings
from ..databases import non_atomic, problem_text
from ..exceptions import BrokerUnavailableError, ConfigurationError
from ..publish import outbox

logger = logging.getLogger(__name__)

#: Seconds without a turn after which a loop counts as hanging. Its steps take less, except those
#: that wait for RabbitMQ, which turn it.
HANGING_SECONDS: Final = 300.0
#: The parts that ``--part companion`` stands for.
COMPANION: Final = ("relay", "mirror", "batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of a process, and what is wrong with it (``""``: nothing)."""

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
        seconds = time.time() - state.turned
        if seconds > HANGING_SECONDS and not state.rests:
            problem = f"its loop has not turned for {seconds:.0f} s: restart it"
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

    The answer contains no secrets and no texts of errors, which are logged.
    """
    problem = examine_publishing(get_settings())
    return JsonResponse({"ok": not problem, "problem": problem}, status=503 if problem else 200)


def examine_publishing(settings: Settings) -> str:
    """Return why this process cannot publish, and the remedy; ``""`` if it can."""
    if settings.backend != "amqp":
        return ""
    return _outbox_problem(settings) if settings.publish == "outbox" else _broker_problem(settings)


def _outbox_problem(settings: Settings) -> str:
    alias = settings.database
    try:
        outbox.rows(alias).exists()
    except Exception as exc:  # noqa: BLE001 - drivers raise errors of their own
        logger.warning("the outbox cannot be read: %s", exc)
        return f"The outbox in database {alias!r} cannot be read: {problem_text(exc)}."
    return ""


def _broker_problem(settings: Settings) -> str:
    try:
        publisher_pool(settings).reach()
    except (BrokerUnavailableError, ConfigurationError) as exc:
        logger.warning("%s", exc)
        return (
            "Events cannot be published, because RabbitMQ is unreachable. Check the broker, and "
            "the broker URL."
        )
    return ""
