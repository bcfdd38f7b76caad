"""The table of hostile messages: what each one is, and where it ends.

Every case is put on the shared exchange and straight on a handler's queue, with a healthy event and
an ordinary task behind it, before a worker, a reaper and a mirror. At the end everything that the
broker took is accounted for, by event: handled once, or one row of the database with the raw bytes
and a reason; and the processes are still those that were started.
"""

from __future__ import annotations

import json
import pickle
import re
import sqlite3
import struct
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import amqp
import pytest

from tests.waiting import NotInTime

from ..conftest import POOLS
from ..harness import (
    Eyes,
    Service,
    Worker,
    until,
)

pytestmark = pytest.mark.timeout(300)

ACT = "core.act"
QUEUE = "core.testproject.act"
MIB = 1024 * 1024
HANDLED = "handled"
REFUSED = "refused"
#: Told from words that only look odd.
ODD = "\0 \x1b[31m\r\n \u202e\u2066 <script>alert(1)</script> {{ 7*7 }} '; DROP TABLE x; --"

Headers = Mapping[str, Any]


def plan(*steps: str, **more: Any) -> Callable[[str], bytes]:
    """A good body, with the case's name in it."""
    return lambda mark: json.dumps(
        [[], {"plan": list(steps), "case": mark, **more}, {}], separators=(",", ":")
    ).encode()


def text(template: str) -> Callable[[str], bytes]:
    """A body written by hand; ``%`` is the case's name."""
    return lambda mark: template.replace("%", mark).encode("utf-8", "surrogatepass")


def behind(body: bytes) -> Callable[[str], bytes]:
    """Bytes, with the case's name behind them."""
    return lambda mark: body + mark.encode()


@cache
def bomb() -> bytes:
    """Return 256 MiB, compressed."""
    return zlib.compress(b"\0" * (256 * MIB), 9)


def padded(size: int) -> Callable[[str], bytes]:
    """A good body of so many bytes."""
    return lambda mark: plan("ok")(mark).ljust(size)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A hostile message.

    Attributes:
        ends: where each copy of it ends: ``handled``, ``refused`` by the broker, or the reason of
            its row.
        direct: the same where it is put on the queue itself, if that differs; ``None``: not done.
        headers: beside those of an event; ``None`` as a value takes one of them out.
        raw: headers with types that py-amqp does not write, by hand.
        bare: no headers but these.
    """

    name: str
    ends: tuple[str, ...] = (HANDLED,)
    direct: tuple[str, ...] | None = ()
    body: Callable[[str], bytes] = field(default_factory=lambda: plan("ok"))
    headers: Headers = field(default_factory=dict)
    properties: Mapping[str, Any] = field(default_factory=dict)
    raw: tuple[tuple[bytes, bytes], ...] = ()
    bare: bool = False
    key: bytes = ACT.encode()

    def wire(self, mark: str) -> bytes:
        """Return its properties as encoded on the wire."""
        mine = {"event-id": mark, "task": ACT}
        ours: dict[str, Any] = dict(self.headers) if self.bare else {**mine, **self.headers}
        table = amqp.serialization.dumps(
            "F", [{key: value for key, value in ours.items() if value is not LEAVE_OUT}]
        )[4:] + b"".join(short(key) + value for key, value in self.raw)
        given = {
            "content_type": "application/json",
            "content_encoding": "utf-8",
            "delivery_mode": 2,
            **self.properties,
        }
        given = {key: value for key, value in given.items() if value is not LEAVE_OUT}
        rest = amqp.Message(b"", **given)._serialize_properties()
        if not table:
            return bytes(rest)
        # The table stands behind content type and encoding.
        (flags,) = struct.unpack(">H", rest[:2])
        at = 2
        for bit in (0x8000, 0x4000):
            at += 1 + rest[at] if flags & bit else 0
        size = struct.pack(">I", len(table))
        return bytes(struct.pack(">H", flags | 0x2000) + rest[2:at] + size + table + rest[at:])


LEAVE_OUT: Any = object()


def short(value: bytes) -> bytes:
    return bytes([len(value)]) + value


def nested(depth: int) -> bytes:
    """Return the value of a header: a list in a list, and so on."""
    value = b"t\x01"
    for _ in range(depth):
        value = b"A" + struct.pack(">I", len(value)) + value
    return value


class Touch:
    """Pickled, it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


