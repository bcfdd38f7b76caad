"""The message: the frozen formats, what is read from hostile ones, how large copies get."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from amqp.serialization import dumps as amqp_dumps
from kombu.utils.json import dumps as kombu_dumps

from django_amqp_events.context import ReceivedEvent
from django_amqp_events.exceptions import InvalidEventError, Malformed
from django_amqp_events.message import archive_message, encoding
from django_amqp_events.message.decoding import decode, identify
from django_amqp_events.message.encoding import (
    add_to_history,
    encode_payload,
    retry_message,
)
from django_amqp_events.message.headers import check_headers
from django_amqp_events.message.types import (
    Failure,
    Message,
    Progress,
    Received,
    handling,
    task_id,
)
from tests import event_messages

MESSAGES = Path(__file__).resolve().parents[2] / "messages"
EVENT_ID = "8d4ad1b8-1f0c-4f6e-9d0e-6a4b1f1f0c11"
CAUSE_ID = "0b0d7b8a-0000-4000-8000-000000000001"
REPLAY_ID = "3f1c2c9e-0000-4000-8000-000000000002"
PUBLISHED = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
FAILED = datetime(2026, 3, 1, 12, 0, 1, tzinfo=UTC)
HANDLER = "billing.send_invoice"
PAYLOAD: Mapping[str, Any] = {
    "order_id": 7,
    "total": Decimal("19.90"),
    "day": date(2026, 3, 1),
    "customer": UUID("5f0b1c52-2b3c-4a58-8d0a-1a2b3c4d5e6f"),
    "note": "Grüße, 你好",
}
MAXIMUM = 1024 * 1024
#: All headers together stay under this on the wire; RabbitMQ's frame_max is 128 kB.
WIRE_LIMIT = 64_000


def published(**options: Any) -> Message:
    return event_messages.published(payload=PAYLOAD, event_id=EVENT_ID, at=PUBLISHED, **options)


TRACING = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def with_options() -> Message:
    return published(correlation_id="basket-5", causation_id=CAUSE_ID, headers=TRACING)


def delivered(message: Message | None = None, **changes: Any) -> Received:
    """Return a message as the handler's queue delivers it."""
    queue = "billing.billing.send_invoice"
    return event_messages.delivered(message or published(), queue, **changes)


def with_headers(**headers: Any) -> Received:
    message = published()
    return delivered(
        message, headers={**message.headers, **{k.replace("_", "-"): v for k, v in headers.items()}}
    )


def failure(**changes: Any) -> Failure:
    return replace(
        Failure(
            exception="requests.exceptions.ConnectionError",
            message="no route to mail.example\nsecond line",
            traceback='Traceback (most recent call last):\n  File "handlers.py", line 9\n',
            frames=(
                {
                    "file": "billing/handlers.py",
                    "line": 9,
                    "function": "send_invoice",
                    "module": "billing.handlers",
                },
            ),
        ),
        **changes,
    )


def retried(received: Received | None = None, **changes: Any) -> Message:
    received = received or delivered()
    event, progress = identify(received, trusted=changes.pop("trusted", False))
    options: dict[str, Any] = {
        "exchange": "billing:delay.1s",
        "routing_key": "billing.billing.send_invoice",
        "service": "billing",
        "handler": HANDLER,
        "attempt": progress.attempt + 1,
        "due_at": FAILED + timedelta(seconds=1),
        "replay_id": progress.replay_id,
        "history": add_to_history(progress, failure(), at=FAILED, worker="celery@one"),
        **changes,
    }
    return retry_message(received, event, **options)


def archived(received: Received | None = None, *, trusted: bool = False, **changes: Any) -> Message:
    received = received or delivered()
    event, progress = identify(received, trusted=trusted)
    options: dict[str, Any] = {
        "exchange": "billing:archive",
        "reason": "exhausted",
        "at": FAILED + timedelta(seconds=1),
        "worker": "celery@one",
        "service": "billing",
        "detail": "All 1 retries are used up.",
        "event": event,
        "progress": progress,
        "handler": HANDLER,
        "failure": failure(),
        **changes,
    }
    return archive_message.build(received, **options)


def replayed(received: Received) -> Message:
    """Return the replay of an event that was archived after a retry."""
    return retry_message(
        received,
        identify(received, trusted=True)[0],
        exchange="billing:replay",
        routing_key="billing.billing.send_invoice",
        service="billing",
        handler=HANDLER,
        replay_id=REPLAY_ID,
    )


def came_back() -> Received:
    """Return the retry copy as it comes back from the delay queue."""
    copy = retried(delivered(with_options()))
    return delivered(
        copy,
        exchange="billing:return",
        headers={
            **copy.headers,
            "x-death": [
                {
                    "queue": "billing:delay.1s",
                    "reason": "expired",
                    "count": 1,
                    "exchange": "billing:delay.1s",
                    "routing-keys": ["billing.billing.send_invoice"],
                    "time": FAILED,
                }
            ],
            "x-first-death-queue": "billing:delay.1s",
            "x-first-death-reason": "expired",
            "x-first-death-exchange": "billing:delay.1s",
            "x-last-death-queue": "billing:delay.1s",
        },
    )


