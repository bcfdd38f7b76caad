"""A call that ran nothing counts as done nowhere: every kind of callable in every place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from django_amqp_events import ConfigurationError, checks, event, signals
from django_amqp_events.archive.redaction import redact
from django_amqp_events.callables import deferred, unrun
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.publish import publisher
from django_amqp_events.reasons import Reason
from tests.doubles.receivers import connected

ran: list[str] = []


def plain(*args: Any, **kwargs: Any) -> None:
    ran.append("plain")


async def coroutine(*args: Any, **kwargs: Any) -> None:
    ran.append("coroutine")


def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    ran.append("generator")
    yield


async def stream(*args: Any, **kwargs: Any) -> Any:
    ran.append("stream")
    yield


class AsyncCall:
    async def __call__(self, *args: Any, **kwargs: Any) -> None:
        ran.append("object")


@wraps(coroutine)
def hidden(*args: Any, **kwargs: Any) -> Any:
    """Only the result shows it: a user's decorator around an async function."""
    return coroutine(*args, **kwargs)


def hidden_generator(*args: Any, **kwargs: Any) -> Any:
    return generator(*args, **kwargs)


KINDS: dict[str, Callable[..., Any]] = {
    "coroutine": coroutine, "generator": generator, "stream": stream, "object": AsyncCall(),
    "partial": partial(AsyncCall(), 1), "hidden": hidden, "hidden_generator": hidden_generator,
}  # fmt: skip
globals().update(object_=KINDS["object"], partial_=KINDS["partial"])
PATHS = {kind: f"{__name__}.{kind}" for kind in KINDS} | {
    kind: f"{__name__}.{kind}_" for kind in ("object", "partial")
}


@pytest.fixture(autouse=True)
def _alone(settings: Any) -> None:
    settings.AMQP_EVENTS = {
        "SERVICE": "shop", "AUTODISCOVER": [], "PUBLISH": "immediate", "BACKEND": "memory",
    }  # fmt: skip
    ran.clear()


def as_contract(target: Any, settings: Any) -> None:
    event("shop.order.created")(target)(order_id=1)


def as_contract_in_settings(target: Any, settings: Any) -> None:
    path = PATHS[next(kind for kind, each in KINDS.items() if each is target)]
    settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "EVENTS": {"shop.paid": {"CONTRACT": path}}}
    publisher.publish_event("shop.paid", {"order_id": 1})


def as_redaction(target: Any, settings: Any) -> None:
    path = PATHS[next(kind for kind, each in KINDS.items() if each is target)]
    settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "REDACT": path}
    if isinstance(redact("shop.paid", {"order_id": 1}), Reason):
        raise ConfigurationError
    checks.check()


@pytest.mark.parametrize("place", [as_contract, as_contract_in_settings, as_redaction])
@pytest.mark.parametrize("kind", KINDS)
def test_what_would_not_run_is_refused(kind: str, place: Any, settings: Any) -> None:
    with pytest.raises(ConfigurationError):
        place(KINDS[kind], settings)
    assert ran == []


def test_an_async_receiver_does_not_fail_a_publisher_in_an_event_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The event is published by then."""

    async def publish() -> None:
        publisher.publish_event("shop.paid", {"order_id": 1})

    with connected(coroutine, signals.event_unrouted):
        asyncio.run(publish())
        assert "publish with apublish()" in caplog.text
        publisher.publish_event("shop.paid", {"order_id": 1})
    assert ran == ["coroutine"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "hidden" not in kind])
def test_the_registry_and_decorators_refuse_them(kind: str, settings: Any) -> None:
    target = KINDS[kind]
    newer = event("shop.order.paid.v2")(plain)
    with pytest.raises(ConfigurationError, match="is not an ordinary function"):
        newer.upcast_from("shop.order.paid")(target)
    if deferred(target) == "a generator":  # async handlers are awaited
        handlers = {"shop.pay": {"EVENTS": ["shop.order.paid"], "HANDLER": PATHS[kind]}}
        settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "HANDLERS": handlers}
        with pytest.raises(ConfigurationError, match="is a generator"):
            get_registry()


@pytest.mark.django_db
def test_what_runs_is_accepted(settings: Any) -> None:
    wrapped = async_to_sync(coroutine)
    for target in (plain, wrapped, partial(plain, 1), dict):
        assert deferred(target) == ""
    as_contract(plain, settings)
    assert ran == ["plain"]
    assert unrun(object()) == unrun(None) == ""
