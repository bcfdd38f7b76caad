"""``@event``, ``using`` and the names of a payload; a backend that only remembers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_amqp_events import (
    ConfigurationError,
    DirectCallError,
    InvalidEventError,
    event,
    handler,
)
from django_amqp_events.decorators import Event, HandlerFunction, Publishable
from django_amqp_events.message.types import Message
from django_amqp_events.publish import publisher
from tests.doubles.broker import Broker

OWN_ID = UUID("8d4ad1b8-1f0c-4f6e-9d0e-6a4b1f1f0c11")


@pytest.fixture
def memory(settings: Any) -> Iterator[Broker]:
    settings.AMQP_EVENTS = {"SERVICE": "shop", "AUTODISCOVER": [], "PUBLISH": "immediate"}
    memory = Broker()
    with publisher.divert(memory):
        yield memory


@pytest.fixture
def order_created() -> Event[...]:
    @event("shop.order.created")
    def order_created(order_id: int, total: Decimal = Decimal(0), *, note: str = "") -> None:
        if order_id < 0:
            raise ValueError("an order's id is not negative")

    return order_created


@pytest.mark.parametrize("payload", [{}, {"order": 1}, {"order_id": 1, "more": 2}])
def test_invalid_payload_is_not_published(
    memory: Broker, order_created: Event[...], payload: dict[str, int]
):
    for publish in (
        lambda: order_created.publish(**payload),
        lambda: order_created.publish_many([{"order_id": 1}, payload]),
    ):
        with pytest.raises(InvalidEventError, match=r"order_created\(order_id"):
            publish()
    assert memory.messages == []


def test_positional_arguments_need_a_contract(memory: Broker):
    with pytest.raises(DirectCallError):
        Publishable[...]("shop.order.created").publish(1)
    Publishable[...]("shop.order.created").publish(order_id=1)
    assert memory.payloads == [{"order_id": 1}]


def test_hints_are_enforced_where_it_is_asked_for(memory: Broker, settings: Any):
    """By the service, by the event's declaration, and by settings of the event over both."""

    def contract(order_id: int) -> None: ...

    default = event("shop.none")(contract)
    on = event("shop.true", validate=True)(contract)
    off = event("shop.false", validate=False)(contract)

    def ways(each: Event[...], wrong: dict[str, Any]) -> Iterator[Callable[[], object]]:
        yield lambda: each.publish(**wrong)
        yield lambda: each.using(headers={"a": "b"}).publish(**wrong)
        yield lambda: asyncio.run(each.apublish(**wrong))
        yield lambda: each.publish_many([{"order_id": 1}, wrong])
        yield lambda: publisher.publish_event(each.name, wrong)

    def refused(each: Event[...]) -> bool:
        memory.windows.clear()
        errors = []
        for publish in ways(each, {"order_id": "x"}):
            try:
                publish()
            except InvalidEventError as exc:
                errors.append(str(exc))
        assert (len(errors), len(memory.messages)) in [(0, 6), (5, 0)]
        assert all("order_id: Input should be a valid integer" in error for error in errors)
        return bool(errors)

    assert list(map(refused, (default, on, off))) == [False, True, False]
    settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "VALIDATE": True}
    assert list(map(refused, (default, on, off))) == [True, True, False]
    events = {"shop.none": {"VALIDATE": False}, "shop.false": {"VALIDATE": True}}
    settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "EVENTS": events}
    assert list(map(refused, (default, on, off))) == [False, True, True]
    event("shop.wrong", validate="yes")(contract)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Use True or False"):
        default.publish(order_id=1)


AWKWARD = [
    "mode", "event_id", "using", "headers", "self", "name", "payload", "args", "kwargs", "options",
    "func", "executor", "thread_sensitive", "contract", "messages", "cls",
]  # fmt: skip


@pytest.mark.parametrize("name", AWKWARD)
def test_names_of_a_payload_meet_nothing(memory: Broker, name: str):
    @event("shop.anything")
    def anything(**payload: object) -> None: ...

    anything(**{name: 1})
    anything.publish(**{name: 2})
    anything.using(headers={"trace": "1"}).publish(**{name: 3})
    anything.publish_many([{name: 4}])
    asyncio.run(anything.apublish(**{name: 5}))
    assert memory.payloads == [{name: value} for value in (1, 2, 3, 4, 5)]