DEEP = "[" * 300 + "]" * 300
EMBED = {
    "callbacks": [{"task": "testproject.tasks.ordinary", "args": ["callback"], "options": {}}],
    "errbacks": [{"task": "testproject.tasks.ordinary", "args": ["errback"], "options": {}}],
    "chain": [{"task": "testproject.tasks.ordinary", "args": ["chain"], "options": {}}],
    "chord": {"task": "testproject.tasks.ordinary", "args": ["chord"], "options": {}},
}
DIED = {
    "queue": QUEUE,
    "reason": "expired",
    "count": 7,
    "exchange": "core:return",
    "routing-keys": [QUEUE],
    "time": datetime(2026, 1, 1, tzinfo=UTC),
}
FAR = "2126-01-01T00:00:00Z"
REPLAY = "3f1c2c9e-0000-4000-8000-000000000002"


def plain_body(mark: str) -> bytes:
    return json.dumps({"plan": ["ok"], "case": mark}).encode()


def forged(queue: str) -> dict[str, Any]:
    return {**DIED, "queue": queue}


def cases(trap: Path, user: str, broker: tuple[int, ...] = ()) -> list[Case]:
    """Return all cases. *trap* is a file that must not be created."""
    evil = pickle.dumps(Touch(trap))
    yaml = f"!!python/object/apply:builtins.open ['{trap}', 'w'] # "
    bad, args, unknown, no = ("malformed",), ("arguments",), ("unknown",), ("refused",)

    def header(name: str, value: Any, *ends: str, **more: Any) -> Case:
        label = more.pop("label", name)
        return Case(name=f"header-{label}", headers={name: value}, ends=ends or (HANDLED,), **more)

    def body(name: str, content: Callable[[str], bytes], *ends: str, **more: Any) -> Case:
        return Case(name=f"body-{name}", body=content, ends=ends or bad, **more)

    def content(kind: Any, encoding: Any = "utf-8", of: Any = None, **more: Any) -> Case:
        return Case(
            name=f"content-{ascii(kind)[:30]}-{encoding!a}",
            properties={"content_type": kind, "content_encoding": encoding},
            body=of or plan("ok"),
            **{"ends": bad, **more},
        )

    def plain(name: str, content: Callable[[str], bytes], *ends: str, **more: Any) -> Case:
        """A message that Celery could not read."""
        given = {"headers": {"event-name": ACT}, "ends": ends or (HANDLED,), **more}
        return Case(name=f"json-{name}", body=content, bare=True, **given)

    def cloud(name: str, *ends: str, prefix: str = "", **more: Any) -> Case:
        """A CloudEvent, in binary mode with a prefix of its headers."""
        given = {"specversion": "1.0", "id": name, "source": "/odd", "type": ACT}
        given |= more.pop("attributes", {})
        given = {key: value for key, value in given.items() if value is not LEAVE_OUT}
        about: dict[str, Any] = {"name": f"cloud-{name}", "ends": ends or (HANDLED,), "bare": True}
        if prefix:
            headers = {f"{prefix}{key}": value for key, value in given.items()}
            return Case(**{**about, "headers": headers, "body": retried, **more})
        whole = json.dumps(given)[:-1]
        content = text(whole + ',"data":{"plan":["fail","ok"],"case":"%"}}')
        kind = {"content_type": "application/cloudevents+json"}
        return Case(**{**about, "properties": kind, "body": content, **more})

    retried = text('{"plan":["fail","ok"],"case":"%"}')
    encoded = '{"specversion":"1.0","id":"%","source":"s","type":"core.act","data_base64":"'
    again = plan("fail", "ok")
    return [
        # -- who it is
        Case(name="nothing", bare=True, ends=bad,
             properties={"content_type": LEAVE_OUT, "content_encoding": LEAVE_OUT}),
        Case(name="no-headers", bare=True, ends=bad),
        Case(name="celery-id", bare=True, headers={"id": "celery-id", "task": ACT}),
        *(
            header("event-id", value, "malformed", label=f"event-id-{label}")
            for label, value in {
                "number": 7, "list": ["x"], "table": {"x": 1}, "boolean": True, "long": "x" * 300,
                "bytes": b"\xff\xfe", "surrogate": "\ud800", "decimal": Decimal("1.5"),
                "time": datetime(2026, 1, 1, tzinfo=UTC), "empty": "", "null": None,
            }.items()
        ),
        header("event-id", f"odd {ODD[1:]}", label="event-id-odd"),
        header("event-id", "a\0b", "malformed", label="event-id-nul"),
        header("event-correlation-id", ["x"]),
        header("event-correlation-id", f"c {ODD[1:]}", label="correlation-odd"),
        header("event-correlation-id", f"c {ODD}", label="correlation-nul"),
        header("event-causation-id", 5),
        header("event-service", {"x": 1}, "malformed"),
        header("event-service", ODD[1:], label="service-odd"),
        header("event-service", ODD, "malformed", label="service-nul"),
        header("event-published-at", 10**15),
        header("event-published-at", "0001-01-01T00:00+14:00", label="published-early"),
        header("event-format", 99),
        header("task", "os.system", direct=unknown),
        header("task", ["x"], direct=bad, label="task-list"),
        header("task", "x" * 100_000, direct=bad, label="task-long"),
        header("task", LEAVE_OUT, label="task-none"),
        header("event-name", "core.act.once", direct=unknown),
        # -- what only this service writes
        *(
            header(name, value, label=f"{name}-{number}", body=again)
            for number, (name, value) in enumerate(
                [
                    ("event-attempt", -(10**6)), ("event-attempt", 2**31 - 1),
                    ("event-attempt", "x"), ("event-due-at", FAR), ("event-due-at", -5),
                    ("event-handler", "testproject.once"), ("event-handler", [1]),
                    ("event-replay-id", REPLAY), ("event-replay-id", {"x": 1}),
                    ("event-history", "[" * 5000), ("event-history", 5),
                    ("event-archive", '{"reason": "poison"}'), ("event-archive", [1]),
                    ("event-outcome", json.dumps({"outcome": "succeeded", "replay_id": REPLAY})),
                    ("event-unreadable", "x"),
                ]
            )
        ),
        # -- what only the broker writes
        header("x-death", "x", body=again, label="x-death-text"),
        header("x-death", [1, "x", [{}]], body=again, label="x-death-list"),
        header("x-death", [{"queue": [1], "reason": {}, "time": "x", "count": "x"}], body=again,
               label="x-death-types"),
        header("x-death", [forged(QUEUE)], body=again, label="x-death-handler"),
        header("x-death", [forged("core:delay.1s"), forged("core:graveyard")], body=again,
               label="x-death-delay"),
        Case(name="header-x-first-death", body=again,
             headers={"x-first-death-queue": QUEUE, "x-first-death-reason": 5,
                      "x-last-death-exchange": "core:return"}),
        header("x-delivery-count", 10**6, body=again),
        header("x-acquired-count", 10**6, body=again),
        header("CC", ["core.act.once"], HANDLED, "unknown", direct=None),
        header("CC", ["core.testproject.once"], direct=(HANDLED, "unknown"), label="CC-queue"),
        header("CC", 5, *no, direct=no, label="CC-number"),
        header("BCC", ["core.act.once"], HANDLED, "unknown", direct=None),
        header("x-delay", -1000),
        # -- what Celery would do
        *(
            header(name, value, label=f"celery-{name}-{number}")
            for number, (name, value) in enumerate(
                [
                    ("timelimit", [1, None]), ("timelimit", "x"), ("eta", "garbage"), ("eta", FAR),
                    ("eta", 5), ("expires", "2001-01-01T00:00:00Z"), ("expires", -1),
                    ("expires", "garbage"), ("stamps", "x"), ("stamped_headers", [5]),
                    ("ignore_result", "no"), ("group", 5), ("group_index", "x"), ("retries", "x"),
                    ("retries", 10**9), ("root_id", 5), ("parent_id", {}), ("lang", 5),
                    ("shadow", 5), ("argsrepr", b"\xff"), ("kwargsrepr", 5), ("origin", []),
                    ("meth", "x"), ("replaced_task_nesting", "x"), ("delivery_info", 5),
                    ("reply_to", 5), ("id", 5),
                ]
            )
        ),
        # -- content
        content("application/x-python-serialize", "binary", lambda mark: evil + mark.encode()),
        content("application/x-python-serialize", "utf-8", lambda mark: evil + mark.encode()),
        content("application/data", "binary", lambda mark: evil + mark.encode()),
        content("pickle", "binary", lambda mark: evil + mark.encode()),
        content("application/json", "binary", lambda mark: evil + mark.encode()),
        content("application/x-yaml", "utf-8", lambda mark: (yaml + mark).encode()),
        content("application/x-msgpack", "binary", behind(b"\x93\x90\x80\x80")),
        content("text/plain"),
        content("APPLICATION/JSON", ends=(HANDLED,)),
        content("application/json; charset=utf-8", ends=(HANDLED,)),
        Case(name="content-none", properties={"content_type": LEAVE_OUT}, ends=bad),
        content("\ud800"),
        content("application/json", "utf-16", ends=(HANDLED,)),  # as its first bytes show: UTF-8
        content("application/json", "gzip"),
        content("application/json", "\0"),
        Case(name="encoding-none", properties={"content_encoding": LEAVE_OUT}),
        *(
            header("compression", value, "malformed", label=f"compression-{value}")
            for value in ("application/x-gzip", "application/x-bz2", "zstd", "unknown", 5)
        ),
        header("compression", "application/x-gzip", "malformed", label="gzip-bomb",
               body=lambda mark: bomb() + mark.encode()),
        # -- bodies
        body("empty", lambda mark: b"", direct=None),
        body("space", lambda mark: b" " * (1 + len(mark))),
        body("truncated", text('[[],{"plan":["ok"],"case":"%"')),
        body("deep", text("[" * 100_000 + "%")),
        body("deep-closed", text("[" * 50_000 + "]" * 50_000 + "%")),
        body("deep-300", text('[[],{"plan":["ok"],"case":"%","x":' + DEEP + "},{}]")),
        body("deep-150", text('[[],{"plan":["ok"],"case":"%","x":' + "[" * 150 + "]" * 150
                              + "},{}]"), HANDLED),
        body("latin", lambda mark: f'[[],{{"plan":["é"],"case":"{mark}"}},{{}}]'.encode("latin-1")),
        body("utf-16", lambda mark: plan("ok")(mark).decode().encode("utf-16"), HANDLED),
        body("bom", lambda mark: b"\xef\xbb\xbf" + plan("ok")(mark), HANDLED),
        body("surrogate-bytes", text('[[],{"plan":["ok"],"case":"%","x":"\ud800"},{}]')),
        body("surrogate-escape", text('[[],{"plan":["ok"],"case":"%","x":"\\ud800"},{}]'), HANDLED),
        body("nul", text('[[],{"plan":["ok"],"case":"%","x":"\\u0000"},{}]'), HANDLED),
        body("odd", plan("ok", x=ODD), HANDLED),
        body("behind", text('[[],{"plan":["ok"],"case":"%"},{}] x')),
        body("single-quotes", text("[[],{'plan':['ok'],'case':'%'},{}]")),
        body("digits", text('[[],{"plan":["ok"],"case":"%","x":' + "9" * 5000 + "},{}]")),
        body("nan", text('[[],{"plan":["ok"],"case":"%","x":[NaN,Infinity,1e999]},{}]'), HANDLED),
        body("twice", text('[[],{"case":"x","plan":["ok"],"case":"%"},{}]'), HANDLED),
        body("bad-uuid", text('[[],{"x":{"__type__":"uuid","__value__":{"hex":"%"}}},{}]')),
        body("no-type", plan("ok", x={"__type__": [], "__value__": 1}), HANDLED),
        body("null", text("null     \n\n%".replace("%", "")), direct=None),
        body("string", text('"%"')),
        body("one-element", text('[["%"]]')),
        body("two-elements", text('[[],{"plan":["ok"],"case":"%"}]')),
        body("four-elements", text('[[],{"plan":["ok"],"case":"%"},{},{}]')),
        body("protocol-1", text('{"task":"core.act","id":"%","args":[],"kwargs":{"plan":["ok"]}}'),
             *args),
        body("args-1", text('{"args":1,"x":"%"}'), *args),
        body("kwargs-list", text("[[],[],{}]      \t"), direct=None),
        body("args-table", text('[{"x":"%"},{},{}]')),
        body("embed-list", text('[[],{"plan":["ok"],"case":"%"},[]]')),
        body("embed-text", text('[[],{"plan":["ok"],"case":"%"},"x"]')),
        body("embed-null", text('[[],{"plan":["ok"],"case":"%"},null]'), HANDLED),
        body("embed", text('[[],{"plan":["ok"],"case":"%"},' + json.dumps(EMBED) + "]"), HANDLED),
        body("missing", text('[[],{"case":"%"},{}]'), *args),
        body("surplus-positional", text('[[["ok"],"%",1,2,3],{},{}]'), *args),
        body("positional", text('[[["ok"],"%"],{},{}]'), HANDLED),
        body("both", text('[[["ok"],"%"],{"plan":["ok"]},{}]'), *args),
        body("surplus", plan("ok", self=1, cls=2, args=3, __class__=4, **{"": 5, "a b": 6, ODD: 7}),
             HANDLED),
        body("wrong-type", text('[[],{"plan":5,"case":"%"},{}]'), "exhausted"),
        body("odd-words", plan(f"fail:{ODD}\ud800"), "exhausted"),
        body("limit", padded(MIB), HANDLED),
        body("above", padded(MIB + 1)),
        body("15-mib", padded(15 * MIB), direct=None),
        # -- other formats
        plain("no-id", retried),
        plain("no-name", retried, headers={}),
        plain("names-of-celery", retried, headers={"task": "x", "id": 5, "compression": "none"}),
        plain("id", retried, properties={"message_id": "json-id", "app_id": "odd"}),
        plain("id-nul", retried, *bad, properties={"message_id": "a\0b"}),
        plain("id-long-source", retried, *bad, headers={"event-service": "x" * 256}),
        plain("time", retried, properties={"timestamp": 1_767_225_600}),
        plain("time-milliseconds", retried, properties={"timestamp": 1_767_225_600_000}),
        plain("time-far", retried, properties={"timestamp": 2**64 - 1}),
        plain("array", text('["%"]'), *bad),
        plain("deep", text('{"plan":["ok"],"case":"%","x":' + DEEP + "}"), *bad),
        plain("truncated", text('{"plan":["ok"],"case":"%"'), *bad),
        plain("missing", text('{"case":"%"}'), *args),
        plain("wrapped", text('{"plan":["ok"],"case":"%","x":{"__type__":5,"__value__":1}}')),
        cloud("structured"),
        cloud("structured-charset",
              properties={"content_type": "Application/CloudEvents+JSON; charset=UTF-8"}),
        cloud("time-early", attributes={"time": "0001-01-01T00:00:00+14:00"}),
        cloud("extensions", attributes={"tenant": "a", "sequence": 5, "subject": "x" * 600}),
        # Above it a pool process cannot receive the event.
        cloud("extensions-deep", *bad, body=text(
            encoded[:-14] + 'data":{},"x":' + "[" * 600 + '"%"' + "]" * 600 + "}")),
        cloud("other-type", *bad, attributes={"type": "core.other"}, direct=unknown),
        cloud("no-source", *bad, attributes={"source": LEAVE_OUT}),
        cloud("source-number", *bad, attributes={"source": 5}),
        cloud("id-empty", *bad, attributes={"id": ""}),
        cloud("version", *bad, attributes={"specversion": "0.3"}),
        cloud("data-array", *bad, body=text(encoded[:-14] + 'data":["%"]}')),
        cloud("base64", body=lambda mark: (
            encoded.replace("%", mark) + b64encode(plain_body(mark)).decode() + '"}').encode()),
        cloud("base64-bad", *bad, body=text(encoded + 'x"}')),
        cloud("base64-number", *bad, body=text(encoded[:-1] + "5}")),
        cloud("array", *bad, body=text('["%"]')),
        cloud("above", *bad, body=text('{"data":{"plan":["ok"],"case":"%"}}' + " " * MIB)),
        cloud("batch", *bad, properties={"content_type": "application/cloudevents-batch+json"}),
        *(cloud(f"binary-{prefix}", prefix=prefix)
          for prefix in ("cloudEvents_", "cloudEvents:", "ce-", "ce_")),
        cloud("binary-time", prefix="ce-", attributes={"time": datetime(2026, 1, 1, tzinfo=UTC)}),
        cloud("binary-type", *bad, prefix="ce-", attributes={"type": "core.x"}, direct=unknown),
        cloud("binary-text", prefix="ce-", properties={"content_type": "text/plain"}),
        cloud("binary-list", *bad, prefix="ce-", attributes={"id": ["x"]}),
        # -- properties
        Case(name="expiration-0", properties={"expiration": "0"}),
        Case(name="expiration-later", properties={"expiration": "60000"}, body=again),
        Case(name="expiration-word", properties={"expiration": "x"}, ends=no),
        Case(name="priority", properties={"priority": 255}, body=again),
        Case(name="user-id", properties={"user_id": user}, body=again),
        Case(name="user-id-other", properties={"user_id": "root"}, ends=no),
        Case(name="transient", properties={"delivery_mode": 1}),
        Case(name="words", properties={
            "reply_to": ODD, "correlation_id": ODD, "type": ODD, "app_id": ODD,
            "cluster_id": ODD, "message_id": ODD, "timestamp": 253_370_764_800}),
        # -- headers as such
        Case(name="headers-undecodable", properties={"message_id": "m"}, body=again, raw=(
            (b"milliseconds", b"T" + struct.pack(">Q", 1_700_000_000_000_000)),
            (b"early", b"T" + struct.pack(">q", -62_135_596_800)),
        )),
        *(
            Case(name=f"headers-deep-{depth}", raw=((b"deep", nested(depth)),), body=again)
            for depth in (300, 2000)
        ),
        Case(name="message-id-bytes", properties={"message_id": b"\xff\xfe"}, body=again),
        header("big", "x" * 100_000),
        header("big", "x" * 100_000, "malformed", label="big-bad", body=text("%")),
        Case(name="headers-too-big", headers={"big": "x" * 140_000}, ends=no),
        Case(name="headers-nan", headers={"nan": float("nan")}, ends=no),
        Case(name="headers-many", headers={f"h{n}": n for n in range(8000)}, body=again),
        Case(name="headers-odd", body=again,
             headers={ODD: ODD, "\ud800": "\ud800", "k" * 255: 1, "d": Decimal("0.001"),
                      "void": None, "time": datetime(2026, 1, 1, tzinfo=UTC),
                      "deep": [[[{"x": [{}]}]]], "bytes": b"\xff\0"}),
        Case(name="headers-numbers", body=again, raw=(
            (b"b", b"b\xff"), (b"B", b"B\xff"), (b"s", b"s\xff\xff"), (b"u", b"u\xff\xff"),
            (b"I", b"I\xff\xff\xff\xff"), (b"i", b"i\xff\xff\xff\xff"), (b"l", b"l" + b"\xff" * 8),
            (b"f", b"f\x7f\x7f\xff\xff"), (b"x", b"x\0\0\0\x02\xff\0"), (b"D", b"D\xff\x80\0\0\0"),
        )),
        Case(name="headers-key", ends=(HANDLED,), raw=((b"\xff\xfe", b"t\x01"),), body=again),
        Case(name="headers-key-bad", ends=bad, raw=((b"\xff\xfe", b"t\x01"),), body=text("%")),
        # RabbitMQ 4 passes on one header of each name, 3.10 all of them.
        Case(name="headers-id-twice", raw=((b"event-id", b"I\0\0\0\x05"),),
             ends=bad if broker < (4, 0) else (HANDLED,)),
        Case(name="headers-type", raw=((b"x", b"?????"),), ends=no),
        # -- routing keys
        Case(name="key-native-delay", key=b"0." * 28 + ACT.encode(), direct=None, body=again),
        Case(name="key-native-delay-29", key=b"1." * 29 + ACT.encode(), ends=unknown, direct=None),
        Case(name="key-other", key=b"evil.core.act", ends=unknown, direct=None),
        Case(name="key-surrogate", key=b"core.odd.\xed\xa0\x80", ends=bad, direct=None),
        Case(name="key-bytes", key=b"core.odd.\xff\xfe", ends=unknown, direct=None),
        Case(name="key-long", key=b"core.odd." + b"x" * 246, ends=unknown, direct=None),
        Case(name="key-odd", key=b"core.odd.\0\x1b\n<b>", ends=unknown, direct=None),
    ]  # fmt: skip


