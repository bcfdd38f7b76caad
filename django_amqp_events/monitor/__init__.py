"""Snapshots of the service, statistics, alerts, queue status."""

from __future__ import annotations

from types import ModuleType

from ..exceptions import ConfigurationError


def load_metrics() -> ModuleType:
    """Return :mod:`~django_amqp_events.monitor.metrics`, which needs prometheus_client."""
    try:
        from . import metrics
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"metrics need prometheus_client ({exc}); run pip install "
            f"'django-amqp-events[prometheus]'"
        ) from exc
    return metrics
