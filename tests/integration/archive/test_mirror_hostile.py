"""Messages that no worker writes: each is one row with its bytes, and its neighbours are well."""

from __future__ import annotations

import json
import struct
from decimal import Decimal
from typing import Any

import amqp
import pytest

from django_amqp_events.archive.mirror import Mirror
from django_amqp_events.archive.row_writer import Counts
from django_amqp_events.broker import batch_reader
from django_amqp_events.message.types import Message
from django_amqp_events.models import ArchivedEvent, ArchivedFailure, State
from tests.acceptance.worker.test_hostile import (
    identity,
    nested,
    properties,
    short,
)
from tests.conftest import KINDS

from ..archiving import (
    archived,
    mirror_all,
    publish,
    received,
)

pytestmark = pytest.mark.usefixtures("archive_database")
#: On each kind of database, with time zones; and of what no database has a part in.
EACH = pytest.mark.parametrize("archive_database", KINDS, indirect=True)
ONE = pytest.mark.parametrize("archive_database", ["sqlite"], indirect=True)
ARCHIVE = "billing:archive"


def put(service: Any, raw: Any, body: Any = b"x", key: Any = b"shop.order.created") -> Any:
    """Publish to the archive with properties and routing key byte for byte."""
    channel = service.channel()
    channel.confirm_select()
    message = amqp.Message(body)
    message._serialize_properties = lambda: raw
    arguments = struct.pack(">H", 0) + short(ARCHIVE.encode()) + short(key) + b"\0"
    channel.connection.frame_writer(
        1, channel.channel_id, amqp.spec.Basic.Publish, arguments, message
    )
    channel.wait(amqp.spec.Basic.Ack)
    channel.close()


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


def bodies() -> Any:
    return sorted(bytes(body) for body in ArchivedEvent.objects.values_list("body", flat=True))


UNDECODABLE = [
    properties(*identity(b"1", (b"at", b"T" + struct.pack(">Q", 1_700_000_000_000_000)))),
    properties(*identity(b"2", (b"at", b"T" + struct.pack(">q", -62_135_596_800)))),
    properties(*identity(b"3"), message_id=b"\xff\xfe"),
    properties(*identity(b"4", (b"deep", nested(2000)))),
    properties(*identity(b"5", (b"deep", nested(300)))),
]


@EACH
def test_an_undecodable_property_costs_nothing_but_itself(billing):
    publish(billing, archived(received("before")))
    for n, raw in enumerate(UNDECODABLE):
        put(billing, raw, b"body %d" % n)
    put(billing, properties(*identity(b"6")), b"body 6", key=b"odd.\xff\xfe")
    publish(billing, archived(received("after")))
    counts = mirror_all(billing)
    assert (counts.events, counts.unreadable, counts.messages) == (8, 0, 8)
    for n in range(5):
        assert ArchivedEvent.objects.get(event_id=f"{n + 1}").body == b"body %d" % n
    assert ArchivedEvent.objects.get(event_id="6").body == b"body 6"
    healthy = ArchivedEvent.objects.filter(reason="exhausted").values_list("event_id", flat=True)
    assert set(healthy) == {"before", "after"}
    assert billing.ready(ARCHIVE) == 0


