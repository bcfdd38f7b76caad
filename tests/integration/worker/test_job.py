"""A job as a pool process carries it out: what it publishes, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from django_amqp_events import signals
from django_amqp_events.broker.delivery_reader import DeliveryReader
from django_amqp_events.message.types import Delivered
from django_amqp_events.worker import pool_job
from django_amqp_events.worker.delivery import Item
from django_amqp_events.worker.pool_job import JobOptions, Outcome, run_job
from django_amqp_events.worker.task import HandlerTask
from tests.conftest import Vhost
from tests.doubles.receivers import connected

from ..conftest import Service

#: An announcement looks at the connections that other tests have left open.
pytestmark = pytest.mark.django_db

QUEUE, DELAY = "billing.count", "billing:delay.60s"
#: Messages in the delay queue when each run began.
seen: list[int] = []
look: Callable[[], int] = int


def count(task: HandlerTask, step: str) -> None:
    seen.append(look())
    if step == "soon":
        task.retry(countdown=1)
    if step:
        raise {"retry": KeyError, "interrupt": KeyboardInterrupt, "archive": ValueError}[step](step)


@pytest.fixture
def counting(service: Any, fresh_vhost: Vhost, monkeypatch: pytest.MonkeyPatch) -> Service:
    made: Service = service(
        fresh_vhost,
        HANDLERS={
            "count": {
                "EVENTS": ["shop.order"],
                "HANDLER": "tests.integration.worker.test_job.count",
                "DONT_AUTORETRY_FOR": ["ValueError"],
                "RETRY_BACKOFF": 60,
                "BIND": True,
            }
        },
    )
    made.import_topology()
    seen.clear()
    monkeypatch.setattr(pool_job, "JOB_SECONDS", 60.0)
    monkeypatch.setattr("tests.integration.worker.test_job.look", lambda: made.ready(DELAY))
    return made


def deliver(service: Service, *steps: str) -> list[Item]:
    """Publish an event for each step, and return their deliveries."""
    for number, step in enumerate(steps):
        body = b'[[], {"step": "%s"}, {}]' % step.encode()
        headers = {"task": "shop.order", "id": f"event-{number}", "event-service": "shop"}
        service.publish("events", "shop.order", body, headers)
    deliveries: list[Delivered] = []
    channel = service.channel()
    reader = DeliveryReader(channel, lambda tag: None)
    reader.consume(QUEUE, lambda tag, delivered: deliveries.append(delivered))
    while len(deliveries) < len(steps):
        channel.connection.drain_events(timeout=60)
    return [Item(delivered) for delivered in deliveries]


def kinds(outcomes: list[Outcome] | str) -> list[str]:
    assert not isinstance(outcomes, str), outcomes
    return [outcome.kind for outcome in outcomes]


def test_messages_are_published_after_the_last_run(counting: Service) -> None:
    """A later handler may end the process; then RabbitMQ delivers the originals again."""
    items = deliver(counting, "retry", "", "interrupt", "retry")
    assert kinds(run_job(JobOptions(worker="w"), items)) == [
        "published", "ack", "published", "published",
    ]  # fmt: skip
    assert seen == [0, 0, 0, 0]
    counting.wait_for_ready(DELAY, 3)


def test_an_archived_event_is_published_in_a_job_of_its_own(counting: Service) -> None:
    """Its log handlers and the receivers of its signal would delay the acks of others."""
    archived: list[Any] = []

    def receiver(sender: Any, *, event: Any, **_: Any) -> None:
        archived.append(event.id)

    with connected(receiver, signals.event_archived):
        items = deliver(counting, "retry", "archive", "", "archive")
        outcomes = run_job(JobOptions(worker="w"), items)
        assert kinds(outcomes) == ["published", "publish"]
        assert archived == []
        verdict = outcomes[1].verdict  # type: ignore[union-attr]
        again = run_job(JobOptions(worker="w"), [items[1]._replace(verdict=verdict)])
    assert kinds(again) == ["published"]
    assert archived == ["event-1"]
    counting.wait_for_ready("billing:archive", 1)


def test_nothing_is_published_when_the_connection_is_lost(counting: Service) -> None:
    items = deliver(counting, "retry", "retry")
    outcomes = run_job(JobOptions(worker="w"), items, lambda: True)
    assert kinds(outcomes) == ["publish", "publish"]
    assert not counting.ready(DELAY)


def test_a_missing_exchange_costs_no_other_its_confirm(counting: Service) -> None:
    """RabbitMQ closes the channel over it, and retries without a confirm would be doubled."""
    counting.channel().exchange_delete("billing:delay.1s")
    items = deliver(counting, "retry", "soon", "retry")
    assert kinds(run_job(JobOptions(worker="w"), items)) == ["published", "publish", "published"]
    counting.wait_for_ready(DELAY, 2)


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, ValueError])
def test_a_receiver_that_raises_voids_no_outcome(
    counting: Service, error: type[BaseException]
) -> None:
    def receiver(*_: Any, **__: Any) -> None:
        raise error

    with connected(receiver, signals.event_retried):
        items = deliver(counting, "retry", "", "retry")
        outcomes = run_job(JobOptions(worker="w"), items)
    assert kinds(outcomes) == ["published", "ack", "published"]
