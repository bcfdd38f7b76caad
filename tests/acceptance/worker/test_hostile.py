"""Hostile messages: each is archived and the worker continues."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import pytest

from ..conftest import POOLS, Make
from ..harness import (
    Archive,
    Eyes,
    Service,
    until,
)
from .test_hostile_table import put, short

ACT = "core.act"
QUEUE = "core.testproject.act"
BODY = b'[[],{"plan":["ok"]},{}]'


def long(text: bytes) -> bytes:
    return b"S" + struct.pack(">I", len(text)) + text


def nested(depth: int) -> bytes:
    value = b"t\x01"
    for _ in range(depth):
        value = b"A" + struct.pack(">I", len(value)) + value
    return value


def properties(*headers: tuple[bytes, bytes], message_id: bytes = b"") -> bytes:
    """Encode properties by hand: content type, encoding, headers, delivery mode, message id."""
    table = b"".join(short(key) + value for key, value in headers)
    return (
        struct.pack(">H", 0xF080)
        + short(b"application/json")
        + short(b"utf-8")
        + struct.pack(">I", len(table))
        + table
        + b"\x02"
        + short(message_id)
    )


def identity(event_id: bytes, *more: tuple[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"event-id", long(event_id)), *more)


@pytest.fixture
def core(fresh_eyes: Eyes, service: Make) -> Service:
    core = service(fresh_eyes)
    core.declare()
    # No event of a handler's name has these bytes, but a pattern's may.
    channel = fresh_eyes.channel()
    channel.queue_bind(QUEUE, "events", "core.odd.*")
    channel.close()
    return core


def archived(eyes: Eyes, number: int) -> list[dict[str, Any]]:
    archive = Archive(eyes)
    until(lambda: len(archive.collect()) >= number, what=f"{number} archived")
    return archive.collect()


def goes_on(core: Service, eyes: Eyes, worker: Any, ids: Iterable[int] = range(4)) -> None:
    """More events than the pool has processes are handled, nothing is left anywhere."""
    events = [eyes.event(ACT, {"plan": ["ok"]}) for _ in ids]
    until(lambda: all(core.runs(event_id, "end") for event_id in events))
    eyes.empty(QUEUE)
    assert worker.alive
    assert worker.log.count("Connected to") == 1
    assert worker.stop() == 0


@pytest.mark.parametrize("pool", POOLS)
def test_properties_that_cannot_be_read(fresh_eyes: Eyes, core: Service, pool: str) -> None:
    """py-amqp raises over each of them while it reads the socket; without headers, none is run."""
    milliseconds = b"T" + struct.pack(">Q", 1_700_000_000_000_000)
    raws = [
        properties(*identity(b"1", (b"at", milliseconds))),
        properties(*identity(b"2", (b"at", b"T" + struct.pack(">q", -62_135_596_800)))),
        properties(*identity(b"3"), message_id=b"\xff\xfe"),
        properties(*identity(b"4", (b"deep", nested(2000)))),
        properties(*identity(b"5", (b"deep", nested(300)))),
    ]
    worker = core.worker(pool, 1 if pool == "solo" else 2).wait_ready()
    for raw in raws:
        put(fresh_eyes, "events", ACT.encode(), raw, BODY)
    put(fresh_eyes, "events", b"core.odd.\xff\xfe", properties(*identity(b"6")), BODY)
    entries = {entry["reason"]: entry for entry in archived(fresh_eyes, 5)}
    assert entries.keys() == {"malformed", "unknown"}
    assert all(entry["message"].body == BODY for entry in entries.values())
    assert entries["unknown"]["routing_key"] == "core.odd.\\xff\\xfe"
    until(lambda: core.runs("3", "end"))
    goes_on(core, fresh_eyes, worker)


def test_names_that_differ_at_their_end_only(fresh_eyes: Eyes, service: Make) -> None:
    """Their consumers have different tags; equal ones cost the connection, again and again."""
    common = "n" * 120
    options = {"EVENTS": ["core.long"], "HANDLER": "testproject.core.act", "BIND": True}
    core = service(
        fresh_eyes, events={"HANDLERS": {f"{common}.a": options, f"{common}.b": options}}
    )
    core.declare()
    worker = core.worker("threads", 2).wait_ready()
    event_id = fresh_eyes.event("core.long", {"plan": ["ok"]})
    until(lambda: len(core.runs(event_id, "end")) == 2)
    goes_on(core, fresh_eyes, worker)
