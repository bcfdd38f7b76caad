"""The topology of a service, where tests/integration/broker/test_topology.py does not show it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from django_amqp_events import conf
from django_amqp_events.broker import topology
from django_amqp_events.broker.topology import (
    DEAD_LIMIT,
    DELIVERY_LIMIT,
    GRAVEYARD_LIMIT,
    NO_LIMIT,
)
from django_amqp_events.declare import registry
from django_amqp_events.declare.declarations import HandlerDeclaration


def invoice(order_id: int) -> None: ...


def test_each_limit_of_the_chain_leaves_room_above_the_one_before() -> None:
    """4.3 carries the delivery count along."""
    assert DELIVERY_LIMIT < GRAVEYARD_LIMIT < DEAD_LIMIT < NO_LIMIT < 2**31


services = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,8}", fullmatch=True)
words = st.from_regex(r"[a-z0-9_]{1,6}(\.[a-z0-9_]{1,6}){0,2}", fullmatch=True)


@given(service=services, names=st.lists(words, max_size=4, unique=True), backoff=st.integers(1, 99))
def test_everything_refers_to_something(service: str, names: list[str], backoff: int) -> None:
    settings, problems = conf.parse({"SERVICE": service, "DEFAULTS": {"RETRY_BACKOFF": backoff}})
    assert problems == ()
    options = {"events": ("shop.#",)}
    handlers = [HandlerDeclaration(target=invoice, name=name, options=options) for name in names]
    declared = registry.build(settings, (), handlers)
    assert declared.problems == ()
    built = topology.build(settings, declared)
    exchanges = [exchange.name for exchange in built.exchanges]
    queues = [queue.name for queue in built.queues]
    assert len(set(exchanges)) == len(exchanges)
    assert len(set(queues)) == len(queues)
    assert len(set(built.bindings)) == len(built.bindings)
    for binding in built.bindings:
        assert binding.exchange in exchanges
        assert binding.queue in queues
    for queue in built.queues:
        if target := queue.arguments.get("x-dead-letter-exchange"):
            assert target in exchanges
        assert any(binding.queue == queue.name for binding in built.bindings)
    for one in built.exchanges:
        if alternate := one.arguments.get("alternate-exchange"):
            assert alternate in exchanges
    # Declared in this order, a dead letter never lacks its exchange; names cannot meet.
    assert all(name.startswith((f"{service}:", f"{service}.")) for name in queues)
    infrastructure = {queue.name for queue in built.queues if queue.role != "handler"}
    assert all(":" in name for name in infrastructure)
    assert all(":" not in name for name in set(queues) - infrastructure)
