"""Handlers of the contract's service; each writes that it ran."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from celery.exceptions import Reject

from django_amqp_events import current_event, event, publish_event
from django_amqp_events.context import ReceivedEvent
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


once, first, second, star, hashed, mail_a, mail_b, effect, replayed = map(
    note, ("once", "first", "second", "star", "hashed", "mail_a", "mail_b", "effect", "replayed")
)


def third() -> None:
    ledger.write("third")
    if _event().attempt < 4:
        raise RuntimeError(f"not yet: {_event().attempt}")


def backoff() -> None:
    ledger.write("backoff")
    if _event().attempt < 4:
        raise RuntimeError(f"attempt {_event().attempt}")


def exhausted(reason: str) -> None:
    ledger.write("exhausted")
    raise LookupError(f"{reason} {_event().attempt}\nsecond line")


def countdown(self: HandlerTask, seconds: float) -> None:
    ledger.write("countdown")
    if _event().attempt == 1:
        self.retry(countdown=seconds)
        raise AssertionError("retry() raises")


def poison() -> None:
    ledger.write("poison")
    raise Reject("for ever", requeue=True)


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
    publish_event("case.effect", {"from": _event().id}, options=Options(mode="immediate"))


def effect_seen(**payload: Any) -> None:
    event = _event()
    ledger.write(
        "effect_seen",
        payload=payload,
        correlation_id=event.correlation_id,
        causation_id=event.causation_id,
    )


def replay_fails() -> None:
    ledger.write("replay_fails")
    raise RefusedError("still no")


def versioned(total: Decimal, currency: str, country: str) -> None:
    ledger.write("versioned", total=repr(total), currency=currency, country=country)
    if _event().attempt == 1:
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


def _event() -> ReceivedEvent:
    event = current_event()
    assert event is not None
    return event


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
    countdown=BOUND,
    poison={},
    bound=BOUND,
    star={"EVENTS": ["case.pattern.*"]},
    hashed={"EVENTS": ["case.pattern.#", "case.pattern.one"]},
    mail_a={"EVENTS": ["case.mail.a"], "QUEUE": "mail"},
    mail_b={"EVENTS": ["case.mail.b"], "QUEUE": "mail"},
    cause={},
    effect_seen={"EVENTS": ["case.effect"]},
    replayed={},
    replay_fails=NO,
    versioned={"EVENTS": ["case.version.v3"], "VALIDATE": True, **QUICK},
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
