"""Replays whose processes are killed at each step: the row records what is known and is resumed."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from django_amqp_events.context import ReceivedEvent
from django_amqp_events.message import archive_message, decoding, encoding
from django_amqp_events.message.types import Message, Progress, Received
from tests.conftest import Database

from ..conftest import Make
from ..harness import Eyes, Service, until
from ..replaying import (
    make,
    mirror,
    mirror_once,
    mirrored,
    replay,
    resume,
    row,
    rows,
    wait_for,
)

# Many processes, one after the other.
pytestmark = pytest.mark.timeout(300)

BULK = "replays.bulk"
BEFORE_PUBLISH = "publisher.AmqpBackend.publish = die"
BEFORE_NOTED = "states.published = die"


@pytest.fixture
def repaired(fresh_eyes: Eyes, service: Make, archive_database: Database) -> Service:
    """A service with its archive in the test's database, after one failure."""
    environ = {"TESTPROJECT_DATABASE": archive_database.json}
    made = make(service, fresh_eyes, environ=environ)
    fresh_eyes.send(archived(1))
    mirror_once(made)
    assert row(made)["state"] == "archived"
    return made


def archived(number: int) -> Message:
    """The archive message of an event on which `bulk` failed."""
    message = encoding.event_message(
        exchange="events",
        name=BULK,
        body=encoding.encode_payload(BULK, {"number": number}),
        event_id=f"event-{number}",
        service="tests",
        published_at=datetime.now(UTC),
    )
    delivery = Received(
        queue="replays.testproject.bulk",
        exchange="events",
        routing_key=BULK,
        body=message.body,
        headers=message.headers,
        properties=message.properties,
    )
    return archive_message.build(
        delivery,
        exchange="replays:archive",
        reason="exhausted",
        at=datetime.now(UTC),
        worker="celery@one",
        service="replays",
        event=decoding.identify(delivery, trusted=False)[0],
        progress=Progress(handler="testproject.bulk"),
        handler="testproject.bulk",
    )


QUEUE = "replays.testproject.bulk"


def test_killed_between_claim_and_publish(fresh_eyes: Eyes, repaired: Service) -> None:
    """The row says *queued*, nothing is on its way; taken up again, it runs once."""
    assert replay(repaired, BEFORE_PUBLISH) is None
    left = row(repaired)
    assert (left["state"], left["replays"]) == ("queued", 1)
    assert left["replay_set"][0]["state"] == "queued"
    assert fresh_eyes.ready(QUEUE) == 0
    assert resume(repaired, lease=60) == 0, "it may be alive"
    report = replay(repaired, state="queued")
    assert report is not None
    assert report["skipped"] == ["its state is queued"]
    assert resume(repaired) == 1
    assert fresh_eyes.ready(QUEUE) == 1
    assert row(repaired)["state"] == "replaying"
    assert resume(repaired) == 0
    repaired.worker("threads", 1)
    until(lambda: repaired.runs("event-1", "end"))
    (done,) = mirrored(repaired, state="succeeded")
    (only,) = done["replay_set"]
    assert (done["state"], only["id"]) == ("succeeded", left["replay_set"][0]["id"])
    assert only["publishes"] == 2, "tries, of which one came to nothing"
    assert [line["replay"] for line in repaired.runs("event-1")] == [only["id"]]


def test_killed_after_publish_with_a_worker_running(fresh_eyes: Eyes, repaired: Service) -> None:
    """The outcome arrives before the lease expires, so nothing is published again."""
    repaired.worker("threads", 1).wait_ready()
    assert replay(repaired, BEFORE_NOTED) is None
    until(lambda: repaired.runs("event-1", "end"))
    (done,) = mirrored(repaired, state="succeeded")
    assert (done["state"], done["replay_set"][0]["state"]) == ("succeeded", "succeeded")
    assert resume(repaired) == 0
    assert len(repaired.runs("event-1")) == 1


def test_mirror_takes_over_interrupted_replays(fresh_eyes: Eyes, repaired: Service) -> None:
    """After the lease has expired."""
    assert replay(repaired, BEFORE_PUBLISH) is None
    repaired.worker("threads", 1)
    running = mirror(repaired, lease=1)
    (done,) = wait_for(repaired, state="succeeded")
    assert done["replay_set"][0]["publishes"] == 2
    assert len(repaired.runs("event-1")) == 1
    until(lambda: "replays again" in running.log)


#: Dies when half of the third chunk is confirmed.
IN_THE_MIDDLE = """
publish, windows = publisher.AmqpBackend.publish, []
def half(self, messages, *, mandatory):
    windows.append(len(messages))
    if len(windows) < 3:
        return publish(self, messages, mandatory=mandatory)
    publish(self, messages[:100], mandatory=mandatory)
    die()
publisher.AmqpBackend.publish = half
"""


def test_killed_in_the_middle_of_a_thousand(
    fresh_eyes: Eyes, service: Make, archive_database: Database
) -> None:
    """400 are on their way, 200 queued (half of them published), 400 were not touched."""
    environ = {"TESTPROJECT_DATABASE": archive_database.json}
    replays = make(service, fresh_eyes, environ=environ)
    fresh_eyes.send(*[archived(number) for number in range(1000)])
    mirror_once(replays)
    assert replay(replays, IN_THE_MIDDLE) is None
    left = rows(replays)
    assert Counter(each["state"] for each in left) == {
        "replaying": 400,
        "queued": 200,
        "archived": 400,
    }
    assert fresh_eyes.ready(QUEUE) == 500
    ids = {each["id"]: each["replay_set"][0]["id"] for each in left if each["replays"]}
    assert resume(replays) == 200
    report = replay(replays)
    assert report == {"published": 400, "returned": [], "skipped": [], "stopped": ""}
    assert fresh_eyes.ready(QUEUE) == 1100
    replays.worker("threads", 4)
    until(lambda: len(replays.ledger(what="end")) == 1100, 120)
    done = mirrored(replays, 1000, state="succeeded")
    assert all(len(each["replay_set"]) == 1 for each in done)
    assert {each["id"]: each["replay_set"][0]["id"] for each in done} | ids == {
        each["id"]: each["replay_set"][0]["id"] for each in done
    }
    calls = Counter((line["event"], line["replay"]) for line in replays.ledger(what="start"))
    assert Counter(calls.values()) == {1: 900, 2: 100}
    assert len({event for event, _ in calls}) == 1000, "no event under two replay ids"


def test_unknown_outcome_changes_no_row(fresh_eyes: Eyes, repaired: Service) -> None:
    """Any client with write permission can publish one. It is counted and changes no row."""
    message = encoding.replay_message(
        Received(
            queue=QUEUE, exchange="", routing_key=BULK,
            body=encoding.encode_payload(BULK, {"number": 1}), headers={},
            properties={"content_type": "application/json", "content_encoding": "utf-8"},
        ),
        ReceivedEvent(id="event-1", name=BULK, service="tests"),
        exchange="replays:replay",
        routing_key=QUEUE,
        service="replays",
        handler="testproject.bulk",
        replay_id=str(uuid4()),
    )  # fmt: skip
    before = row(repaired)
    repaired.worker("threads", 1)
    fresh_eyes.send(message)
    until(lambda: repaired.runs("event-1", "end"))
    until(lambda: fresh_eyes.ready("replays:archive"))
    assert "1 outcome of an unknown replay" in mirror_once(repaired)
    assert row(repaired) == before
