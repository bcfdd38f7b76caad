"""The thread that publishes for verdicts; workers have the rest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from django_amqp_events import signals
from django_amqp_events.exceptions import PublishError
from django_amqp_events.message.types import Message, Received
from django_amqp_events.worker import outgoing, settlement
from django_amqp_events.worker.dispatch import Delivery
from django_amqp_events.worker.settlement import Settler
from django_amqp_events.worker.verdict import HANDLED, Verdict


class Channel:
    """Confirms what it publishes."""

    def __init__(self) -> None:
        self.published: list[Message] = []

    def publish(self, messages: Sequence[Message], **_: Any) -> list[PublishError | None]:
        self.published += messages
        return [None] * len(messages)

    def reopen(self) -> None: ...

    def close(self) -> None: ...


class Acks:
    def __init__(self) -> None:
        self.acked: list[Any] = []
        self.requeued: list[Any] = []
        self.writing, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()

    def ack(self, messages: Sequence[Any]) -> None:
        self.writing.set()
        assert self.may_write.wait(30)
        self.acked += messages

    def reject(self, message: Any) -> None:
        self.requeued.append(message)


def fail(*_: object, **__: object) -> None:
    raise LookupError("no such field")


def leave(**_: object) -> None:
    raise SystemExit(3)


def make(acks: Acks, build: Any) -> tuple[Settler, Delivery]:
    settings = SimpleNamespace(service="billing", confirm_timeout=1)
    made: Any = SimpleNamespace(settings=settings, build=build)
    settler = Settler(app=None, outgoing=made, acks=acks, call_soon=bool)  # type: ignore[arg-type]
    return settler, delivery()


def delivery() -> Delivery:
    received = Received(
        queue="q", exchange="events", routing_key="a.b", body=b"", headers={}, properties={}
    )
    message: Any = SimpleNamespace(channel=SimpleNamespace(connection=object()))
    return Delivery(received=received, message=message)


@pytest.mark.parametrize("broken", ["logging", "all logging", "signal"])
def test_an_error_after_the_confirm_settles_nothing_again(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A second ack would close the channel, and a second publish double the event."""
    if broken != "signal":
        monkeypatch.setattr(outgoing.logger, "filter", fail)
    if broken == "all logging":
        monkeypatch.setattr(settlement.logger, "filter", fail)
    if broken == "signal":
        signals.event_archived.connect(leave)
    channel, acks = Channel(), Acks()
    monkeypatch.setattr(settlement, "ConfirmChannel", lambda *_, **__: channel)
    settler, first = make(
        acks,
        lambda *_: Message(exchange="", routing_key="", body=b"", headers={}, properties={}),
    )
    try:
        for each in (first, delivery()):
            settler.settle(each, Verdict(kind="archive", reason="malformed"))
        assert settler.drain(5)
    finally:
        signals.event_archived.disconnect(leave)
    assert len(channel.published) == len(acks.acked) == 2
    assert not settler._jobs


def test_an_event_whose_message_cannot_be_built_is_requeued() -> None:
    """Unsettled, it would occupy the prefetch count until the worker ends."""
    acks = Acks()
    settler, bad = make(acks, fail)
    settler.settle(bad, Verdict(kind="archive", reason="malformed"))
    settler.flush()
    assert (acks.acked, acks.requeued) == ([], [bad.message])


def test_a_stop_waits_for_acks_that_another_thread_writes() -> None:
    """Celery's timer thread may run a flush when the main thread is about to close the channel."""
    acks = Acks()
    acks.may_write.clear()
    settler, handled = make(acks, lambda *_: None)
    settler.settle(handled, HANDLED)
    timer = threading.Thread(target=settler.flush)
    timer.start()
    assert acks.writing.wait(30)
    main = threading.Thread(target=settler.drain, args=(5,))
    main.start()
    main.join(0.2)
    assert main.is_alive()
    acks.may_write.set()
    main.join(30)
    timer.join(30)
    assert acks.acked == [handled.message]