def test_using(memory: Broker, order_created: Event[...]):
    ready = order_created.using(event_id=OWN_ID, correlation_id="c", causation_id="d")
    again = ready.using(headers={"traceparent": "00-1"})
    assert again.publish(order_id=1) == str(OWN_ID)
    (message,) = memory.messages
    assert message.headers["event-correlation-id"] == "c"
    assert message.headers["event-causation-id"] == "d"
    assert message.headers["traceparent"] == "00-1"
    # The event itself has no options.
    assert order_created.publish_many([{"order_id": 1}]) == [memory.messages[1].event_id]
    assert "traceparent" not in memory.messages[1].headers
    assert memory.messages[1].event_id != str(OWN_ID)


def test_using_names_unknown_database(order_created: Event[...]):
    with pytest.raises(TypeError, match="unexpected keyword argument 'id'"):
        order_created.using(id=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="on_commit, immediate"):
        order_created.using(mode="at once")  # type: ignore[arg-type]
    for wrong in ("", "x" * 256):
        with pytest.raises(InvalidEventError, match="1 to 255 bytes"):
            order_created.using(event_id=wrong)


def test_apublish_keeps_the_thread_of_synchronous_code_free(
    db: None, memory: Broker, order_created: Event[...], settings: Any
):
    """A confirm that does not come would hold up all of Django's synchronous code."""
    threads: list[threading.Thread] = []
    used: list[BaseDatabaseWrapper] = []

    def answer(_: Message) -> None:
        threads.append(threading.current_thread())
        connections["default"].ensure_connection()  # as a contract or receiver that queries
        used.append(connections["default"])

    memory.answer = answer

    async def publish() -> None:
        for ready in (order_created, order_created.using(mode="immediate")):
            await asyncio.gather(*(ready.apublish(order_id=n) for n in range(4)))
        settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "PUBLISH": "on_commit"}

    from asgiref.sync import SyncToAsync

    asyncio.run(publish())
    sensitive = SyncToAsync.single_thread_executor._threads
    assert len(threads) == 8
    assert not set(threads) & set(sensitive)
    assert [one.connection for one in used] == [None] * 8, "no request ends in these threads"


def test_handlers_are_functions_that_are_no_tasks(order_created: Event[...]):
    @order_created.handler
    def send_invoice(order_id: int) -> int:
        return order_id + 1

    assert isinstance(send_invoice, HandlerFunction)
    assert send_invoice(1) == 2
    assert vars(send_invoice)["__name__"] == "send_invoice"
    untyped: Any = send_invoice
    for call in (untyped.delay, untyped.apply_async):
        with pytest.raises(DirectCallError, match="Publish its event instead"):
            call(order_id=1)


def test_wrong_argument_types_have_a_remedy(memory: Broker, order_created: Event[...]):
    """Each error names the remedy, and nothing is published."""
    with pytest.raises(InvalidEventError, match=r"publish\(\*\*payload\)"):
        order_created.publish({"order_id": 1}, total=1, surplus=2)
    payloads: Any
    for payloads in ({"order_id": 1}, "order", b"order", None, 3):
        with pytest.raises(InvalidEventError, match="pass a list of payloads"):
            order_created.publish_many(payloads)
        with pytest.raises(InvalidEventError, match="pass a list of payloads"):
            publisher.publish_many("shop.order.created", payloads)
    with pytest.raises(InvalidEventError, match="is a int"):
        order_created.publish_many([{"order_id": 1}, 2])  # type: ignore[list-item]
    assert memory.messages == []


def test_a_handler_needs_events_and_one_decorator():
    with pytest.raises(ConfigurationError, match="event names"):
        handler()
    with pytest.raises(ConfigurationError, match="event names"):
        handler(lambda: None)  # type: ignore[arg-type]
    options: dict[str, Any]
    for options in ({"events": ["shop.b"]}, {"handler": "shop.b"}):
        with pytest.raises(ConfigurationError, match="event names"):
            handler("shop.a", **options)
    with pytest.raises(ConfigurationError, match="one decorator"):

        @handler("shop.a")
        @handler("shop.b")
        def both() -> None: ...
