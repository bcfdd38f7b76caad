"""The public API as a user's type checker sees it. mypy reads this file; nothing runs it.

A line that has to be an error carries the ignore of that error, and mypy complains when it is
none (``warn_unused_ignores``).
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, assert_type
from uuid import UUID

from celery import Task

from django_amqp_events import (
    Event,
    Options,
    PublishError,
    ReceivedEvent,
    RetryPolicy,
    current_event,
    event,
    handler,
    publish_event,
    publish_many,
)
from django_amqp_events.decorators import HandlerFunction, Publishable


@event("shop.order.created")
def order_created(order_id: int, total: Decimal, *, note: str = "") -> None:
    """A contract."""


@event("shop.anything")
def anything(**payload: Any) -> None:
    """A contract that takes everything."""


def publishing() -> None:
    assert_type(order_created.publish(order_id=1, total=Decimal(2)), str)
    assert_type(order_created(1, Decimal(2), note="x"), str)
    assert_type(order_created.publish_many([{"order_id": 1, "total": Decimal(2)}]), list[str])
    order_created.publish_many({"order_id": 1})  # type: ignore[dict-item]
    order_created.publish(order_id="1", total=Decimal(2))  # type: ignore[arg-type]
    order_created.publish(total=Decimal(2))  # type: ignore[call-arg]
    order_created(1, Decimal(2), unknown=3)  # type: ignore[call-arg]
    anything.publish(mode=1, event_id=2, using=3, self=4)


def options(own: UUID) -> None:
    ready = order_created.using(mode="immediate", event_id=own, headers={"trace": "1"})
    assert_type(ready.publish(1, total=Decimal(2)), str)
    ready.publish("1", total=Decimal(2))  # type: ignore[arg-type]
    order_created.using(mode="at once")  # type: ignore[arg-type]
    order_created.using(event=1)  # type: ignore[call-arg]


async def asynchronous() -> None:
    assert_type(await order_created.apublish(order_id=1, total=Decimal(2)), str)
    await order_created.apublish(order_id="1", total=Decimal(2))  # type: ignore[arg-type]


def by_name() -> None:
    assert_type(publish_event("shop.order.created", {"order_id": 1}), str)
    assert_type(
        publish_many("shop.order.created", [{}], options=Options(mode="immediate")), list[str]
    )
    publish_event("shop.order.created", payload=1)  # type: ignore[arg-type]


@order_created.handler
def plain(order_id: int, total: Decimal) -> bool:
    return True


@order_created.handler(max_retries=5, retry_backoff=30)
def with_options(order_id: int) -> str:
    return ""


@event("shop.order.created.v2", validate=True)
def order_created_v2(order_id: int, total: Decimal, currency: str) -> None:
    """The next version of a contract."""


@order_created_v2.upcast_from(order_created)
def with_currency(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "currency": "EUR"}


@order_created_v2.upcast_from("shop.order.created")  # type: ignore[type-var]
def no_upcaster(order_id: int) -> None: ...


@handler("shop.order.created", max_retry=3)  # type: ignore[call-arg]
def unknown_option(order_id: int) -> None: ...


@handler(order_created, max_retries="3")  # type: ignore[arg-type]
def wrong_option(order_id: int) -> None: ...


@order_created.handler(max_retries="3")  # type: ignore[call-overload]
def another_wrong_option(order_id: int) -> None: ...


@order_created.handler(max_retry=3)  # type: ignore[call-overload]
def another_unknown_option(order_id: int) -> None: ...


@handler(
    "shop.order.created",
    name="shop.all",
    max_retries=None,
    retry_backoff=True,
    retry_backoff_max=60,
    retry_jitter=True,
    default_retry_delay=5,
    autoretry_for=[OSError, "requests.RequestException"],
    dont_autoretry_for=ValueError,
    time_limit=1.5,
    soft_time_limit=1,
    rate_limit="10/m",
    ignore_result=False,
    queue="mail",
    strict=True,
    once=True,
    using="orders",
    enabled=True,
    bind=False,
    validate=True,
)
def every_option(order_id: int) -> None: ...


@handler("shop.order.*", order_created, bind=True)
def several(self: Task, **payload: Any) -> None:
    """Handles a pattern."""


@handler("shop.order.created")
async def asynchronously(order_id: int) -> None:
    """Runs through async_to_sync."""


@handler("shop.order.created")
class AsTask(Task):
    def run(self, order_id: int) -> None:
        """Stays a class."""


def handling() -> None:
    assert_type(plain(1, Decimal(2)), bool)
    assert_type(with_options(order_id=1), str)
    assert_type(plain.name, str)
    taken: HandlerFunction[..., None] = several
    stays: type[AsTask] = AsTask
    plain("1", Decimal(2))  # type: ignore[arg-type]
    plain.delay(order_id=1, total=Decimal(2))  # type: ignore[attr-defined]
    plain.apply_async(kwargs={})  # type: ignore[attr-defined]
    order_created.delay(order_id=1)  # type: ignore[attr-defined]
    assert_type(with_currency({}), dict[str, Any])
    assert_type(current_event(), ReceivedEvent | None)
    if seen := current_event():
        assert_type(seen.attempt, int)
        seen.attempt = 2  # type: ignore[misc]
    print(taken, stays)


def errors() -> None:
    try:
        order_created(1, Decimal(2))
    except PublishError as error:
        assert_type(error.event_id, str)
        assert_type(error.published, bool | None)
        for event_id, one in error.errors.items():
            assert_type(event_id, str)
            assert_type(one, PublishError)


def settings() -> None:
    assert_type(RetryPolicy().schedule(), tuple[float, ...])


a_publishable: Publishable[...] = order_created
an_event: Event[...] = order_created
