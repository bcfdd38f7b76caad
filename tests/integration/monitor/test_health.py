"""The page of a process that publishes without an outbox, on a real broker."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django_amqp_events import publish_event
from django_amqp_events.conf import get_settings
from django_amqp_events.monitor.health import examine_publishing
from tests.conftest import Vhost

from ..wire import Wire


def examine() -> dict[str, Any]:
    return examine_publishing(get_settings(), datetime.now(UTC))


def test_the_broker_is_asked_over_the_connection_that_publishes(vhost: Vhost) -> None:
    with Wire.on(vhost.url) as wire:
        proxy = wire.proxy()
        wire.configure(url=proxy.url)
        for _ in range(3):
            assert examine()["broker"] is True
        publish_event("shop.happened", {})
        assert len(proxy.links) == 1
        wire.configure(url="amqp://guest:guest@127.0.0.1:1//")
        found = examine()
    assert (found["ok"], found["broker"], found["database"]) == (False, False, None)
    (problem,) = found["problems"]
    assert problem.startswith("Events cannot be published, because RabbitMQ is unreachable.")
