"""Any message at all: it is read or refused as malformed, and every copy of it can be written.

Few examples by default; ``AMQP_EVENTS_FUZZ=20000`` and ``--timeout 0`` look for longer.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import amqp
import pytest
from amqp.serialization import decode_properties_basic, dumps
from hypothesis import Phase, example, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from django_amqp_events.context import ReceivedEvent
from django_amqp_events.exceptions import Malformed
from django_amqp_events.message import archive_message, decoding, encoding
from django_amqp_events.message.archive_message import Archived, Outcome
from django_amqp_events.message.decoding import MAX_ID
from django_amqp_events.message.headers import (
    _BROKER_HEADER,
    EVENT_ARCHIVE,
    EVENT_HISTORY,
    MAX_HEADERS,
    table_size,
)
from django_amqp_events.message.types import (
    Failure,
    Message,
    Payload,
    Progress,
    Received,
)
from django_amqp_events.models import ArchivedEvent, clean
from tests.event_messages import delivered

EXAMPLES = int(os.environ.get("AMQP_EVENTS_FUZZ", "25"))
NOW = datetime(2026, 3, 1, 12, 0, 1, tzinfo=UTC)
MAX_BODY = 1024 * 1024
#: Properties and what py-amqp adds; RabbitMQ's frame is 131,072 bytes.
ROOM = 4_000
#: Headers of the broker's own.
BROKERS = {
    "x-death", "x-first-death-queue", "x-first-death-reason", "x-last-death-exchange", "CC", "BCC",
    "x-delivery-count", "x-acquired-count", "x-delay", "x-opt-anything", "x-received-from",
}  # fmt: skip

fuzz = profile(max_examples=EXAMPLES, phases=set(Phase) - {Phase.explain})


# -- what a client can put on the wire, as py-amqp reads it

characters = st.one_of(
    st.characters(),
    st.sampled_from(["\0", "\ud800", "\udfff", "\u202e", "\x1b", "\n", "\u2028", "<", "é", "😀"]),
)
words = st.text(characters, max_size=20)
texts = st.builds(
    lambda text, times: (text * times)[:100_000], words, st.sampled_from([1, 1, 1, 30, 3000])
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.decimals(-(2**31) + 1, 2**31 - 1, places=3).filter(lambda d: abs(d) < 2_000_000),
    st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31, 23, 59, 59)),  # noqa: DTZ001
    texts,
    st.binary(max_size=40),
)
#: py-amqp decodes a key if that is possible.
undecodable = st.binary(max_size=7).map(lambda rest: b"\xff" + rest)
keys = st.one_of(
    words.filter(lambda key: len(key.encode("utf-8", "surrogatepass")) < 256), undecodable
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=8,
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=8,
)


def nested(depth: int, around: str = "1") -> str:
    return "[" * depth + around + "]" * depth


documents = st.one_of(
    json_values.map(json.dumps),
    st.dictionaries(
        st.sampled_from(
            [
                *("version", "reason", "detail", "service", "handler", "queue", "event_id"),
                *("event_name", "source", "attempt", "replay_id", "worker"),
                *("first_failed_at", "last_failed_at", "exception", "frames", "traceback"),
                *("history", "deaths", "exchange", "routing_key", "properties", "cut"),
                *("outcome", "at"),
            ]
        ),
        json_values,
        max_size=8,
    ).map(json.dumps),
    st.integers(100, 3000).map(nested),
    st.integers(100, 1200).map(lambda depth: '{"reason": ' + nested(depth) + "}"),
    st.integers(100, 1200).map(lambda depth: '[{"at": ' + nested(depth) + "}]"),
    texts,
)


def repeated(entries: list[Any], times: int) -> str:
    """Write entries as often as RabbitMQ's frame has room for them."""
    room = 131_072 // len(json.dumps(entries))
    return json.dumps(entries * min(times, room or 1), ensure_ascii=False)


