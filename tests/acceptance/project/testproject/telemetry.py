"""What ``TESTPROJECT_TELEMETRY`` sets up in each process: spans and Sentry's envelopes in files."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sentry_sdk
from celery.signals import worker_process_init
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.instrumentation.django import DjangoInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

_LINES = re.MULTILINE | re.DOTALL


def _append(what: str, line: Any) -> None:
    """Add a line to this process's file; a line that is written at once is not torn."""
    path = Path(os.environ["TESTPROJECT_DIR"], f"{what}.{os.getpid()}.jsonl")
    with path.open("a") as file:
        file.write(json.dumps(line, default=str) + "\n")


class FileExporter(SpanExporter):
    """One file of spans per process, which a killed process leaves behind too."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            _append("spans", _plain(span))
        return SpanExportResult.SUCCESS


def _plain(span: ReadableSpan) -> dict[str, Any]:
    return {
        "name": span.name,
        "kind": span.kind.name,
        "scope": span.instrumentation_scope.name if span.instrumentation_scope else "",
        "trace": format_trace_id(span.context.trace_id),
        "id": format_span_id(span.context.span_id),
        "parent": format_span_id(span.parent.span_id) if span.parent else None,
        "links": [format_trace_id(link.context.trace_id) for link in span.links],
        "start": span.start_time,
        "end": span.end_time,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
        "exceptions": [dict(each.attributes or {}) for each in span.events],
    }


def _provider() -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter()))
    return provider


def _instrument(**options: Any) -> None:
    def instrument(**_: object) -> None:
        CeleryInstrumentor().instrument(**options)  # type: ignore[no-untyped-call]

    worker_process_init.connect(instrument, weak=False)


def opentelemetry() -> None:
    """Trace requests and events, as a project would set it up for all of its processes."""
    trace.set_tracer_provider(_provider())
    DjangoInstrumentor().instrument()


def opentelemetry_and_celery() -> None:
    """Trace with OpenTelemetry's Celery integration too, set up as its documentation says."""
    opentelemetry()
    _instrument()


class FileTransport(Transport):
    """Write the items of envelopes instead of sending them."""

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if item.type in ("event", "transaction"):
                _append("sentry", {"type": item.type, **(item.payload.json or {})})


def sentry() -> None:
    """Run the example of docs/observability.md, with files in the place of Sentry."""
    page = Path(os.environ["TESTPROJECT_DOCS"], "observability.md").read_text()
    (example,) = re.findall(r"^```python\n(import sentry_sdk\n\nRAISED.*?)^```", page, _LINES)
    init = functools.partial(sentry_sdk.init, transport=FileTransport)
    with patch.object(sentry_sdk, "init", init):
        exec(compile(example, "observability.md", "exec"), {})  # noqa: S102
