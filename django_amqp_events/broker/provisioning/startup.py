"""Verify or declare the topology when a worker starts, as ``TOPOLOGY`` says."""

from __future__ import annotations

from celery import Celery

from ...conf import Settings
from ...exceptions import TopologyDriftError, TopologyError
from ...logs import get_logger
from ..topology import Topology
from .changes import apply, joined
from .drift import Report, plan
from .inspection import REMEDY, UNSEEN_POLICIES, inspect, management
from .management_api import ManagementApiError

logger = get_logger(__name__)


def verify(app: Celery, settings: Settings, topology: Topology) -> Report:
    """Check over plain AMQP that the broker has the topology; nothing is changed.

    Entities that this user may not see are ignored, with a warning unless ``TOPOLOGY`` is
    ``"external"``.

    Raises:
        TopologyDriftError: exchanges or queues are missing or different; each is named.
        TopologyError: the broker lacks a version or feature flag.
        BrokerUnavailableError: no connection, or it broke.
    """
    report = inspect(app, settings, topology)
    if report.errors:
        raise TopologyError("; ".join(map(str, report.errors)))
    lines = [str(item) for item in report.having("missing", "different") if item.kind != "binding"]
    if lines:
        raise TopologyDriftError(
            f"vhost {report.vhost!r} does not have the topology of service {settings.service!r}; "
            f"{REMEDY}:{joined(lines)}"
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


def declare(app: Celery, settings: Settings, topology: Topology) -> Report:
    """Declare what is missing, over plain AMQP; return the report made before.

    Raises:
        TopologyDriftError, TopologyError, BrokerUnavailableError: as :func:`apply`.
    """
    # With a history, new bindings are recorded, and only the management API shows which are new.
    api = management(app, settings) if settings.history else None
    try:
        report = inspect(app, settings, topology, api=api)
    except ManagementApiError as exc:
        logger.warning("patterns that are added now get no past events: %s", exc)
        report = inspect(app, settings, topology)
    apply(app, settings, plan(report), api=api)
    return report


def prepare(app: Celery, settings: Settings, topology: Topology) -> Report:
    """Verify or declare, as ``TOPOLOGY`` says; raises as these do."""
    look = declare if settings.topology == "auto" else verify
    report = look(app, settings, topology)
    # With the URL, events_declare has seen them.
    if not settings.management_url and settings.topology != "external":
        logger.warning("%s", UNSEEN_POLICIES)
    return report
