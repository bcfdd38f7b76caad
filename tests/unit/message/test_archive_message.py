"""Messages of the archive read back: nothing in them is believed to be what it should be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from django_amqp_events.message import archive_message
from django_amqp_events.message.archive_message import Archived, Outcome
from django_amqp_events.message.types import Received
from tests.integration.archiving import archived, received


def delivery(headers: Any, body: Any = b"x", **more: Any) -> Any:
    return Received(
        queue="billing:archive", exchange="", routing_key="a.b", body=body, headers=headers,
        properties={"content_type": "application/json"}, **more,
    )  # fmt: skip


def read(headers: Any, body: Any = b"x", **more: Any) -> Archived:
    found = archive_message.read(delivery(headers, body, **more))
    assert isinstance(found, Archived)
    return found


def identity(headers: Any, body: Any = b"x", **more: Any) -> Any:
    return read(headers, body, **more).identity("billing")


def test_counts_of_deliveries_are_in_no_identity_and_no_row():
    one = {"a": 1, "event-archive": '{"reason": "failed"}'}
    again = read({"x-delivery-count": 3, **one, "x-acquired-count": 4})
    assert again.headers == read(one).headers == {"a": 1}
    assert again.identity("billing") == identity(one) is not None
    copy = {"event-archive": '{"reason": "failed", "copy": "1"}'}
    assert len({identity(one), identity(one, b"y"), identity(copy)}) == 3


def test_nothing_tells_a_message_without_an_id_from_an_equal_one():
    assert identity({"a": 1}) is None
    assert identity({}, unreadable="why") is None


def test_events_of_one_id_are_told_apart_by_name_and_body():
    def of(message: Any) -> Any:
        return read(message.headers, message.body).identity("billing")

    created = of(archived(received("1")))
    assert of(archived(received("1"), attempt=4)) == created
    assert of(archived(received("1", name="shop.order.deleted"))) != created
    assert of(archived(received("1", payload={"order_id": 8}))) != created


@pytest.mark.parametrize("value", [7, None, [], {}, [[1]], True, 1.5])
def test_wrong_type_is_ignored(value):
    keys = ("reason", "detail", "handler", "queue", "traceback", "frames", "history", "exception")
    found = read({"event-archive": json.dumps({**dict.fromkeys(keys, value), "attempt": "x"})})
    assert (found.reason, found.detail, found.handler, found.queue) == ("unknown", "", None, "")
    assert (found.frames, found.history, found.exception) == ((), (), "")
    assert (found.attempts, found.location) == (1, "")


def test_an_outcome_has_no_body():
    header = {"event-id": "1", "event-outcome": json.dumps({"outcome": "succeeded"})}
    assert isinstance(archive_message.read(delivery(header, b"")), Outcome)
    assert read(header, b"x").reason == "unknown"


def test_too_deep_document_is_ignored():
    deep = '{"reason": "failed", "a": ' + "[" * 300 + "]" * 300 + "}"
    assert read({"event-archive": deep}).reason == "unknown"
    assert read({"event-archive": deep}).headers == {"event-archive": deep}


def test_the_failing_line_is_ours():
    message = archived(received("1"))
    found = read(dict(message.headers), message.body)
    assert found.location == "billing.tax:28 in rate"
    assert found.payload == {"order_id": 7}
    odd = json.dumps({"reason": "failed", "frames": [{"file": [], "line": {}, "module": 5}]})
    assert read({"event-archive": odd}).location == "5:? in ?"
