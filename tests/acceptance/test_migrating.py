"""celery-amqp-events 0.1.0 beside us, and docs/migrating*.md, run: every event is counted."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.commands import run_program

from . import peering
from .conftest import Make
from .harness import Eyes, Service, Worker, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PEER = Path(__file__).resolve().parent / "peer"
DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = "".join(page.read_text() for page in DOCS.glob("migrating*.md"))
EVENTS = ("moving.created", "moving.paid", "moving.shipped")
#: Its handler has no `once`, so the guide says that some of its events run twice.
TWICE = "moving.paid"
#: As celery-amqp-events declares its archive, without the lazy mode, which RabbitMQ 4.3 refuses.
ARCHIVED = {"x-message-ttl": 7 * 24 * 3600 * 1000, "x-max-length": 10000}


def commands(section: str) -> list[str]:
    """Return the commands of a section of the guide, in order."""
    text = GUIDE.split(f"# {section}\n", 1)[1]
    text = re.split(r"^#+ (?=[A-Z])", text, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^ *\$ (.*)$", text, re.MULTILINE)


def run(service: Service, eyes: Eyes, command: str, names: Mapping[str, str]) -> str:
    """Run a command of the guide with other names of events, handlers and queues."""
    for before, after in names.items():
        command = re.sub(rf"(?<![\w.]){re.escape(before)}(?![\w.])", after, command)
    words = shlex.split(command)
    if words[0] == "curl":
        method, url = words[words.index("-X") + 1], urlsplit(words[-1])
        eyes.http(method, url.path.replace("%2F", "{vhost}"))
        return ""
    assert words[0] == "manage.py", command
    code, text = service.command(*words[1:])
    assert code == 0, text
    return text


def mirror(service: Service, eyes: Eyes) -> None:
    run(service, eyes, "manage.py events_mirror --until-empty", {})


def ended(service: Service) -> dict[str, Counter[str]]:
    """How often each event was handled to the end, by its name."""
    found: dict[str, Counter[str]] = {}
    for line in service.ledger(what="end"):
        found.setdefault(line["name"], Counter())[line["event"]] += 1
    return found


@dataclass
class Peer:
    """The old service: a worker with some handlers, and a publisher."""

    service: Service
    workers: list[Worker] = field(default_factory=list)

    def start(self, name: str, *command: str | Path, handlers: str = "") -> Worker:
        where = self.service.where
        env = peering.environ(
            PEER, PEER_BROKER=self.service.url, PEER_DIR=str(where), PEER_HANDLERS=handlers
        )
        name = f"peer-{name}-{len(self.workers)}"
        worker = Worker.start(command, env=env, where=where, name=name)
        self.workers.append(worker)
        return worker

    def worker(self, *events: str) -> Worker:
        command = peering.worker("moving", "--concurrency", "2")
        return self.start("worker", *command, handlers=" ".join(events)).wait_ready()

    def accepted(self) -> list[tuple[float, str, str]]:
        """Time, name and id of each event whose publish returned."""
        text = (self.service.where / "accepted.jsonl").read_text()
        return [tuple(json.loads(line)) for line in text.splitlines()]


def test_from_celery_amqp_events(fresh_eyes: Eyes, service: Make) -> None:
    """It begins with a live service of 0.1.0, and ends without one and its queues."""
    eyes = fresh_eyes
    new = service(
        eyes,
        "billing",
        handlers="moving",
        events={
            "TOPOLOGY": "verify",
            "MANAGEMENT_URL": eyes.node.management_url,
            "RENAMED_HANDLERS": {
                name: f"testproject.{name.removeprefix('moving.')}" for name in EVENTS
            },
        },
    )
    new.migrate()
    eyes.http(
        "PUT", "/api/queues/{vhost}/billing:archived", {"durable": True, "arguments": ARCHIVED}
    )
    eyes.http("PUT", "/api/exchanges/{vhost}/billing:archived", {"durable": True, "type": "fanout"})
    eyes.http("POST", "/api/bindings/{vhost}/e/billing:archived/q/billing:archived", {})

    peer = Peer(new)
    old = peer.worker(*EVENTS)
    publisher = peer.start("publisher", peering.interpreter(), PEER / "flowing.py", *EVENTS)
    until(lambda: sum(map(len, ended(new).values())) >= 100, 60, "0.1.0 handles events")
    until(lambda: eyes.ready("billing:archived") >= 3, 40, what="0.1.0 has given some up")

    declare, unbind, recover, replay = commands("Each handler")
    worker: Worker | None = None
    stops: list[tuple[float, float]] = []
    windows: dict[str, tuple[float, float]] = {}
    for number, event in enumerate(EVENTS):
        # Step 1 and 2: each package's next release, the old one's without the handler.
        new = replace(new, environ={"TESTPROJECT_MOVED": " ".join(EVENTS[: number + 1])})
        handler = f"testproject.{event.removeprefix('moving.')}"
        names = {
            "billing.shop.order.created": f"billing.{event}",
            "shop.order.created": event,
        }
        stops.append(stopped(old))
        if number + 1 < len(EVENTS):
            old = peer.worker(*EVENTS[number + 1 :])
        until(lambda: eyes.ready(f"billing.{event}"), what="events wait")  # noqa: B023
        # Step 3.
        begun = time.time()
        run(new, eyes, declare, names)
        run(new, eyes, unbind, names)
        windows[event] = (begun, time.time())
        # Step 4.
        if worker is not None:
            assert worker.stop() == 0
        worker = new.worker("prefork", 2).wait_ready()
        until(lambda: len(new.ledger(what="end", handler=handler)) >= 20, 40)  # noqa: B023
        # Step 5.
        run(new, eyes, recover, names)
        mirror(new, eyes)
        run(new, eyes, replay, names)

    # The publisher moves as well; nothing of 0.1.0 runs any more.
    assert publisher.stop() == 0
    assert not any(each.alive for each in peer.workers)
    accepted = peer.accepted()
    printed = new.python(
        "from testproject.moving import created\n"
        "print('IDS', *[created.publish(failures=0) for _ in range(20)])"
    )
    accepted += [
        (time.time(), "moving.created", id_) for id_ in printed.rpartition("IDS ")[2].split()
    ]

    # Step 6: what it was retrying has come back; and what it had given up.
    eyes.drained("billing:retry")
    for queue in [*(f"billing.{event}" for event in EVENTS), "billing:archived"]:
        run(new, eyes, f"manage.py events_recover {queue}", {})
    mirror(new, eyes)
    for event in EVENTS:
        run(new, eyes, replay, {"shop.order.created": event})

    wanted = {name: {id_ for _, each, id_ in accepted if each == name} for name in EVENTS}

    def missing() -> int:
        handled = ended(new)
        return sum(len(wanted[name] - set(handled[name])) for name in EVENTS)

    until(lambda: not missing(), 120, "every event is handled")
    assert worker is not None
    assert worker.stop() == 0
    mirror(new, eyes)
    eyes.drained("billing")
    handled = ended(new)
    assert {name: set(handled[name]) for name in EVENTS} == wanted, "none lost, none invented"
    twice = {
        name: {
            id_
            for id_, number in handled[name].items()
            if number > 1 and not ended_while_stopping(new, {"event": id_, "by": "0.1.0"}, stops)
        }
        for name in EVENTS
    }
    assert max(max(handled[name].values()) for name in EVENTS) <= 2
    between = {
        name: {
            id_
            for at, each, id_ in accepted
            if each == name and windows[name][0] - 0.5 <= at <= windows[name][1] + 0.5
        }
        for name in EVENTS
    }
    assert all(between.values()), "events flowed while both queues were bound"
    assert twice[TWICE] <= between[TWICE], "twice only where the guide says so"
    assert not any(twice[name] for name in EVENTS if name != TWICE)
    numbers = {name: f"{len(twice[name])} of {len(handled[name])}" for name in EVENTS}
    print(f"{len(accepted)} accepted, none lost, handled twice: {numbers}")

    # The end: its queues and exchanges are deleted, and nothing of ours depended on them.
    for queue in [queue for queue in eyes.totals() if not_ours(queue)]:
        eyes.http("DELETE", f"/api/queues/{{vhost}}/{queue}?if-empty=true&if-unused=true")
    for exchange in eyes.http("GET", "/api/exchanges/{vhost}"):
        if not_ours(exchange["name"]):
            eyes.http("DELETE", f"/api/exchanges/{{vhost}}/{exchange['name']}")
    assert "identical" in run(new, eyes, "manage.py events_declare --check --format json", {})
    assert not [queue for queue in eyes.totals() if not_ours(queue)]


def not_ours(name: str) -> bool:
    return name.startswith(
        ("billing:retry", "billing:recover", "billing:archived", "billing.moving")
    )


def stopped(worker: Worker) -> tuple[float, float]:
    """Stop a worker as a supervisor does; return from when to when it stopped.

    Celery 5.7 sometimes waits without end for prefetched tasks that no process has received.
    """
    begun = time.time()
    worker.signal(signal.SIGTERM)
    try:
        assert worker.wait(20) == 0
    except subprocess.TimeoutExpired:
        worker.kill()
    return begun, time.time()


def ended_while_stopping(
    service: Service, wanted: dict[str, str], stops: list[tuple[float, float]]
) -> bool:
    """Whether a task ended while its worker stopped: Celery does not acknowledge all of these."""
    lines = service.ledger(what="end", **wanted)
    return any(begun - 1 <= line["at"] <= done for line in lines for begun, done in stops)


# -- both at the same time -------------------------------------------------------------------------


def test_each_understands_the_other(fresh_eyes: Eyes, service: Make, tmp_path: Path) -> None:
    """In both directions, with retries on both sides: neither sees the other's retries."""
    mixed = service(fresh_eyes, "mixed", handlers="mixed").declare()
    ledger = tmp_path / "peer.jsonl"
    env = peering.environ(PEER, PEER_BROKER=fresh_eyes.url, PEER_LEDGER=str(ledger))
    command = peering.worker("peer", "--pool", "threads", "--concurrency", "2")
    peer = Worker.start(command, env=env, where=tmp_path, name="peer")
    mixed.worker("threads", 4)
    peer.wait_ready()
    queues = ("mixed.testproject.one", "mixed.testproject.peer_number", "peer.mixed.one")
    until(lambda: all(fresh_eyes.consumers(queue) for queue in queues))

    # Ours, published by our code: handled by the peer, who retries it once for itself alone.
    printed = mixed.python(
        "from testproject.mixed import chained\nprint(chained.publish(number=7))"
    )
    ours = printed.split()[-1]
    retried = fresh_eyes.event("mixed.one", {"plan": ["fail", "ok"]})
    # Theirs, published by their code, by position and by name.
    program = (peering.interpreter(), PEER / "publisher.py", "41", "42")
    done = run_program(*program, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = done.stdout.split()

    until(lambda: {line["event"] for line in mixed.ledger(what="end")} >= {retried, *theirs}, 30)
    until(lambda: ledger.exists() and len(ledger.read_text().splitlines()) >= 3)
    fresh_eyes.empty(*queues)
    calls = Counter(tuple(json.loads(line)[1:]) for line in ledger.read_text().splitlines())
    assert calls == {("chained", 7): 1, ("one", 0): 1, ("one", 1): 1}
    assert len(mixed.runs(ours)) == 1
    assert [line["attempt"] for line in mixed.runs(retried)] == [1, 2]
    for event_id, number in zip(theirs, (41, 42), strict=True):
        runs = mixed.runs(event_id)
        assert [(line["attempt"], line["number"]) for line in runs] == [(1, number), (2, number)]
