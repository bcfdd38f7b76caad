"""Spans of OpenTelemetry, by its conventions for messaging; docs/observability.md describes them.

Imported only if :func:`django_amqp_events.telemetry.active` returns True.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from celery.exceptions import TaskPredicate
from opentelemetry import context, propagate, trace

from .context import ReceivedEvent

_tracer = trace.get_tracer("django_amqp_events")

#: The scope of the spans that opentelemetry-instrumentation-celery makes.
_CELERY: Final = "opentelemetry.instrumentation.celery"


class _Current:
    """Makes a span the current one in a block, and records the block's exception.

    Not a contextlib generator, for the reason given in :class:`.context.handling`.
    """

    __slots__ = ("_context", "_span", "_token")

    def __init__(self, span: Any, around: Any = None) -> None:
        self._span = span
        self._context = around

    def __enter__(self) -> None:
        self._token = context.attach(trace.set_span_in_context(self._span, self._context))

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        context.detach(self._token)
        try:
            if isinstance(exc, TaskPredicate):  # Retry, Reject, Ignore
                exc = exc.__cause__
            if exc is not None:
                self._span.set_attribute("error.type", _type(exc))
                self._span.set_status(trace.StatusCode.ERROR)
                self._span.record_exception(exc)
        finally:
            self._span.end()


def publish(
    name: str,
    exchange: str,
    headers: Mapping[str, Any],
    send: Callable[[Mapping[str, Any]], list[str]],
) -> list[str]:
    """Publish in a span, whose context the messages carry; return the ids of the events.

    A context that the publisher's own headers contain stays, and there is no span then.

    Args:
        send: publishes with the headers that it gets.
    """
    if headers and _parent(headers).is_valid:
        return send(headers)
    span = _tracer.start_span(
        f"publish {name}",
        kind=trace.SpanKind.PRODUCER,
        attributes=_attributes("publish", "create", name, _destination(exchange, name)),
    )
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    with _Current(span):
        ids = send({**carrier, **headers})
        if len(ids) == 1:
            span.set_attribute("amqp_events.event_id", ids[0])
        else:
            span.set_attribute("messaging.batch.message_count", len(ids))
        return ids


def processing(
    event: ReceivedEvent, handler: str, queue: str, delivery: Mapping[str, Any] | None
) -> AbstractContextManager[None]:
    """Return the span of a handler's run, in the trace of its event.

    Where OpenTelemetry's Celery integration has made one already, describe the event there.

    Args:
        delivery: Celery's delivery info.
    """
    exchange, key = ((delivery or {}).get(part) for part in ("exchange", "routing_key"))
    attributes = _known(
        {
            **_attributes("process", "process", event.name, _destination(exchange, key, queue)),
            "messaging.rabbitmq.destination.routing_key": key,
            "messaging.message.conversation_id": event.correlation_id,
            "amqp_events.event_id": event.id,
            "amqp_events.handler": handler,
            "amqp_events.attempt": event.attempt,
            "amqp_events.replay_id": event.replay_id,
        }
    )
    current = trace.get_current_span()
    if getattr(getattr(current, "instrumentation_scope", None), "name", "") == _CELERY:
        current.set_attributes(attributes)
        return nullcontext()
    around = propagate.extract(_text(event.headers), context.get_current())
    span = _tracer.start_span(
        f"process {handler}",
        context=around,
        kind=trace.SpanKind.CONSUMER,
        attributes=attributes,
    )
    return _Current(span, around)


def _attributes(operation: str, kind: str, name: str, destination: str) -> dict[str, Any]:
    return {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": destination,
        "amqp_events.event_name": name,
    }


def _destination(*parts: str | None) -> str:
    """Return exchange, routing key and a consumer's queue, without what is empty or the same."""
    return ":".join(dict.fromkeys(filter(None, parts)))


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value not in (None, "")}


def _text(headers: Mapping[str, Any]) -> dict[str, str]:
    # Propagators expect text; another publisher may send anything.
    return {key: value for key, value in headers.items() if isinstance(value, str)}


def _parent(headers: Mapping[str, Any]) -> Any:
    """Return the span context that headers carry, an invalid one if they carry none."""
    extracted = propagate.extract(_text(headers), context.Context())
    return trace.get_current_span(extracted).get_span_context()


def _type(exc: BaseException) -> str:
    cls = type(exc)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