# -- the processes


def rows(service: Service, table: str = "archivedevent") -> list[dict[str, Any]]:
    """The rows of a table, read without Django."""
    connection = sqlite3.connect(service.where / "db.sqlite3", timeout=20)
    connection.row_factory = sqlite3.Row
    connection.text_factory = lambda value: value.decode("utf-8", "surrogateescape")
    try:
        found = connection.execute(f"SELECT * FROM django_amqp_events_{table}")  # noqa: S608 - ours
        return [dict(row) for row in found]
    finally:
        connection.close()


def release(eyes: Eyes) -> tuple[int, ...]:
    """Return the broker's version."""
    channel = eyes.channel()
    told = channel.connection.server_properties["version"]
    channel.close()
    return tuple(int(part) for part in re.findall(r"\d+", told)[:2])


def put(eyes: Eyes, exchange: str, key: bytes, wire: bytes, body: bytes) -> bool:
    """Publish byte for byte; returns whether the broker took it."""
    try:
        channel = eyes.channel()
        returned: list[Any] = []
        channel.events["basic_return"].add(lambda *args: returned.append(args))
        channel.confirm_select()
        message = amqp.Message(body)
        message._serialize_properties = lambda: wire
        # Ticket, exchange, routing key, mandatory.
        arguments = struct.pack(">H", 0) + short(exchange.encode()) + short(key) + b"\x01"
        channel.connection.frame_writer(
            1, channel.channel_id, amqp.spec.Basic.Publish, arguments, message
        )
        channel.wait(amqp.spec.Basic.Ack)
        channel.close()
    except (amqp.exceptions.AMQPError, OSError):
        return False
    return not returned