history_entry = st.dictionaries(st.sampled_from(["at", "message", "attempt"]), json_values)
histories = st.one_of(
    documents,
    st.builds(repeated, st.lists(history_entry, max_size=3), st.sampled_from([1, 1, 50, 500])),
)
deaths = st.one_of(
    values,
    st.lists(
        st.dictionaries(
            st.sampled_from(["queue", "reason", "time", "count", "exchange", "routing-keys"]),
            values,
        ),
        max_size=20,
    ),
)
ids = st.one_of(words, texts, st.uuids().map(str), values)
headers: st.SearchStrategy[dict[Any, Any]] = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    st.dictionaries(keys, values, max_size=5),
    st.fixed_dictionaries(
        {},
        optional={
            "id": ids,
            "task": ids,
            "event-id": ids,
            "event-name": ids,
            "event-service": ids,
            "event-handler": ids,
            "event-replay-id": ids,
            "event-correlation-id": ids,
            "event-causation-id": ids,
            "event-attempt": st.one_of(st.integers(-3, 3), values),
            "event-due-at": st.one_of(st.datetimes().map(str), values),
            "event-published-at": st.one_of(st.datetimes().map(str), values),
            "event-history": st.one_of(histories, values),
            "event-archive": st.one_of(documents, values),
            "event-outcome": st.one_of(documents, values),
            "event-unreadable": values,
            "event-format": values,
            **dict.fromkeys([*BROKERS, "cc", "x-match-id"], values),
            "x-death": deaths,
            "compression": values,
            "stamps": values,
        },
    ),
)
bodies = st.one_of(
    st.binary(max_size=60),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.lists(json_values, max_size=4).map(lambda value: json.dumps(value).encode()),
    st.dictionaries(words, json_values).map(lambda value: json.dumps([[], value, {}]).encode()),
    st.integers(0, 4000).map(lambda depth: f'[[],{{"a":{nested(depth)}}},{{}}]'.encode()),
    st.sampled_from(
        [
            b"",
            b'[[],{"a":NaN},{}]',
            b'[[],{"a":1e999},{}]',
            b'[[],{"__type__":"uuid","__value__":{"hex":"x"}},{}]',
            b'[[],{"a":{"__type__":"uuid","__value__":{"hex":[]}}},{}]',
            b"\xef\xbb\xbf[[],{},{}]",
            b'[[],{"a":"\\ud800"},{}]',
        ]
    ),
)
names = st.one_of(words, texts, words.map(lambda word: "0." * 28 + word))
content_types = st.one_of(
    st.just("application/json"), st.just("application/json"), words, st.none()
)
properties = st.fixed_dictionaries(
    {"content_type": content_types},
    optional={
        "content_encoding": st.one_of(st.just("utf-8"), words),
        "message_id": words,
        "expiration": words,
        "user_id": words,
        "reply_to": words,
        "priority": st.integers(0, 255),
        "timestamp": st.datetimes(datetime(1970, 1, 1)),  # noqa: DTZ001
        "correlation_id": words,
    },
)
received = st.builds(
    Received,
    queue=names,
    exchange=names,
    routing_key=names,
    body=bodies,
    headers=headers,
    properties=properties,
    redelivered=st.booleans(),
)
failures = st.one_of(
    st.none(),
    st.builds(
        Failure,
        exception=texts,
        message=texts,
        traceback=texts,
        frames=st.lists(
            st.fixed_dictionaries({"file": texts, "line": st.integers(), "function": words}),
            max_size=3,
        ).map(tuple),
    ),
)


# -- helpers


def written(message: Message) -> bytes:
    """Write a message as the publisher does, and return the bytes of its properties."""
    raw = amqp.Message(
        message.body, application_headers=dict(message.headers), **dict(message.properties)
    )
    dumps("ss", (message.exchange, message.routing_key))
    serialized: bytes = raw._serialize_properties()
    return serialized


def check(message: Message) -> Received:
    """Check that a copy can be written and is small, and return it as it is delivered."""
    wire = written(message)
    assert len(wire) < MAX_HEADERS + ROOM
    found, _ = decode_properties_basic(wire, 0)
    assert not {"expiration", "user_id", "reply_to", "priority"} & set(found)
    assert found["delivery_mode"] == 2
    found_headers = found.pop("application_headers")
    assert not BROKERS & found_headers.keys()
    return delivered(message, "svc.handler", headers=found_headers, properties=found)


def identified(
    delivery: Received, *, trusted: bool
) -> tuple[ReceivedEvent, Progress] | tuple[None, Progress]:
    try:
        return decoding.identify(delivery, trusted=trusted)
    except Malformed as exc:
        malformed = exc
    assert 0 < len(str(malformed)) < 1000
    return None, Progress()


