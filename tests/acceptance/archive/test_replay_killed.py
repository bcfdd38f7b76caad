"""Replays whose processes are killed at each step: the row records what is known and is resumed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from django_amqp_events.message import archive_message, decoding, encoding
from django_amqp_events.message.types import Message, Progress, Received
from tests.conftest import Database

from ..conftest import Make
from ..harness import Eyes, Service, until
from ..replaying import (
    make,
    mirror,
    mirror_once,
    replay,
    row,
    wait_for,
)

# Many processes, one after the other.
pytestmark = pytest.mark.timeout(300)

BULK = "replays.bulk"
BEFORE_PUBLISH = "publisher.AmqpBackend.publish = die"


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


def test_mirror_takes_over_interrupted_replays(fresh_eyes: Eyes, repaired: Service) -> None:
    """After the lease has expired."""
    assert replay(repaired, BEFORE_PUBLISH) is None
    repaired.worker("threads", 1)
    running = mirror(repaired, lease=1)
    (done,) = wait_for(repaired, state="succeeded")
    assert done["replay_set"][0]["publishes"] == 2
    assert len(repaired.runs("event-1")) == 1
    until(lambda: "replays again" in running.log)