class Siege:
    """Hostile messages, each with a healthy event behind it, before a worker, a mirror, a reaper.

    Attributes:
        expected: where each message ends, by its mark; an end may be one of several: ``a|b``.
        bodies: what was put.
        healthy: ids of events that must be handled, once.
    """

    def __init__(self, core: Service, eyes: Eyes, worker: Worker) -> None:
        self.core, self.eyes, self.worker = core, eyes, worker
        self.mirror = core.start("events_mirror").wait_ready(40, "mirroring core:archive")
        self.processes = [worker, self.mirror, core.start("events_reaper").wait_ready(40)]
        self.expected: dict[str, tuple[str, ...]] = {}
        self.bodies: dict[str, bytes] = {}
        self.healthy: list[str] = []

    def put(self, mark: str, case: Case, exchange: str, key: bytes, ends: tuple[str, ...]) -> None:
        assert mark not in self.expected, mark
        self.bodies[mark] = case.body(mark)
        taken = put(self.eyes, exchange, key, case.wire(mark), self.bodies[mark])
        assert taken is (ends != (REFUSED,)), f"the broker took {mark}: {taken}"
        self.expected[mark] = ends if taken else ()
        self.healthy.append(self.eyes.event(ACT, {"plan": ["ok"], "case": f"healthy {mark}"}))

    def wrong(self, unseen: Collection[str] = ()) -> dict[str, tuple[list[str], list[str]]]:
        """Return what was expected and found of messages, but for *unseen* ends, where it differs.

        A message is found in the ledger, and by its body in the database.
        """
        found: dict[str, list[str]] = {mark: [] for mark in self.expected}
        for line in self.core.ledger(what="end"):
            if line.get("case") in found:
                found[line["case"]].append(HANDLED)
        marks = {body: mark for mark, body in self.bodies.items()}
        for row in rows(self.core):
            if (mark := marks.get(bytes(row["body"]))) is not None:
                found[mark].append(row["reason"])
        wanted = {
            mark: sorted(end for end in ends if end not in unseen)
            for mark, ends in self.expected.items()
        }
        return {
            mark: (wanted[mark], ends)
            for mark, ends in found.items()
            if not _fit(ends, wanted[mark])
        }

    def settle(self, seconds: float, unseen: Collection[str] = ()) -> None:
        """Wait until each message is where it ends, and each healthy event is handled."""
        try:
            until(lambda: self.core.ended(self.healthy) and not self.wrong(unseen), seconds)
        except NotInTime:
            raise NotInTime(f"expected and found: {self.wrong(unseen)}") from None

    def end(self) -> None:
        """Check that no process has noticed, and stop them."""
        dead = [process.name for process in self.processes if not process.alive]
        assert not dead
        assert self.worker.log.count("Connected to") == 1
        handled = Counter(line["event"] for line in self.core.ledger(what="end"))
        assert {each: handled[each] for each in self.healthy} == dict.fromkeys(self.healthy, 1)
        for process in self.processes:
            assert process.stop() == 0


