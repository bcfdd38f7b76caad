"""Headers and properties that cannot be decoded cost nothing but themselves."""

from __future__ import annotations

import struct
from typing import Any

import amqp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_amqp_events.broker.delivery_reader import _PROPERTIES, decode
from django_amqp_events.message.types import Delivered, Received

TEXTS = (
    "content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id",
    "type", "user_id", "app_id", "cluster_id",
)  # fmt: skip
NUMBERS = ("delivery_mode", "priority", "timestamp")
#: Values of a table that py-amqp cannot decode.
BAD: dict[str, bytes] = {
    "milliseconds": b"T" + struct.pack(">Q", 1_700_000_000_000_000),
    "early": b"T" + struct.pack(">q", -62_135_596_800),
    "in a list": b"A\0\0\0\x09T" + struct.pack(">Q", 10**18),
    "in a table": b"F\0\0\0\x0b\x01xT" + struct.pack(">Q", 10**18),
}


def nested(depth: int) -> bytes:
    value = b"t\x01"
    for _ in range(depth):
        value = b"A" + struct.pack(">I", len(value)) + value
    return value


BAD |= {"deep": nested(300), "deeper": nested(3000)}
headers_ = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.text(max_size=3)
    | st.integers(-9, 9)
    | st.booleans()
    | st.none()
    | st.lists(st.integers(0, 9)),
    max_size=4,
)
properties_ = st.fixed_dictionaries(
    {},
    optional={name: st.text(max_size=3) for name in TEXTS}
    | {name: st.integers(0, 255) for name in NUMBERS},
)


def read(raw: bytes) -> Received:
    """Decode the properties of a content header."""
    return decode(Delivered("q", "events", "k", False, b"\0" * _PROPERTIES + raw, b"{}"))


def encode(headers: bytes, properties: dict[str, Any], bad: tuple[str, ...] = ()) -> bytes:
    """Encode properties with a table of headers; those of *bad* are no UTF-8."""
    given = {**properties, **dict.fromkeys(bad, "~~")}
    raw = bytearray(
        amqp.Message(b"", application_headers={"mark": 1}, **given)._serialize_properties()
    )
    table = amqp.serialization.dumps("F", [{"mark": 1}])
    raw = raw.replace(table, struct.pack(">I", len(headers)) + headers)
    return bytes(raw.replace(b"\x02~~", b"\x02\xff\xfe"))


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@settings(max_examples=20)
@given(before=headers_, after=headers_, properties=properties_)
def test_a_header(
    bad: bytes, before: dict[str, Any], after: dict[str, Any], properties: dict[str, Any]
) -> None:
    table = b"".join(
        (
            amqp.serialization.dumps("F", [before])[4:],
            b"\x03bad" + bad,
            amqp.serialization.dumps("F", [after])[4:],
        )
    )
    received = read(encode(table, properties))
    assert received.headers == {**before, **after}
    assert received.properties == properties
    assert not received.unreadable


@given(
    headers=headers_,
    properties=properties_,
    bad=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3, unique=True).map(tuple),
)
def test_a_property(
    headers: dict[str, Any], properties: dict[str, Any], bad: tuple[str, ...]
) -> None:
    table = amqp.serialization.dumps("F", [headers])[4:]
    received = read(encode(table, properties, bad))
    assert received.headers == headers
    assert received.properties == {
        name: value for name, value in properties.items() if name not in bad
    }


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x20\0", b"\x20\0\0\0\0\x09\x01x", b"\x20\0\0\0\0\x04\x01x?\0"],
)
def test_bytes_whose_parts_cannot_be_told(raw: bytes) -> None:
    received = read(raw)
    assert received.unreadable.startswith("the headers and properties cannot be read")
    assert received.headers == {"event-unreadable": raw}
    assert received.properties == {}
