"""Spans in one process, collected in memory; the acceptance suite has them across processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import Ignore
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from django_amqp_events import (
    InvalidEventError,
    current_event,
    handler,
    publish_event,
    publish_many,
    spans,
    telemetry,
)
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.memory import MemoryBackend
from django_amqp_events.publish.publisher import Options
from django_amqp_events.testing import memory_events, override_events
from tests.commands import run_python

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NOW = Options(mode="immediate")


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracerProvider]:
    """A provider for this test only; OpenTelemetry's global one can be set once per process."""
    made = TracerProvider()
    monkeypatch.setattr(telemetry, "active", lambda: True)
    monkeypatch.setattr(spans, "_tracer", made.get_tracer("django_amqp_events"))
    yield made
    made.shutdown()


@pytest.fixture
def exporter(provider: TracerProvider) -> InMemorySpanExporter:
    made = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(made))
    return made


@pytest.fixture
def backend(db: None) -> Iterator[MemoryBackend]:
    with override_events(SERVICE="t", BACKEND="memory"), memory_events() as made:
        yield made


def test_publish_and_attempts_are_one_trace(
    backend: MemoryBackend, exporter: InMemorySpanExporter
) -> None:
    seen: list[Any] = []

    @handler("a.b", name="t.act", max_retries=1, retry_backoff=1)
    def act(number: int) -> None:
        event = current_event()
        assert event is not None
        seen.append((event.headers, baggage.get_baggage("tenant")))
        if event.attempt == 1:
            raise ValueError("no")
        publish_event("a.c", {}, options=NOW)

    token = context.attach(baggage.set_baggage("tenant", "7"))
    try:
        event_id = publish_event("a.b", {"number": 1}, options=NOW)
    finally:
        context.detach(token)
    backend.run()
    backend.advance(2)
    publish, first, nested, second = exporter.get_finished_spans()
    assert [span.name for span in (publish, first, nested, second)] == [
        "publish a.b", "process t.act", "publish a.c", "process t.act",
    ]  # fmt: skip
    assert nested.parent is not None
    assert nested.parent.span_id == second.context.span_id
    assert first.attributes is not None
    assert dict(first.attributes) == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "events:a.b:t.t.act",
        "messaging.rabbitmq.destination.routing_key": "a.b",
        "messaging.message.conversation_id": event_id,
        "amqp_events.event_name": "a.b",
        "amqp_events.event_id": event_id,
        "amqp_events.handler": "t.act",
        "amqp_events.attempt": 1,
        "error.type": "ValueError",
    }
    destinations = [
        (span.attributes or {})["messaging.destination.name"] for span in (publish, second)
    ]
    assert destinations == ["events:a.b", "t:return:t.t.act"]
    (headers, tenant), again = seen
    trace_id = trace.format_trace_id(publish.context.trace_id)
    assert headers["traceparent"].startswith(f"00-{trace_id}-")
    assert (headers, tenant) == again
    assert tenant == "7"


def test_a_publishers_own_context_stays(
    backend: MemoryBackend, exporter: InMemorySpanExporter
) -> None:
    @handler("a.b", name="t.act")
    def act() -> None: ...

    headers = {"traceparent": TRACEPARENT}
    publish_event("a.b", {}, options=Options(mode="immediate", headers=headers))
    backend.run()
    (span,) = exporter.get_finished_spans()
    assert (span.name, trace.format_trace_id(span.context.trace_id)) == (
        "process t.act",
        TRACEPARENT.split("-")[1],
    )
    # Other headers do not prevent the span of a publish.
    publish_event("a.b", {}, options=Options(mode="immediate", headers={"x-shop": 7}))
    assert [span.name for span in exporter.get_finished_spans()][1:] == ["publish a.b"]


def test_a_publish_that_fails_is_an_error(
    backend: MemoryBackend, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(InvalidEventError):
        publish_event("a.b", {"number": object()}, options=NOW)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "django_amqp_events.exceptions.InvalidEventError"


def test_a_batch_is_one_span(backend: MemoryBackend, exporter: InMemorySpanExporter) -> None:
    @handler("a.b", name="t.act")
    def act(number: int) -> None: ...

    publish_many("a.b", [{"number": 1}, {"number": 2}], options=NOW)
    backend.run()
    publish, *processed = exporter.get_finished_spans()
    assert publish.attributes is not None
    assert publish.attributes["messaging.batch.message_count"] == 2
    assert [span.parent.span_id for span in processed if span.parent] == [
        publish.context.span_id
    ] * 2


@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (Ignore(), StatusCode.UNSET),
        (ValueError(), StatusCode.ERROR),
        (SystemExit(3), StatusCode.ERROR),
    ],
)
def test_the_exception_of_a_run_passes_unchanged(
    exporter: InMemorySpanExporter, exc: BaseException, status: StatusCode
) -> None:
    event = ReceivedEvent(id="1", name="a.b")
    with pytest.raises(type(exc)) as raised, spans.processing(event, "t.act", "t.t.act", None):
        raise exc
    assert raised.value is exc
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is status
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("value", [7, True, None, b"00-1", [], ["x"], {"a": 1}, "", "00-zz", "é"])
def test_any_header_may_arrive(exporter: InMemorySpanExporter, value: object) -> None:
    names = ("traceparent", "tracestate", "baggage", "b3")
    event = ReceivedEvent(id="1", name="a.b", headers=dict.fromkeys(names, value))
    with spans.processing(event, "t.act", "t.t.act", None):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_without_a_provider_nothing_is_traced(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers: list[Any] = []

    @handler("a.b", name="t.act")
    def act() -> None:
        event = current_event()
        headers.append(event and event.headers)

    assert not telemetry.active()
    monkeypatch.setattr(spans, "publish", None)
    publish_event("a.b", {}, options=NOW)
    backend.run()
    assert headers == [{}]


def test_a_provider_that_the_environment_names() -> None:
    """OpenTelemetry makes it when it is first asked; nothing may have imported it before."""
    code = "from django_amqp_events import telemetry; print(telemetry.active())"
    done = run_python(code, OTEL_PYTHON_TRACER_PROVIDER="sdk_tracer_provider")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_package_works_without_optional_packages() -> None:
    """Such as pydantic, which only VALIDATE imports."""
    code = (
        "import sys; sys.modules['opentelemetry'] = sys.modules['pydantic'] = None\n"
        "from django.conf import settings\n"
        "settings.configure(INSTALLED_APPS=['django_amqp_events'],\n"
        "    AMQP_EVENTS={'SERVICE': 't', 'BACKEND': 'inline', 'PUBLISH': 'immediate'})\n"
        "import django; django.setup()\n"
        "from django_amqp_events import event, handler, telemetry\n"
        "@event('a.b')\n"
        "def happened(number: int): ...\n"
        "@handler('a.b', name='t.act')\n"
        "def act(number: int): print('ran', number)\n"
        "happened(1)\n"
        "assert not telemetry.active()\n"
    )
    assert run_python(code).stdout == "ran 1\n"