def _fit(ends: Iterable[str], wanted: Sequence[str]) -> bool:
    ends = sorted(ends)
    return len(ends) == len(wanted) and all(
        end in want.split("|") for end, want in zip(ends, wanted, strict=True)
    )


@pytest.mark.parametrize("pool", POOLS[:2])
def test_every_message_is_handled_or_archived(fresh_eyes: Eyes, core: Service, pool: str) -> None:
    eyes = fresh_eyes
    core.migrate()
    channel = eyes.channel()
    # No event of a handler's name looks like these, but a pattern's may.
    for pattern in ("core.odd.*", "#.core.act"):
        channel.queue_bind(QUEUE, "events", pattern)
    channel.close()
    siege = Siege(core, eyes, core.worker(pool, 2).wait_ready())
    children = siege.worker.children()
    trap = core.where / "trap"
    for case in cases(trap, urlsplit(eyes.url).username or "", release(eyes)):
        siege.put(f"{case.name}/events", case, "events", case.key, case.ends)
        if case.direct is not None and case.key == ACT.encode():
            siege.put(f"{case.name}/queue", case, "", QUEUE.encode(), case.direct or case.ends)
    number = len(siege.expected)
    assert number >= 200
    core.python(
        "from testproject.tasks import ordinary\n"
        f"[ordinary.delay(f'task {{n}}') for n in range({number})]"
    )
    siege.settle(240)
    until(lambda: len(core.ledger(what="ordinary")) >= number, 60, "the tasks are run")
    eyes.empty(*[name for name in eyes.totals("core") if "delay" not in name], seconds=30)
    assert not siege.wrong()
    # Counted once more, from the other side: nothing was made of nothing.
    handled, archived = core.ledger(what="end"), rows(core)
    published = sum(map(len, siege.expected.values())) + len(siege.healthy)
    assert published == len(handled) + len(archived)
    assert len(core.ledger(what="ordinary")) == number
    assert all(row["reason"] and row["detail"] for row in archived)
    assert {row["state"] for row in archived} == {"archived"}
    # No payload was run, no callback, no later attempt than the policy's.
    assert not trap.exists()
    assert {line["task"][:4] for line in core.ledger(what="ordinary")} == {"task"}
    assert {line["attempt"] for line in handled} <= {1, 2}
    assert {line["handler"] for line in handled} == {"testproject.act"}
    assert siege.worker.children() == children
    assert eyes.totals("core:abyss") == {"core:abyss": 0}
    siege.end()