def archived(
    delivery: Received, event: ReceivedEvent | None, progress: Progress, failure: Failure | None
) -> Message:
    return archive_message.build(
        delivery,
        exchange="svc:archive",
        reason="malformed",
        detail=failure.message if failure else "",
        at=NOW,
        worker="celery@one",
        service="svc",
        event=event,
        progress=progress,
        failure=failure,
        handler=progress.handler,
    )


# -- what is true of any message


@fuzz
@given(received, st.booleans())
def test_an_identity_is_text_that_any_header_takes(delivery: Received, trusted: bool) -> None:
    event, progress = identified(delivery, trusted=trusted)
    if event is None:
        return
    assert 1 <= len(event.id) <= MAX_ID
    for text in (event.id, event.name, event.service, event.correlation_id,
                 event.causation_id, event.replay_id, progress.handler):  # fmt: skip
        assert len(text or "") <= MAX_ID
        (text or "").encode()
    assert 1 <= event.attempt == progress.attempt < 2**31
    if not trusted:
        assert progress == Progress()
    # To a process of the pool.
    pickle.loads(pickle.dumps((event, progress)))  # noqa: S301


@fuzz
@given(received)
@example(Received(queue="q", exchange="", routing_key="", body=b"[" * 100_000,
                  headers={}, properties={"content_type": "application/json"}))  # fmt: skip
def test_a_body_is_read_or_malformed(delivery: Received) -> None:
    malformed: Malformed | None = None
    try:
        payload = decoding.decode(delivery, MAX_BODY)
    except Malformed as exc:
        malformed = exc
        payload = Payload(args=[], kwargs={})
    assert malformed is None or 0 < len(str(malformed)) < 1000
    assert isinstance(payload.args, list)
    assert isinstance(payload.kwargs, dict)
    pickle.loads(pickle.dumps(payload))  # noqa: S301


@fuzz
@given(received, st.booleans(), failures)
def test_any_message_can_be_archived(
    delivery: Received, trusted: bool, failure: Failure | None
) -> None:
    event, progress = identified(delivery, trusted=trusted)
    if failure is not None:
        progress = replace(
            progress, history=encoding.add_to_history(progress, failure, at=NOW, worker="w" * 300)
        )
    assert len(delivery.deaths) <= 16
    copy = archived(delivery, event, progress, failure)
    first = check(copy)
    assert first.body == delivery.body
    document = json.loads(first.headers[EVENT_ARCHIVE])
    assert document["reason"] == "malformed"
    gone = set(delivery.headers) - set(first.headers)
    if any(not _replaced(key) for key in gone):
        assert "headers" in document["cut"]
    # A copy of a copy is the same again.
    second = check(archived(replace(first, queue=delivery.queue), event, progress, failure))
    third = check(archived(replace(second, queue=delivery.queue), event, progress, failure))
    assert written_headers(second) == written_headers(third)


def _replaced(key: object) -> bool:
    return isinstance(key, str) and (
        key in ("event-archive", "event-outcome") or bool(_BROKER_HEADER.match(key))
    )


def written_headers(delivery: Received) -> bytes:
    # Bytes: NaN is not itself.
    return bytes(dumps("F", [dict(delivery.headers)]))


@fuzz
@given(received, *[st.booleans()] * 2, st.integers(1, 2**31 - 1), st.uuids() | st.none())
def test_retry_and_replay_round_trip(
    delivery: Received, trusted: bool, forced: bool, attempt: int, replay_id: UUID | None
) -> None:
    event, progress = identified(delivery, trusted=trusted)
    if event is None:
        return
    common: dict[str, Any] = {
        "exchange": "svc:delay.1s",
        "routing_key": "svc.handler",
        "service": "svc",
    }
    common["handler"] = "app.handler"

    def retry(of: Received, event: ReceivedEvent) -> Message:
        return encoding.retry_message(
            of,
            event,
            **common,
            attempt=attempt,
            due_at=NOW,
            replay_id=str(replay_id) if replay_id else None,
            history=progress.history,
        )

    def replay(of: Received, event: ReceivedEvent) -> Message:
        event = replace(event, replay_forced=forced)
        return encoding.retry_message(of, event, **common, replay_id=str(replay_id))

    for build in (retry, replay):
        copy = check(build(delivery, event))
        back, now = decoding.identify(copy, trusted=True)
        assert (back.id, back.name, back.service) == (event.id, event.name, event.service)
        assert back.correlation_id == event.correlation_id
        assert back.causation_id == event.causation_id
        assert back.published_at == event.published_at
        assert now.handler == "app.handler"
        if build is retry:
            assert now.attempt == attempt
            assert now.due_at == NOW
            assert now.history == progress.history or EVENT_HISTORY not in copy.headers
        assert copy.body == delivery.body
        again = check(build(copy, back))
        assert written_headers(again) == written_headers(copy)
        if build is replay:
            assert back.replay_forced is forced
            retried, _ = decoding.identify(check(retry(copy, back)), trusted=True)
            assert retried.replay_forced is (forced and replay_id is not None)
            # A publisher may write what it likes.
            assert not decoding.identify(copy, trusted=False)[0].replay_forced


