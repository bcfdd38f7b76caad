"""The page of a process that publishes without an outbox, on a real broker."""

from __future__ import annotations

from django_amqp_events import publish_event
from django_amqp_events.conf import get_settings
from django_amqp_events.monitor.health import examine_publishing
from tests.conftest import Vhost

from ..wire import Wire


def test_the_broker_is_asked_over_the_connection_that_publishes(vhost: Vhost) -> None:
    with Wire.on(vhost.url) as wire:
        proxy = wire.proxy()
        wire.configure(url=proxy.url)
        for _ in range(3):
            assert examine_publishing(get_settings()) == ""
        publish_event("shop.happened", {})
        assert len(proxy.links) == 1
        wire.configure(url="amqp://guest:guest@127.0.0.1:1//")
        problem = examine_publishing(get_settings())
    assert problem.startswith("Events cannot be published, because RabbitMQ is unreachable.")
