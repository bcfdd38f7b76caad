"""Handlers of the contract's service; each writes that it ran."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject

from django_amqp_events import current_event, event, publish_event
from django_amqp_events.publish.publisher import Options
from django_amqp_events.worker.task import HandlerTask

from . import ledger


class RefusedError(Exception):
    """Never retried."""


def note(name: str) -> Callable[..., None]:
    """Make a handler that does nothing but write."""

    def handler(**payload: Any) -> None:
        ledger.write(name, payload=payload)

    handler.__name__ = name
    return handler


once, first, second, star, hashed, mail_a, mail_b, effect, replayed, every_version = map(
    note,
    ("once", "first", "second", "star", "hashed", "mail_a", "mail_b", "effect", "replayed",
     "every_version"),
)  # fmt: skip


def third() -> None:
    ledger.write("third")
    if _attempt() < 4:
        raise RuntimeError(f"not yet: {_attempt()}")


def backoff() -> None:
    ledger.write("backoff")
    if _attempt() < 4:
        raise RuntimeError(f"attempt {_attempt()}")


def exhausted(reason: str) -> None:
    ledger.write("exhausted")
    raise LookupError(f"{reason} {_attempt()}\nsecond line")


def never() -> None:
    ledger.write("never")
    raise RefusedError("no")


def countdown(self: HandlerTask, seconds: float) -> None:
    ledger.write("countdown")
    if _attempt() == 1:
        self.retry(countdown=seconds)
        raise AssertionError("retry() raises")


def eta(self: HandlerTask) -> None:
    ledger.write("eta")
    if _attempt() == 1:
        raise self.retry(eta=ledger.now() + timedelta(seconds=2))


def retry_exc(self: HandlerTask) -> None:
    ledger.write("retry_exc")
    try:
        raise KeyError("lost")
    except KeyError as exc:
        raise self.retry(exc=exc, max_retries=1, countdown=1) from exc


def no_throw(self: HandlerTask) -> None:
    ledger.write("no_throw")
    if _attempt() == 1:
        self.retry(countdown=1, throw=False)
        ledger.write("no_throw_went_on")


def too_short(self: HandlerTask) -> None:
    ledger.write("too_short")
    self.retry(countdown=0.5)


def ignore() -> None:
    ledger.write("ignore")
    raise Ignore


def reject() -> None:
    ledger.write("reject")
    raise Reject("go away", requeue=False)


def requeue() -> None:
    ledger.write("requeue")
    if len(ledger.lines("requeue", _id())) == 1:
        raise Reject("once more", requeue=True)


def poison() -> None:
    ledger.write("poison")
    raise Reject("for ever", requeue=True)


def replace(self: HandlerTask) -> None:
    ledger.write("replace")
    self.replace(None)


def missing(order_id: int, customer: str) -> None:
    ledger.write("missing")


def surplus(order_id: int) -> None:
    ledger.write("surplus", order_id=order_id)


def strict(order_id: int) -> None:
    ledger.write("strict")


async def asynchronous(order_id: int) -> None:
    await asyncio.sleep(0)
    ledger.write("asynchronous", order_id=order_id)
    if _attempt() == 1:
        raise RuntimeError("once")


class TaskClass(Task):
    max_retries = 1
    retry_backoff = 1

    def run(self, order_id: int) -> None:
        ledger.write("task_class", order_id=order_id, retries=self.request.retries)
        raise RuntimeError("always")


def bound(self: HandlerTask, order_id: int) -> None:
    assert self.event is not None
    ledger.write(
        "bound",
        order_id=order_id,
        own=self.event.id,
        task=self.name,
        task_id=self.request.id,
        headers=dict(self.event.headers),
        service=self.event.service,
    )


def cause() -> None:
    ledger.write("cause")
    publish_event("case.effect", {"from": _id()}, options=Options(mode="immediate"))


def effect_seen(**payload: Any) -> None:
    event = current_event()
    assert event is not None
    ledger.write(
        "effect_seen",
        payload=payload,
        correlation_id=event.correlation_id,
        causation_id=event.causation_id,
    )


def many(number: int) -> None:
    ledger.write("many", number=number)
    if number == 7 or (number % 2 and _attempt() == 1):
        raise RuntimeError(f"number {number}")


def replay_fails() -> None:
    ledger.write("replay_fails")
    raise RefusedError("still no")


def loud() -> None:
    ledger.write("loud")
    raise RefusedError("\ud800 lone surrogate " + "x" * 100_000)


@dataclass
class Line:
    sku: str
    price: Decimal


@event("case.typed", validate=True)
def typed_event(order_id: int, lines: list[Line], day: date) -> None:
    """Its hints are enforced at the publish."""


def typed(order_id: int, lines: list[Line], day: date) -> None:
    total = sum(line.price for line in lines)
    ledger.write("typed", order_id=order_id, lines=repr(lines), day=repr(day), total=total)
    if _attempt() == 1:
        raise RuntimeError("once")


def violated(day: date) -> None:
    ledger.write("violated")


def versioned(total: Decimal, currency: str, country: str) -> None:
    ledger.write("versioned", total=repr(total), currency=currency, country=country)
    if _attempt() == 1:
        raise RuntimeError("once")


@event("case.version")
def version_1(**payload: Any) -> None: ...


@event("case.version.v2")
def version_2(**payload: Any) -> None: ...


@event("case.version.v3")
def version_3(**payload: Any) -> None: ...


@version_2.upcast_from(version_1)
def with_currency(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "total": Decimal(payload["total"]), "currency": "EUR"}


@version_3.upcast_from(version_2)
def with_country(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "country": "DE"}


VERSIONS = ("case.version", "case.version.v2", "case.version.v3")


def _attempt() -> int:
    event = current_event()
    assert event is not None
    return event.attempt


def _id() -> str:
    event = current_event()
    assert event is not None
    return event.id


QUICK = {"RETRY_BACKOFF": 1, "RETRY_BACKOFF_MAX": 1}
BOUND = {"BIND": True}
NO = {"DONT_AUTORETRY_FOR": ["tests.contract.handlers.RefusedError"]}


def _declare(**handlers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"c.{name}": {
            "EVENTS": [f"case.{name}"],
            "HANDLER": f"{__name__}.{name}",
            **options,
        }
        for name, options in handlers.items()
    }


HANDLERS = _declare(
    once={},
    first={"EVENTS": ["case.trio"]},
    second={"EVENTS": ["case.trio"]},
    third={"EVENTS": ["case.trio"], **QUICK},
    backoff={"RETRY_BACKOFF": 1, "MAX_RETRIES": 3},
    exhausted={"MAX_RETRIES": 2, "RETRY_BACKOFF": 1},
    never=NO,
    countdown=BOUND,
    eta=BOUND,
    retry_exc=BOUND,
    no_throw=BOUND,
    too_short={**BOUND, "MAX_RETRIES": 0},
    ignore={},
    reject={"MAX_RETRIES": 1, **QUICK},
    requeue={},
    poison={},
    replace=BOUND,
    missing={},
    surplus={},
    strict={"STRICT": True},
    asynchronous=QUICK,
    TaskClass={"EVENTS": ["case.task_class"]},
    bound=BOUND,
    star={"EVENTS": ["case.pattern.*"]},
    hashed={"EVENTS": ["case.pattern.#", "case.pattern.one"]},
    mail_a={"EVENTS": ["case.mail.a"], "QUEUE": "mail"},
    mail_b={"EVENTS": ["case.mail.b"], "QUEUE": "mail"},
    cause={},
    effect_seen={"EVENTS": ["case.effect"]},
    many={"MAX_RETRIES": 2, **QUICK},
    replayed={},
    replay_fails=NO,
    loud=NO,
    typed={"VALIDATE": True, **QUICK},
    violated={"VALIDATE": True},
    versioned={"EVENTS": ["case.version.v3"], "VALIDATE": True, **QUICK},
    every_version={"EVENTS": ["case.version.#"]},
)

AMQP_EVENTS: dict[str, Any] = {
    "SERVICE": "contract",
    "CELERY_APP": "tests.celery_app.app",
    "AUTODISCOVER": [],
    "TOPOLOGY": "verify",
    "PUBLISH": "immediate",
    "MAX_BODY": 200_000,
    "HANDLERS": HANDLERS,
}
