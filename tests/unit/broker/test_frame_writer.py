"""Frames that are written by our own encoder are py-amqp's, byte for byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import amqp
import pytest
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import given, settings
from hypothesis import strategies as st

from django_amqp_events.broker.fast import frame_writer as frame_writer_module
from django_amqp_events.broker.fast.frame_writer import (
    FrameWriter,
    UnsupportedMessageError,
    header_table,
    properties,
)
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
)
headers = st.dictionaries(names, values, max_size=20)
given_properties = st.fixed_dictionaries(
    {},
    optional={
        "content_type": st.one_of(st.none(), names),
        "content_encoding": names,
        "delivery_mode": st.integers(0, 255),
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
@given(headers)
def test_header_tables(found: dict[str, Any]):
    assert header_table(found) == dumps("F", (found,))


@settings(max_examples=300, deadline=None)
@given(headers, given_properties, st.binary(max_size=2000), names, names, st.booleans())
def test_whole_message_is_written(
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
    frames = FrameWriter(1, FRAME_MAX).frames(published, mandatory=mandatory)
    assert frames == plain(published, mandatory=mandatory)


def test_one_encoder_writes_many():
    """Cached values of one message do not appear in another."""
    encoder = FrameWriter(1, FRAME_MAX)
    for number in range(3 * frame_writer_module._REMEMBERED):
        published = message(
            exchange=f"e{number % 7}",
            routing_key=f"key.{number}",
            headers={f"name-{number}": f"value-{number}", "same": "same", "n": number},
            properties={"message_id": f"id-{number}", "correlation_id": f"id-{number}"},
        )
        for mandatory in (True, False):
            assert encoder.frames(published, mandatory=mandatory) == plain(
                published, mandatory=mandatory
            )
    assert len(frame_writer_module._shorts) <= frame_writer_module._REMEMBERED
    assert len(frame_writer_module._longs) <= frame_writer_module._REMEMBERED
    assert len(encoder._methods) <= frame_writer_module._REMEMBERED


@pytest.mark.parametrize("size", [0, 1, 130_000, 130_900, 131_000, 131_072, 300_000])
def test_a_message_of_several_frames_is_py_amqps(size: int):
    published = message(body=b"x" * size)
    frames = FrameWriter(1, FRAME_MAX).frames(published, mandatory=True)
    assert frames is None if size > 130_950 else frames == plain(published)


@pytest.mark.parametrize(
    "changes",
    [
        {"headers": {"list": [1]}},
        {"headers": {"none": None}},
        {"headers": {"bytes": b"x"}},
        {"headers": {"object": object()}},
        {"headers": {"large": 2**63}},
        {"headers": {"small": -(2**63) - 1}},
        {"headers": {"n" * 256: 1}},
        {"headers": {5: 1}},
        {"headers": {"text": "x" * 200_000}},
        {"properties": {"priority": 3}},
        {"properties": {"reply_to": "there"}},
        {"properties": {"delivery_mode": 256}},
        {"properties": {"delivery_mode": True}},
        {"properties": {"delivery_mode": "2"}},
        {"properties": {"message_id": 5}},
        {"properties": {"message_id": ["list"]}},
        {"properties": {"message_id": "x" * 256}},
        {"routing_key": "ü" * 128},
        {"exchange": "x" * 256},
        {"exchange": None},
        {"body": "text"},
        {"body": memoryview(b"x")},
    ],
)
def test_special_properties_are_left_to_py_amqp(changes: dict[str, Any]):
    assert FrameWriter(1, FRAME_MAX).frames(message(**changes), mandatory=True) is None


def test_an_error_says_no_more_than_that():
    with pytest.raises(UnsupportedMessageError):
        header_table({"list": [1]})
    with pytest.raises(UnsupportedMessageError):
        properties(message(properties={"priority": 3}))
