"""Messages that no worker writes: each is one row with its bytes, and its neighbours are well."""

from __future__ import annotations

import json
from typing import Any

import pytest

from django_amqp_events.message.types import Message
from django_amqp_events.models import ArchivedEvent, ArchivedFailure, State
from tests.conftest import EACH

from ..archiving import (
    archived,
    mirror_all,
    publish,
    received,
)

pytestmark = pytest.mark.usefixtures("archive_database")
#: On each kind of database, with time zones; and of what no database has a part in.
ARCHIVE = "billing:archive"


def bare(body: Any = b"x", headers: Any = None, **more: Any) -> Any:
    return Message(
        exchange=ARCHIVE,
        routing_key="shop.order.created",
        body=body,
        headers=headers or {},
        properties={"delivery_mode": 2, **more},
    )


def forged(document: Any, **headers: Any) -> Any:
    return bare(b"forged", {"event-archive": json.dumps(document), "event-id": "f", **headers})


WRONG: list[Any] = [
    None, 7, -1, 1.5, True, "", "\0", "\ud800", "x" * 9000, [], [[]], {}, {"a": {"b": []}},
    10**30, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00",
]  # fmt: skip
KEYS = [
    "version", "reason", "detail", "service", "handler", "queue", "event_id", "event_name",
    "source", "attempt", "replay_id", "worker", "first_failed_at", "last_failed_at", "exception",
    "frames", "traceback", "history", "deaths", "exchange", "routing_key", "properties", "cut",
]  # fmt: skip


@EACH
def test_forged_documents_are_kept(billing):
    whole = json.loads(archived(received("w")).headers["event-archive"])
    messages = [
        forged({**whole, key: value, "n": f"{key}{n}"}, **{"event-id": f"{key}-{n}"})
        for key in KEYS
        for n, value in enumerate(WRONG)
    ]
    deep = '{"reason":' + "[" * 900 + "]" * 900 + "}"
    frames = [{"file": [1], "line": 10**30, "function": {"a": 1}}, {}, 5]
    messages += [
        forged({**whole, "exception": {"type": value, "message": value}, "n": n})
        for n, value in enumerate(WRONG)
    ]
    messages += [
        bare(b"forged", {"event-id": "deep", "event-archive": deep}),
        bare(b"forged", {"event-id": "text", "event-archive": "no JSON"}),
        bare(b"forged", {"event-id": "list", "event-archive": "[1]"}),
        bare(b"forged", {"event-id": "number", "event-archive": 5}),
        bare(b"forged", {"event-id": "digits", "event-archive": '{"attempt": ' + "9" * 5000 + "}"}),
        forged({**whole, "frames": frames}, **{"event-id": "frames"}),
        archived(received("healthy")),
    ]
    publish(billing, *messages)
    counts = mirror_all(billing)
    assert counts.messages == len(messages)
    assert counts.events + counts.failures == len(messages)
    assert counts.unreadable == 0
    assert ArchivedFailure.objects.count() == len(messages)
    years = {row.last_failed_at.year for row in ArchivedEvent.objects.only("last_failed_at")}
    assert years < set(range(2000, 2100))
    healthy = ArchivedEvent.objects.get(event_id="healthy")
    assert (healthy.state, healthy.attempts) == (State.ARCHIVED, 3)


@EACH
def test_a_body_of_15_mib(billing):
    body = b'[[],{"text":"' + b"x" * (15 * 1024 * 1024) + b'"},{}]'
    publish(billing, archived(received("large", body=body)), archived(received("small")))
    assert mirror_all(billing).events == 2
    row = ArchivedEvent.objects.get(event_id="large")
    assert (bytes(row.body), row.body_size) == (body, len(body))
