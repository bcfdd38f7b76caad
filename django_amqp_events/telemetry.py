"""Whether this process traces with OpenTelemetry; :mod:`django_amqp_events.spans` does it."""

from __future__ import annotations

import os
import sys
from typing import Final

_API: Final = "opentelemetry.trace"
#: Names the tracer provider that OpenTelemetry makes when it is first asked for one.
_PROVIDER: Final = "OTEL_PYTHON_TRACER_PROVIDER"


def active() -> bool:
    """Return True if this process has a tracer provider, which needs OpenTelemetry imported."""
    if _API not in sys.modules and _PROVIDER not in os.environ:
        return False
    try:
        from opentelemetry import trace
    except ImportError:  # the extra ``opentelemetry`` is not installed
        return False
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
