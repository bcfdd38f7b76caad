"""The frames of a publish are py-amqp's, byte for byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import amqp
import pytest
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import given, settings
from hypothesis import strategies as st

from django_amqp_events.broker.connection import AMQP_ERRORS
from django_amqp_events.broker.frame_writer import publish_frames
from django_amqp_events.message.types import Message

FRAME_MAX = 131_072
#: Any text, lone surrogates too.
texts = st.text(st.characters(exclude_categories=()), max_size=300)
names = st.text(st.characters(exclude_categories=()), max_size=60)
values = st.one_of(
    texts,
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([2**31 - 1, 2**31, -(2**31) + 1, -(2**31), -(2**31) - 1]),
    st.booleans(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.none(),
    st.binary(max_size=5),
    st.lists(st.integers(0, 9), max_size=2),
    st.dictionaries(names, st.booleans(), max_size=2),
)
headers = st.dictionaries(names, values, max_size=20)
given_properties = st.fixed_dictionaries(
    {},
    optional={
        "content_type": st.one_of(st.none(), names),
        "content_encoding": names,
        "delivery_mode": st.integers(0, 255),
        "priority": st.integers(0, 255),
        "timestamp": st.integers(0, 2**32),
        "type": names,
        "app_id": names,
        "correlation_id": names,
        "message_id": names,
    },
)


def message(**changes: Any) -> Message:
    values: dict[str, Any] = {
        "exchange": "events",
        "routing_key": "shop.order.created",
        "body": b"[[],{},{}]",
        "headers": {},
        "properties": {"message_id": "one", "delivery_mode": 2},
        **changes,
    }
    return Message(**values)


def frames(found: Message, *, mandatory: bool = True) -> bytes:
    return publish_frames(found, channel=1, frame_max=FRAME_MAX, mandatory=mandatory)


def plain(found: Message, *, mandatory: bool = True) -> bytes:
    """Return what py-amqp writes."""
    written = bytearray()
    connection = SimpleNamespace(frame_max=FRAME_MAX, bytes_sent=0)
    write = frame_writer(connection, SimpleNamespace(write=written.extend))
    raw = amqp.Message(
        found.body, application_headers=dict(found.headers), **dict(found.properties)
    )
    arguments = dumps("Bssbb", (0, found.exchange, found.routing_key, mandatory, False))
    write(1, 1, amqp.spec.Basic.Publish, arguments, raw)
    return bytes(written)


@settings(max_examples=300, deadline=None)
@given(headers, given_properties, st.binary(max_size=2000), names, names, st.booleans())
def test_frames_are_those_of_py_amqp(
    found: dict[str, Any],
    props: dict[str, Any],
    body: bytes,
    exchange: str,
    key: str,
    mandatory: bool,
):
    published = message(
        headers=found, properties=props, body=body, exchange=exchange, routing_key=key
    )
    assert frames(published, mandatory=mandatory) == plain(published, mandatory=mandatory)


@pytest.mark.parametrize("size", [0, 1, 130_000, 131_063, 131_064, 131_065, 131_072, 300_000])
def test_a_body_of_several_frames(size: int):
    published = message(body=b"x" * size)
    assert frames(published) == plain(published)


@pytest.mark.parametrize(
    "headers",
    [
        {"object": object()},
        {"large": 2**63},
        {"n" * 256: 1},
        {5: 1},
        {"text": "x" * 131_072},
    ],
    ids=lambda headers: str(headers)[:20],
)
def test_a_header_that_cannot_be_encoded(headers: dict[Any, Any]):
    with pytest.raises(AMQP_ERRORS):
        frames(message(headers=headers))


@pytest.mark.parametrize(
    "changes",
    [
        {"properties": {"delivery_mode": 256}},
        {"properties": {"delivery_mode": "2"}},
        {"properties": {"message_id": 5}},
        {"properties": {"message_id": "x" * 256}},
        {"routing_key": "ü" * 128},
        {"exchange": "x" * 256},
    ],
)
def test_a_property_or_route_that_cannot_be_encoded(changes: dict[str, Any]):
    with pytest.raises(AMQP_ERRORS):
        frames(message(**changes))