def unreadable() -> Received:
    return Received(
        queue="billing.billing.send_invoice",
        exchange="events",
        routing_key="shop.order.created",
        body=b"\xff\x00 no JSON",
        headers={"x-delivery-count": 2, "lang": "cobol"},
        properties={"content_type": "application/octet-stream", "message_id": "m-1"},
        redelivered=True,
    )


EXAMPLES: Mapping[str, Callable[[], Message]] = {
    "event": published,
    "event-with-options": with_options,
    "retry": lambda: retried(delivered(with_options())),
    "retry-of-a-replay": lambda: retried(
        came_back(), trusted=True, exchange="billing:delay.2s", replay_id=REPLAY_ID
    ),
    "replay": lambda: replayed(came_back()),
    "archive": lambda: archived(came_back(), trusted=True),
    "archive-unreadable": lambda: archive_message.build(
        unreadable(),
        exchange="billing:archive",
        reason="malformed",
        at=FAILED,
        worker="celery@one",
        service="billing",
        detail="the content type is 'application/octet-stream', not 'application/json'",
    ),
    "outcome": lambda: archive_message.build_outcome(
        replace(identify(delivered(), trusted=False)[0], replay_id=REPLAY_ID, attempt=12),
        exchange="billing:archive",
        handler=HANDLER,
        service="billing",
        outcome="succeeded",
        at=FAILED,
        worker="celery@one",
    ),
}


def as_file(message: Message) -> dict[str, Any]:
    """Return a message in the format of the example files."""
    try:
        body = {"body": message.body.decode()}
    except UnicodeDecodeError:
        body = {"body_base64": base64.b64encode(message.body).decode()}
    return {
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "properties": dict(message.properties),
        "headers": dict(message.headers),
        **body,
    }


# -- the frozen formats -------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_message_matches_its_example_file(name: str) -> None:
    """Other programs read such messages, so these files change only with the format version."""
    example = json.loads((MESSAGES / f"{name}.json").read_text(encoding="utf-8"))
    message = as_file(EXAMPLES[name]())
    assert message == example
    # True == 1 == 1.0, but not on the wire.
    assert json.dumps(message, sort_keys=True) == json.dumps(example, sort_keys=True)


def test_every_example_file_is_compared() -> None:
    assert {path.stem for path in MESSAGES.glob("*.json")} == set(EXAMPLES)


def wire_size(message: Message) -> int:
    """Return the bytes that py-amqp writes for the headers."""
    return len(amqp_dumps("F", [dict(message.headers)]))


def test_each_part_of_what_is_handled_changes_its_ids() -> None:
    """Service, handler, source, id, name and replay: in each combination of two values."""
    values = [("1", "1.1", "2"), ("3", "33")]
    events = [
        ReceivedEvent(id=id_, name=name, service=source)
        for id_ in values[0]
        for name in values[1]
        for source in values[1]
    ]
    parts = [
        (service, handler, event, replay_id)
        for service in values[1]
        for handler in values[0]
        for event in events
        for replay_id in (None, *values[1])
    ]
    ids = {task_id(*each) for each in parts}
    assert len({handling(*each) for each in parts}) == len(ids) == len(parts)
    assert all(str(UUID(text)) == text for text in ids)
    # Frozen: a result is found by it again.
    event = ReceivedEvent(id="1", name="a.c", service="shop")
    assert task_id("billing", "a.b", event) == "f3972e7c-19a4-5920-8007-08123b705c9e"


# -- payloads -----------------------------------------------------------------------------


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        CIRCLE,
        b"bytes",
        {1, 2},
        float("nan"),
        float("inf"),
        "lone \ud800",
        {("a", "b"): 1},
        pytest.param(10**5000, id="digits"),
    ],
)
def test_invalid_json_is_refused(value: object) -> None:
    with pytest.raises(InvalidEventError, match=r"shop\.order\.created"):
        encode_payload("shop.order.created", {"value": value})


def test_wrapped_celery_values_are_unwrapped() -> None:
    body = kombu_dumps([[], dict(PAYLOAD), {}]).encode()
    assert b"__type__" in body
    foreign = {"task": "a.b", "id": "e-1"}
    assert decode(delivered(body=body, headers=foreign), MAXIMUM) == decode(
        delivered(body=encode_payload("a.b", PAYLOAD)), MAXIMUM
    )
    # A type that kombu does not have is the payload's own.
    own = [[], {"a": {"__type__": "money", "__value__": 5}}, {}]
    received = delivered(body=json.dumps(own).encode(), headers=foreign)
    assert decode(received, MAXIMUM).kwargs == own[1]


