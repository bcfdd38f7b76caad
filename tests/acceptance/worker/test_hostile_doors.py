"""Messages put by a stranger where only the service itself and the broker publish.

RabbitMQ's permissions keep strangers out of there (docs/threat-model.md); one who is in can forge
what he likes, but he stops nothing, and nothing that he writes vanishes unseen.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from django_amqp_events.context import ReceivedEvent
from django_amqp_events.message import archive_message
from django_amqp_events.message.types import Received

from ..harness import (
    Eyes,
    Service,
    Worker,
    until,
)
from .test_hostile_table import (
    ACT,
    FAR,
    HANDLED,
    LEAVE_OUT,
    MIB,
    ODD,
    QUEUE,
    REFUSED,
    REPLAY,
    Case,
    Siege,
    forged,
    plan,
    put,
    rows,
    text,
)

pytestmark = pytest.mark.timeout(300)

SLOW = "core.testproject.slow"
WAITING, ABYSS, LOGGED = "waiting", "abyss", "logged"
AGAIN = plan("fail", "ok")


def case(name: str, *ends: str, **more: Any) -> Case:
    return Case(name=name, ends=ends or (HANDLED,), key=more.pop("key", QUEUE).encode(), **more)


def died(**changes: Any) -> dict[str, Any]:
    return {**forged(QUEUE), "exchange": "events", "routing-keys": [ACT], **changes}


def archive_header(**changes: Any) -> dict[str, Any]:
    return {"event-archive": json.dumps({"version": 1, "reason": "failed", **changes})}


def outcome(replay_id: str) -> dict[str, Any]:
    return {"event-outcome": json.dumps({"outcome": "succeeded", "replay_id": replay_id})}


#: By exchange; ends that depend on the broker's version are joined by ``|``.
DOORS: dict[str, list[Case]] = {
    "core:delay.1s": [
        case("known"),
        case("nobody", "malformed", bare=True),
        case("other-key", "unknown", key="core.nobody"),
        case("odd-key", "unknown", key=ODD),
        case("no-headers", "unknown", key="x", bare=True),
        case("rubbish", "malformed", body=text("%")),
        case("x-death-text", headers={"x-death": "x"}, body=AGAIN),
        case("x-death-types", headers={"x-death": [{"queue": [1], "time": "x", "count": "x"}]}),
    ],
    "core:return": [
        case("known"),
        case("retried", body=AGAIN),
        case("attempt-negative", "malformed", headers={"event-attempt": -(10**6)}),
        case("attempt-text", "malformed", headers={"event-attempt": "x"}),
        case("attempt-last", "exhausted", headers={"event-attempt": 2**31 - 1}, body=plan("fail")),
        case("due-late", WAITING, headers={"event-due-at": FAR}),
        case("due-early", headers={"event-due-at": "0001-01-01T00:00:00Z"}),
        case("handler-of-another-queue", "unknown", headers={"event-handler": "testproject.once"}),
        case("handler-gone", "unknown", headers={"event-handler": ODD}),
        case("handler-list", "malformed", headers={"event-handler": [1]}),
        # It succeeds and reports the outcome of an unknown replay.
        case("replay-of-nobody", HANDLED, LOGGED, headers={"event-replay-id": REPLAY}),
        # The report of that is a row (below, "nothing"): it can be of no replay of ours.
        case("replay-no-uuid", headers={"event-replay-id": ODD}),
        case("history-deep", headers={"event-history": "[" * 5000}, body=AGAIN),
        case("history-long", body=AGAIN,
             headers={"event-history": json.dumps([{"at": "你" * 15_000}], ensure_ascii=False)}),
        case("name-odd", headers={"event-name": ODD}, body=AGAIN),
        case("other-key", "unknown", key="core.nobody"),
        case("other-key-archive", "poison", key="core.nobody",
             headers=archive_header(reason="poison")),
        case("graveyard", "unknown", key="core:graveyard"),
        case("graveyard-handler", key="core:graveyard",
             headers={"event-handler": "testproject.act"}),
    ],
    "core:replay": [
        case("known"),
        case("retried", body=AGAIN),
        case("other-key", REFUSED, key="core.nobody"),
    ],
    "core:archive": [
        case("event", "unknown"),
        # And the report of "replay-no-uuid", which has no body either.
        case("nothing", "unknown", "unreadable", bare=True, body=lambda mark: b"",
             properties={"content_type": LEAVE_OUT, "content_encoding": LEAVE_OUT}),
        case("rubbish", "unknown", bare=True, body=text("\0\ud800 %")),
        case("header-text", "unknown", headers={"event-archive": "x"}),
        case("header-number", "unknown", headers={"event-archive": 5}),
        case("header-long", "failed", headers=archive_header(detail="x" * 90_000)),
        # With a body it is an event, whatever the header says.
        case("outcome-of-nobody", "unknown", headers=outcome(REPLAY)),
        case("outcome-no-uuid", "unknown|unreadable", headers=outcome(ODD)),
        case("outcome-of-no-event", "unknown", bare=True, headers=outcome(REPLAY)),
        case("outcome-deep", "unknown", headers={"event-outcome": "[" * 900 + "]" * 900}),
        case("undecodable", "unknown", raw=((b"at", b"T" + struct.pack(">Q", 10**18)),)),
        case("id-number", "unknown", headers={"event-id": 5}),
        case("id-surrogate", "unknown", headers={"event-id": "\ud800"}),
        case("large", "unknown", body=lambda mark: mark.encode().ljust(15 * MIB)),
    ],
    "core:graveyard": [
        case("event", "unknown"),
        case("nothing", "malformed", bare=True),
        case("rubbish", "malformed", body=text("%"), bare=True),
        case("known", "handled|unknown", headers={"x-death": [died()]}),
        case("x-death-types", "unknown", headers={"x-death": ["x", {"queue": [QUEUE]}]}),
        case("x-death-key-long", "malformed|unknown",
             headers={"x-death": [died(**{"routing-keys": ["é" * 300], "exchange": "é" * 900})]}),
        # From no exchange: the default one, and the task's name says whose it is.
        case("x-death-no-keys", "handled|unknown",
             headers={"x-death": [died(**{"routing-keys": 5, "exchange": {}})]}),
        case("kills", "poison|unknown", headers={"x-death": [died()]}, body=plan("kill")),
        case("undecodable", "unknown", raw=((b"at", b"T" + struct.pack(">Q", 10**18)),)),
    ],
    "core:dead": [
        case("event", "poison"),
        case("nothing", "poison", bare=True, body=text("nothing %")),
        case("x-death", "poison", headers={"x-death": [died()]}),
        case("undecodable", "poison", raw=((b"at", b"T" + struct.pack(">Q", 10**18)),)),
    ],
    "core:abyss": [
        case("event", ABYSS),
        case("nothing", ABYSS, bare=True, body=text("%")),
    ],
    # The default exchange: straight on a queue.
    "": [
        case("archive", "unknown", key="core:archive"),
        case("graveyard", "unknown", key="core:graveyard"),
        case("dead", "poison", key="core:dead"),
        case("abyss", ABYSS, key="core:abyss"),
        # It returns with the delay queue's name as routing key, which is unbound.
        case("delay", "unknown", key="core:delay.1s"),
    ],
}  # fmt: skip


def replayed(core: Service, eyes: Eyes) -> str:
    """Archive, mirror and replay an event whose queue has no consumer; return the replay id."""
    event = ReceivedEvent(id="replayed", name="core.act.slow", service="tests")
    delivery = Received(
        queue=SLOW, exchange="events", routing_key=event.name, body=plan("ok")("replayed"),
        headers={"event-id": event.id}, properties={"content_type": "application/json"},
    )  # fmt: skip
    eyes.send(
        archive_message.build(
            delivery, exchange="core:archive", reason="failed", at=datetime.now(UTC), worker="w",
            service="core", event=event, handler="testproject.slow",
        )
    )  # fmt: skip
    until(lambda: rows(core), 20, "it is mirrored")
    core.python(
        "from django_amqp_events.archive import replay\n"
        "from django_amqp_events.models import ArchivedEvent\n"
        "row = ArchivedEvent.objects.get()\n"
        "report = replay.replay({row.pk: row.version}, by='ada')\n"
        "assert report.published == [row.pk], report"
    )
    return str(replay_of(core)["id"])


def replay_of(core: Service) -> dict[str, Any]:
    (row,) = rows(core, "replay")
    return row


def test_messages_put_into_internal_queues_are_seen(fresh_eyes: Eyes, core: Service) -> None:
    core.migrate()
    siege = Siege(core, fresh_eyes, core.worker("threads", 2, "-X", SLOW).wait_ready())
    replay_id = replayed(core, fresh_eyes)
    # A stranger claims the outcome of a replay in progress, where strangers may publish.
    forgeries = [
        case("outcome", headers=outcome(replay_id), key=ACT),
        case("replay-id", headers={"event-replay-id": replay_id,
                                   "event-handler": "testproject.slow"}, key=ACT),
        case("replay-id-retried", headers={"event-replay-id": replay_id}, body=AGAIN, key=ACT),
    ]  # fmt: skip
    for exchange, put_there in {**DOORS, "events": forgeries}.items():
        for each in put_there:
            mark = f"{exchange}/{each.name}"
            siege.put(mark, each, exchange, each.key, each.ends)
            again = {"plan": ["fail", "ok"], "case": f"again {mark}"}
            siege.healthy.append(fresh_eyes.event(ACT, again))
    unseen = WAITING, ABYSS, LOGGED
    siege.settle(90, unseen)
    fresh_eyes.empty("core:archive", "core:graveyard", "core:dead", QUEUE)
    assert not siege.wrong(unseen)
    counted = Counter(end for ends in siege.expected.values() for end in ends)

    def elsewhere() -> tuple[int, ...]:
        """Count what waits, what is in the abyss, and what only the log of the mirror knows."""
        totals = fresh_eyes.totals("core:")
        said = [line for line in siege.mirror.log.splitlines() if "does not have" in line]
        return (
            sum(count for name, count in totals.items() if name.startswith("core:delay.")),
            totals["core:abyss"],
            sum(int(line.split()[1]) for line in said),
        )

    until(lambda: elsewhere() == tuple(counted[end] for end in unseen), 20, "the others")
    # The true replay still waits for its handler.
    assert replay_of(core)["state"] == "published"
    (row,) = [row for row in rows(core) if row["event_id"] == "replayed"]
    assert row["state"] == "replaying"
    assert fresh_eyes.ready(SLOW) == 1
    siege.end()


# -- memory


def peaks(worker: Worker) -> dict[int, int]:
    """The largest resident size so far in MiB, of a process and its children."""
    found = {}
    for pid in (worker.pid, *worker.children()):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                found[pid] = int(line.split()[1]) // 1024
    return found


@pytest.mark.slow
def test_memory_stays_bounded(fresh_eyes: Eyes, core: Service) -> None:
    """Each bomb is a gigabyte when inflated, and each list of lists about as much when decoded."""
    core.migrate()
    processes = Siege(core, fresh_eyes, core.worker("prefork", 2).wait_ready()).processes
    first = fresh_eyes.event(ACT, {"plan": ["ok"]})
    until(lambda: core.runs(first, "end"))
    before = {process.name: peaks(process) for process in processes}

    deflate = zlib.compressobj(9)
    bomb = b"".join(deflate.compress(b"\0" * MIB) for _ in range(1024)) + deflate.flush()
    assert len(bomb) < 1.1 * MIB
    bomb = bomb[: MIB - 100]
    lists = b'[[],{"a":[' + b"[]," * (5 * MIB - 40) + b"[]]},{}]"
    number = 0
    for exchange, key in (("events", ACT), ("core:archive", "x"), ("core:graveyard", QUEUE)):
        for content, times in ((bomb, 8), (lists, 4)):
            for _ in range(times):
                number += 1
                packed = content is bomb
                each = Case(
                    name="bomb",
                    headers={"compression": "application/x-gzip"} if packed else {},
                    properties={"content_encoding": "gzip"} if packed else {},
                )
                body = content + b" " * number
                assert put(fresh_eyes, exchange, key.encode(), each.wire(f"bomb {number}"), body)
    until(lambda: len(rows(core)) == number, 90, "all are archived")
    last = fresh_eyes.event(ACT, {"plan": ["ok"]})
    until(lambda: core.runs(last, "end"))
    for process in processes:
        after = peaks(process)
        grown = {pid: after[pid] - before[process.name][pid] for pid in after}
        print(f"{process.name}: {before[process.name]} grew by {grown} MiB")
        assert after.keys() == before[process.name].keys()
        # A few bodies of 15 MiB, never the gigabyte.
        assert max(grown.values()) < 400, (process.name, grown)
        assert process.stop() == 0