@EACH
def test_bodies_and_headers_of_any_kind(billing):
    every = bytes(range(256))
    odd = [b"", b"\0", every, b"\xff\xfe", b"[" * 100_000, b'"\\ud800"', b"{}", b"[[],{},{}]" * 9]
    headers = {
        "nothing": None, "number": 2**62, "less": -(2**62), "part": 1.5, "tiny": Decimal("0.05"),
        "bytes": b"\xff\xfe\0", "nul": "a\0b", "lone": "\ud800", "list": [1, "a", {"b": [None]}],
        "": "no name", "x" * 200: "y", "many": ["z" * 100] * 1100,
    }  # fmt: skip
    publish(billing, *(bare(body, {"event-id": f"{n}"}) for n, body in enumerate(odd)))
    publish(
        billing,
        bare(b"headers", {**headers, "event-id": "h"}, content_type="\ud800", content_encoding=""),
        bare(b"no id"),
        bare(b"id", {"event-id": 5, "id": ["x"], "event-attempt": -1, "event-history": "["}),
        bare(b"lone", {"event-id": "\ud800"}),
        bare(b"nul", {"event-id": "a\0b", "event-name": "c\0", "event-handler": "d\0"}),
        bare(b"nuls", {"event-id": "a", "event-name": "c\0", "event-handler": "d\0"}),
        bare(b"long", {"event-id": "i" * 300, "event-handler": "h" * 5000}),
        archived(received("healthy")),
    )
    counts = mirror_all(billing)
    assert (counts.events, counts.unreadable, counts.messages) == (len(odd) + 8, 0, len(odd) + 8)
    for n, body in enumerate(odd):
        assert bytes(ArchivedEvent.objects.get(event_id=f"{n}").body) == body
    kept = ArchivedEvent.objects.get(event_id="h").headers
    for key, value in headers.items():
        assert kept[key] == value, key
    assert ArchivedEvent.objects.get(event_id="a").handler == "d\\x00"
    nul = ArchivedEvent.objects.get(body=b"nul")
    assert nul.event_id == str(nul.pk)


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


@ONE
def test_forged_outcome_is_kept_with_its_body(billing):
    good = {"outcome": "succeeded", "replay_id": "6c0cf4a6-5d5b-5b0e-9d0f-0f3f0c1f5b58"}
    publish(
        billing,
        bare(b"order", {"event-id": "1", "event-outcome": json.dumps(good)}),
        bare(b"", {"event-id": "2", "event-outcome": json.dumps({**good, "outcome": "lost"})}),
        bare(b"", {"event-id": "3", "event-outcome": json.dumps({**good, "replay_id": "x"})}),
        bare(b"", {"event-id": "4", "event-outcome": json.dumps(good)}),
    )
    counts = mirror_all(billing)
    assert (counts.events, counts.foreign) == (3, 1)
    assert bodies() == [b"", b"", b"order"]


@EACH
def test_a_body_of_15_mib(billing):
    body = b'[[],{"text":"' + b"x" * (15 * 1024 * 1024) + b'"},{}]'
    publish(billing, archived(received("large", body=body)), archived(received("small")))
    assert mirror_all(billing).events == 2
    row = ArchivedEvent.objects.get(event_id="large")
    assert (bytes(row.body), row.body_size) == (body, len(body))


@ONE
def test_identities(billing):
    """Two bodies, handlers, foreign queues, sources or names: two rows each."""
    publish(
        billing,
        archived(received("1", payload={"n": 1})),
        archived(received("1", payload={"n": 2})),
        archived(received("1", payload={"n": 1}), handler="other"),
        archived(received("1", payload={"n": 1}, queue="a"), handler=None, failure=None),
        archived(received("1", payload={"n": 1}, queue="b"), handler=None, failure=None),
        archived(received("1", payload={"n": 1}, source="stock")),
        archived(received("1", payload={"n": 1}, name="shop.order.deleted")),
    )
    assert mirror_all(billing).events == 7


@ONE
def test_large_messages_do_not_pile_up_ahead(billing, monkeypatch):
    """The mirror prefetches two batches at most."""
    monkeypatch.setattr(batch_reader, "BATCH_BYTES", 1024 * 1024)
    publish(billing, *(bare(b"x" * 256 * 1024, {"event-id": f"{n}"}) for n in range(60)))
    most, counts = 0, []

    def mirrored(each: Counts) -> None:
        nonlocal most
        counts.append(each.messages)
        # Those of this batch are acked, and RabbitMQ has heard of it.
        if sum(counts) > 20:
            most = max(most, 60 - sum(counts) - billing.ready(ARCHIVE))

    mirroring = Mirror(app=billing.app, settings=billing.settings, mirrored=mirrored)
    assert mirroring.run(until_empty=True).events == 60
    assert max(counts) <= 5
    assert 0 < most <= 16
