"""Publishing on a real broker: what arrives, when it leaves, and how often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from django_amqp_events import (
    PublishError,
    event,
    publish_event,
    publish_many,
)
from django_amqp_events.declare.declarations import declarations
from django_amqp_events.decorators import Event
from tests.conftest import Vhost

from ..wire import (
    ACK,
    Wire,
    in_threads,
    until,
)

NAME = "shop.order.created"


@pytest.fixture
def wire(vhost: Vhost) -> Iterator[Wire]:
    with Wire.on(vhost.url) as wire:
        yield wire


@pytest.fixture
def order_created(monkeypatch: pytest.MonkeyPatch) -> Event[...]:
    monkeypatch.setattr(declarations, "events", [])

    @event(NAME)
    def order_created(
        order_id: int, total: Decimal = Decimal("9.90"), *, note: str | None = None
    ) -> None: ...

    return order_created


# -- what arrives -----------------------------------------------------------------------------


def test_exactly_this_is_on_the_wire(wire: Wire, order_created: Event[...]):
    before = datetime.now(UTC)
    event_id = order_created.using(headers={"traceparent": "00-1", "n": 7}).publish(1, note="Grüße")
    after = datetime.now(UTC)
    (message,) = wire.take()
    assert message.body == (b'[[],{"order_id":1,"total":"9.90","note":"Gr\xc3\xbc\xc3\x9fe"},{}]')
    headers = message.properties.pop("application_headers")
    published_at = headers.pop("event-published-at")
    assert before <= datetime.fromisoformat(published_at) <= after
    assert published_at.endswith("Z")
    headers.pop("x-delivery-count", None)  # the quorum queue's
    assert headers == {
        "lang": "py",
        "task": NAME,
        "id": event_id,
        "root_id": event_id,
        "retries": 0,
        "argsrepr": "()",
        "kwargsrepr": "{…}",
        "origin": "shop",
        "event-format": "celery",
        "event-id": event_id,
        "event-name": NAME,
        "event-service": "shop",
        "event-correlation-id": event_id,
        "traceparent": "00-1",
        "n": 7,
    }
    assert message.properties == {
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "delivery_mode": 2,
        "message_id": event_id,
        "correlation_id": event_id,
    }
    delivery = message.delivery_info
    assert (delivery["exchange"], delivery["routing_key"]) == (wire.exchange, NAME)
    assert UUID(event_id).version == 4


def test_each_way_to_publish(wire: Wire, order_created: Event[...]):
    ids = [
        order_created.publish(order_id=1),
        order_created(2),
        publish_event(NAME, {"order_id": 3}),
        publish_event(NAME, {"order_id": 4, "surplus": 1}, validate=False),
        asyncio.run(order_created.apublish(order_id=5)),
        asyncio.run(order_created.using(mode="immediate").apublish(6)),
        *order_created.publish_many([{"order_id": 7}, {"order_id": 8}]),
        *publish_many(NAME, [{"order_id": 9}]),
    ]
    messages = wire.take()
    assert [message.properties["message_id"] for message in messages] == ids
    payloads = [json.loads(message.body)[1] for message in messages]
    # The contract's defaults are filled in, but where it was not asked.
    full = {"total": "9.90", "note": None}
    expected = [{"order_id": n, **full} for n in range(1, 10)]
    expected[3] = {"order_id": 4, "surplus": 1}
    assert payloads == expected


def test_large_unroutable_events_are_returned(wire: Wire):
    """Each is returned with its body; a client that only writes would fill both sockets."""
    wire.unbind()
    wire.configure(UNROUTED="raise", CONFIRM_TIMEOUT=10)
    with pytest.raises(PublishError) as caught:
        publish_many(NAME, [{"text": "x" * 500_000}] * 60)
    assert len(caught.value.errors) == 60
    assert len(wire.pool._idle) == 1


# -- how often --------------------------------------------------------------------------------


def test_sixteen_threads(wire: Wire):
    proxy = wire.proxy()
    wire.configure(url=proxy.url, CONFIRM_TIMEOUT=30)
    published: list[str] = []

    def publish(number: int) -> None:
        for n in range(200):
            published.append(publish_event(NAME, {"thread": number, "n": n}))

    raised = in_threads(16, publish)
    assert not raised
    messages = wire.take(about=3200)
    ids = [message.properties["message_id"] for message in messages]
    assert len(ids) == 3200
    assert sorted(ids) == sorted(published)
    # Each thread's events in its order.
    seen: dict[int, list[int]] = {}
    for message in messages:
        payload = json.loads(message.body)[1]
        seen.setdefault(payload["thread"], []).append(payload["n"])
    assert seen == {number: list(range(200)) for number in range(16)}
    assert len(proxy.links) <= 16


def test_the_celery_app_of_the_project_in_any_thread(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    """Without CELERY_APP: Celery's fixup for Django makes the app the default of all threads."""
    from celery import Celery, _state, current_app

    before = (_state.default_app, _state._tls.current_app)
    _state.default_app = None
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
    try:
        app = Celery("project", broker=wire.url)
        wire.configure(CELERY_APP="")
        found: list[Any] = []

        def publish(number: int) -> None:
            found.append(current_app._get_current_object())
            publish_event(NAME, {"n": number})

        assert not in_threads(2, publish)
        assert found == [app, app]
        assert len(wire.take()) == 2
    finally:
        _state.default_app, _state._tls.current_app = before


def test_a_cancelled_coroutine_leaves_the_pool_as_it_was(wire: Wire, order_created: Event[...]):
    proxy = wire.proxy()
    wire.configure(url=proxy.url, CONFIRM_TIMEOUT=10)
    order_created(0)

    async def publish() -> None:
        proxy.hold = {ACK}
        task = asyncio.create_task(order_created.apublish(1))
        await asyncio.to_thread(until, lambda: proxy.links[0].held, "the confirm")
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, proxy.release)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(publish())
    order_created(2)
    assert len(proxy.links) == 1
    assert len(wire.take()) == 3
