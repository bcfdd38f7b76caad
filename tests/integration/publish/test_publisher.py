"""Publishing on a real broker: what arrives, when it leaves, and how often."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from typing import Any

import pytest

from django_amqp_events import (
    PublishError,
    event,
    publish_event,
    publish_many,
)
from django_amqp_events.declare.declarations import declarations
from django_amqp_events.decorators import Event

from ..wire import (
    ACK,
    NAME,
    Wire,
    in_threads,
    until,
)


@pytest.fixture
def order_created(monkeypatch: pytest.MonkeyPatch) -> Event[...]:
    monkeypatch.setattr(declarations, "events", [])

    @event(NAME)
    def order_created(
        order_id: int, total: Decimal = Decimal("9.90"), *, note: str | None = None
    ) -> None: ...

    return order_created


# -- what arrives -----------------------------------------------------------------------------


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
