"""In a block of capture_events() or memory_events(), nothing is published to a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection

from django_amqp_events import publish_event
from django_amqp_events.archive import replay
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.batches.runner import Runner
from django_amqp_events.conf import get_settings
from django_amqp_events.models import ArchivedEvent, OutboxEvent, State
from django_amqp_events.publish.publisher import Options
from django_amqp_events.testing import capture_events, memory_events
from tests import celery_app
from tests.archive_rows import again, make, seen
from tests.commands import run_command
from tests.services import BILLING, handling

pytestmark = pytest.mark.django_db(transaction=True)

BLOCKS: dict[str, Callable[[], Any]] = {
    "capture_events()": capture_events,
    "memory_events()": memory_events,
}


@pytest.fixture(autouse=True)
def unreachable(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Set a broker URL on which nothing listens; yield the attempts to connect."""
    handlers = {"send_invoice": handling("shop.order.*")}
    settings.AMQP_EVENTS = {**BILLING, "EDITING": True, "HANDLERS": handlers}
    attempts: list[str] = []

    def connect(connection: Connection, **_: Any) -> None:
        attempts.append(connection.as_uri())
        raise ConnectionRefusedError

    monkeypatch.setattr(Connection, "ensure_connection", connect)
    conf = celery_app.app.conf
    before, conf.broker_url = conf.broker_url, "amqp://127.0.0.1:9"
    yield attempts
    conf.broker_url = before


def publish(mode: Any) -> Callable[[ArchivedEvent], int]:
    def run(_: ArchivedEvent) -> int:
        publish_event("shop.order.created", {"order_id": 7}, options=Options(mode=mode))
        return 1

    return run


def replay_one(row: ArchivedEvent) -> int:
    return len(replay.replay(seen(row), by="ada").published)


def edit(row: ArchivedEvent) -> int:
    report = replay.edit(row.pk, row.version, {"order_id": 8}, by="ada", reason="so")
    return len(report.published)


def resume(row: ArchivedEvent) -> int:
    """Publish what a process had claimed that died."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "publish_claimed", lambda *_: None)
        replay.replay(seen(row), by="ada")
    return replay.resume(lease=0)


def batch(_: ArchivedEvent) -> int:
    made = batch_states.freeze(ArchivedEvent.objects.all(), by="ada")
    batch_states.start(made.pk, by="ada", reason="fixed")
    runner = Runner(settings=get_settings(), stop=lambda: runner.published > 0)
    return runner.run()


def command(row: ArchivedEvent) -> int:
    code, out, err = run_command("events_replay", row.event_id, "--comment", "fixed")
    assert code == 0, out + err
    return 1


PUBLISHING: dict[str, Callable[[ArchivedEvent], int]] = {
    "outbox": publish("outbox"),
    "on_commit": publish("on_commit"),
    "immediate": publish("immediate"),
    "replay": replay_one,
    "edit": edit,
    "resume": resume,
    "batch": batch,
    "events_replay": command,
}


@pytest.mark.parametrize("path", PUBLISHING)
@pytest.mark.parametrize("block", BLOCKS)
def test_what_publishes(unreachable: list[str], block: str, path: str) -> None:
    row = make()
    with BLOCKS[block]() as found:
        assert PUBLISHING[path](row) == 1
        if block == "memory_events()":
            assert found.run() == 1
            assert len(found.outcomes) == (path not in ("outbox", "on_commit", "immediate"))
        elif path in ("outbox", "on_commit", "immediate"):
            assert found.names == ["shop.order.created"]
        else:
            assert found.names == []
    replayed = path not in ("outbox", "on_commit", "immediate")
    assert again(row).state == (State.REPLAYING if replayed else State.ARCHIVED)
    assert not OutboxEvent.objects.exists()
    assert unreachable == []


def test_afterwards_a_broker_is_reached_again(unreachable: list[str]) -> None:
    for block in BLOCKS.values():
        with block():
            pass
    row = make()
    assert replay.replay(seen(row), by="ada").stopped is not None
    assert again(row).state == State.ARCHIVED
    assert len(unreachable) == 1
