"""The quick decoder returns what py-amqp does, or leaves the properties to py-amqp."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import amqp
import pytest
from amqp.serialization import decode_properties_basic
from hypothesis import given
from hypothesis import strategies as st

from django_amqp_events.broker.quick_properties import quick_properties
from django_amqp_events.message import encoding

#: Class, weight and body size.
BEFORE = bytes(12)
SHORT = ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
plain = st.one_of(texts, st.booleans(), st.integers(-(2**63), 2**63 - 1))
odd = st.one_of(
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=5),
    st.lists(plain, max_size=2),
    st.dictionaries(texts, plain, max_size=2),
)
properties = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(SHORT, texts),
        "delivery_mode": st.integers(1, 2),
        "priority": st.integers(0, 255),
        "expiration": st.just("5000"),
    },
)


def header(headers: dict[str, Any], **properties: Any) -> bytes:
    raw = amqp.Message(b"", application_headers=headers, **properties)
    serialized: bytes = raw._serialize_properties()
    return BEFORE + serialized


@given(st.dictionaries(texts, plain, max_size=8), properties)
def test_plain_headers(headers: dict[str, Any], given: dict[str, Any]) -> None:
    raw = header(headers, **given)
    quick = quick_properties(raw, 12)
    if {"type", "expiration"}.isdisjoint(given):
        assert quick == decode_properties_basic(raw, 12)[0]
    else:
        assert quick is None


@given(st.dictionaries(texts, st.one_of(plain, odd), max_size=6), properties)
def test_any_headers(headers: dict[str, Any], given: dict[str, Any]) -> None:
    raw = header(headers, **given)
    assert quick_properties(raw, 12) in (None, decode_properties_basic(raw, 12)[0])


@given(
    st.dictionaries(texts, plain, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(12, 200), st.integers(0, 255)), max_size=3),
    st.integers(0, 40),
    st.binary(max_size=3),
)
def test_damaged_headers(
    headers: dict[str, Any], changes: list[tuple[int, int]], missing: int, more: bytes
) -> None:
    """It decodes nothing that py-amqp refuses, and nothing differently."""
    raw = bytearray(header(headers, content_type="application/json", message_id="5"))
    for at, byte in changes:
        if at < len(raw):
            raw[at] = byte
    damaged = bytes(raw[: max(14, len(raw) - missing)]) + more
    quick = quick_properties(damaged, 12)
    if quick is not None:
        assert quick == decode_properties_basic(damaged, 12)[0]


@pytest.mark.parametrize("cut", range(2))
def test_the_headers_of_an_event(cut: int) -> None:
    message = encoding.event_message(
        exchange="events",
        name="shop.order.created",
        body=b"",
        event_id="e",
        service="shop",
        published_at=datetime.now(UTC),
        headers={"traceparent": "00-5-5-01", "attempts": 2**40, "sampled": True},
    )
    raw = header(dict(message.headers), **dict(message.properties))
    found = quick_properties(raw[: len(raw) - cut], 12)
    assert (found == decode_properties_basic(raw, 12)[0]) == (not cut)
    assert (found is None) == bool(cut)