@fuzz
@given(values)
def test_the_size_of_a_header_is_estimated_from_above(value: Any) -> None:
    assert table_size({"k": value}) >= len(dumps("F", [{"k": value}]))


@pytest.mark.parametrize(
    ("headers", "failure", "cut"),
    [
        # The id was the largest header and was dropped first.
        ({f"h{number}": number for number in range(25_000)}, None, "headers"),
        # JSON writes such a character with 12 bytes, so long values alone fill the headers.
        ({}, Failure(exception="shop.TaxError", message="\U0001f4b8" * 3_000), "words"),
    ],
)
def test_what_is_large_keeps_the_identity(
    headers: dict[str, Any], failure: Failure | None, cut: str
) -> None:
    delivery = Received(
        queue="q", exchange="events", routing_key="shop.order", body=b"",
        headers={"event-id": "an-id-that-is-longer", **headers}, properties={},
    )  # fmt: skip
    event, progress = identified(delivery, trusted=False)
    found = archive_message.read(check(archived(delivery, event, progress, failure)))
    assert isinstance(found, Archived)
    assert found.event is not None
    assert (found.event.id, found.event.name) == ("an-id-that-is-longer", "shop.order")
    assert {"headers", "words"} & set(found.document["cut"]) == {cut}


# -- the archive queue


@fuzz
@given(received, st.sampled_from(["", "the headers and properties cannot be read"]))
def test_whatever_is_in_the_archive_queue_is_read(delivery: Received, unreadable: str) -> None:
    delivery = replace(delivery, unreadable=unreadable)
    found = archive_message.read(delivery)
    if isinstance(found, Outcome):
        assert found.event.id
        clean(found.outcome)
        return
    _storable(found, delivery)


@fuzz
@given(received, st.booleans(), failures)
@example(
    Received(
        queue="", exchange="𐀀" * 3_000, routing_key="0\x1f𐀀𐀀𐀀𐀀" * 30, body=b"", headers={},
        properties={"content_type": "application/json"},
    ),
    False,
    None,
)  # fmt: skip
def test_archive_message_round_trips(
    delivery: Received, trusted: bool, failure: Failure | None
) -> None:
    event, progress = identified(delivery, trusted=trusted)
    copy = check(archived(delivery, event, progress, failure))
    found = archive_message.read(copy)
    assert isinstance(found, Archived)
    assert found.reason == "malformed"
    assert found.body == delivery.body
    assert found.attempts == progress.attempt
    if event is not None:
        assert found.event is not None
        assert (found.event.id, found.event.name) == (event.id, event.name)
        assert found.event.replay_id == progress.replay_id
    _storable(found, copy)


def _storable(found: Archived, delivery: Received) -> None:
    """Do with it what the mirror does before the database has it."""
    assert found.body == delivery.body
    identity = found.identity("svc")
    assert identity == archive_message.read(delivery).identity("svc") or found.text  # type: ignore[union-attr]
    if identity is not None:
        found.occurrence(identity)
    for text in (found.reason, found.detail, found.exception, found.message, found.location,
                 found.handler, found.queue, found.text, found.content_type,
                 found.content_encoding):  # fmt: skip
        kept = clean(text, 255)
        kept.encode()
        assert "\0" not in kept
        assert len(kept) <= 255
    assert 1 <= found.attempts < 2**31
    json.dumps({"history": list(found.history)}, default=str)
    row = ArchivedEvent(headers_raw=ArchivedEvent.pack_headers(found.headers))
    assert len(row.headers) == len(found.headers)