def test_a_nesting_that_a_pool_can_take() -> None:
    """As deep as may be published and handled, and a long list is not deep."""
    deep: Any = 1
    for _ in range(199):
        deep = [deep]
    for value in (deep, [{"a": n} for n in range(1000)]):
        body = encode_payload("shop.order.created", {"a": value})
        assert decode(delivered(body=body), MAXIMUM).kwargs == {"a": value}
    with pytest.raises(InvalidEventError, match="nested deeper"):
        encode_payload("shop.order.created", {"a": {"a": deep}})


def test_the_limit_is_inclusive() -> None:
    received = delivered()
    decode(received, len(received.body))
    with pytest.raises(Malformed):
        decode(received, len(received.body) - 1)


# -- headers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"event-id": "x"},
        {"event-anything": "x"},
        {"task": "x"},
        {"eta": "x"},
        {"compression": "x"},
        {"x-death": "x"},
        {"x-delivery-count": 1},
        {"CC": "x"},
        {"BCC": "x"},
        {"x-delay": 1},
        {"": "x"},
        {5: "x"},
        {"x" * 129: "x"},
        {"lone \ud800": "x"},
        {"lone": "\ud800"},
        {"large": 2**63},
        {"nan": float("nan")},
        {"endless": float("-inf")},
        {"none": None},
        {"list": []},
        {"bytes": b"x"},
        {"huge": "x" * 30_000},
    ],
)
def test_headers_that_a_publisher_may_not_set(headers: dict[Any, Any]) -> None:
    with pytest.raises(InvalidEventError):
        check_headers("a.b", headers)


def test_headers_that_a_publisher_may_set() -> None:
    headers = {**TRACING, "tenant": "ä", "n": -(2**63), "x": 0.5, "b": True, "x" * 128: ""}
    check_headers("a.b", headers)
    assert wire_size(published(headers=headers)) < WIRE_LIMIT


def test_names_lose_the_prefix_of_native_delayed_delivery() -> None:
    prefix = "0." * 27 + "1."
    received = delivered(routing_key=prefix + "shop.order.created")
    assert received.event_key == "shop.order.created"
    assert identify(received, trusted=False)[0].name == "shop.order.created"
    assert archived(received).routing_key == "shop.order.created"
    # With fewer parts it is an ordinary event.
    assert delivered(routing_key="0.1.a").event_key == "0.1.a"


# -- copies -------------------------------------------------------------------------------


def test_retry_has_its_own_celery_headers() -> None:
    received = with_headers(
        eta="x", expires="x", timelimit=[1, 1], stamps={}, group="g", ignore_result=True
    )
    copy = retried(received)
    assert not {"eta", "expires", "timelimit", "stamps", "group", "ignore_result"} & set(
        copy.headers
    )
    assert copy.headers["task"] == "shop.order.created"
    assert copy.headers["id"] == EVENT_ID


def test_archive_message_keeps_the_original() -> None:
    received = with_headers(eta="x", event_archive="forged", event_outcome="forged")
    message = archived(received)
    assert message.headers["eta"] == "x"
    assert message.headers["event-archive"] != "forged"
    assert "event-outcome" not in message.headers
    # Kept in words, so that they can be read and never mean anything.
    properties = {"content_type": "application/json", "user_id": "somebody"}
    archive = json.loads(archived(delivered(properties=properties)).headers["event-archive"])
    assert archive["properties"]["user_id"] == "somebody"


def test_the_traceback_goes_first_and_the_rest_stays() -> None:
    received = with_headers(tracing="x" * 45_000)
    message = archived(received, failure=failure(traceback=f"first{'x' * MAXIMUM}last"))
    archive = json.loads(message.headers["event-archive"])
    assert wire_size(message) < WIRE_LIMIT
    assert archive["cut"] == ["traceback"]
    assert "cut by django_amqp_events" in archive["traceback"]
    assert (archive["traceback"][:5], archive["traceback"][-4:]) == ("first", "last")
    assert len(message.headers["tracing"]) == 45_000
    assert archive["exception"]["message"] == failure().message
    assert archive["frames"] == [dict(frame) for frame in failure().frames]


def test_a_hundred_failures_are_remembered_in_few_bytes() -> None:
    progress = Progress()
    for attempt in range(1, 101):
        history = add_to_history(
            replace(progress, attempt=attempt),
            failure(message="ü" * 10_000),
            at=FAILED + timedelta(seconds=attempt),
            worker="w" * 500,
        )
        progress = replace(progress, attempt=attempt + 1, history=history)
    assert len(progress.history) <= encoding.MAX_HISTORY_ENTRIES
    assert len(json.dumps(progress.history)) <= encoding.MAX_HISTORY_BYTES * 1.2
    # Since when does it fail, and how did it fail last?
    assert progress.history[0]["attempt"] == 1
    assert progress.history[-1]["attempt"] == 100
    assert wire_size(archived(progress=progress)) < WIRE_LIMIT
    assert wire_size(retried(history=progress.history)) < WIRE_LIMIT
