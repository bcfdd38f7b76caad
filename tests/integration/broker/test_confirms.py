"""What a publish says when something goes wrong, and that a wrong confirm confirms nothing.

Time-outs here are what is configured (mostly IN_VAIN); DEADLINE only tells a hang from a wait.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import amqp
import pytest
from celery.exceptions import SoftTimeLimitExceeded

from django_amqp_events import (
    BrokerUnavailableError,
    PublishError,
    PublishInterruptedError,
    PublishRefusedError,
    PublishTimeoutError,
    UnroutableError,
    event,
    publish_event,
    publish_many,
)
from django_amqp_events.broker import confirms
from django_amqp_events.broker.provisioning.amqp_api import version_of
from django_amqp_events.declare.declarations import declarations
from django_amqp_events.message.types import Message
from django_amqp_events.publish.relay import OutboxChannel

from ..wire import (
    ACK,
    BLOCKED,
    DEADLINE,
    NAME,
    UNBLOCKED,
    Link,
    Proxy,
    Wire,
    ack,
    finished,
    in_threads,
    until,
)

#: CONFIRM_TIMEOUT where a confirm is waited for in vain; a busy machine connects within it.
IN_VAIN = 4
CERTIFICATE = Path(__file__).parent.parent / "localhost.pem"


def failure(payload: dict[str, object] | None = None) -> PublishError:
    """Publish, which has to fail, in bounded time."""
    began = time.monotonic()
    with pytest.raises(PublishError) as caught:
        publish_event(NAME, payload or {"n": 1})
    assert time.monotonic() - began < DEADLINE
    error = caught.value
    assert error.event_id
    assert error.event_name == NAME
    return error


def tag(frame: bytes) -> int:
    """The delivery tag of a held confirm: behind the frame's head, class and method."""
    return int(struct.unpack(">Q", frame[11:19])[0])


def held_link(proxy: Proxy, *, last: int) -> Link:
    """Wait until the confirm of the last of a connection's messages is here, and not yet there."""

    def held() -> bool:
        return bool(proxy.links) and max(map(tag, proxy.links[0].held), default=0) >= last

    until(held, f"a held confirm of {last}")
    return proxy.links[0]


def publishing(wire: Wire, messages: list[Message]) -> tuple[threading.Thread, list[Any]]:
    """Publish in a thread; its answers come into the list."""
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend(wire.pool.publish(messages, mandatory=True))
    )
    thread.start()
    return thread, results


# -- an error class each ----------------------------------------------------------------------


def test_frames_that_are_no_confirm_do_not_prolong_the_wait(wire: Wire):
    """A heartbeat, or half a frame, every now and then looked like an answer to py-amqp."""
    proxy = wire.proxy()
    wire.configure(url=f"{proxy.url}?heartbeat=1", CONFIRM_TIMEOUT=IN_VAIN)
    publish_event(NAME, {})
    # No heartbeats were negotiated: a pooled connection sends none.
    assert wire.pool._idle[0]._amqp.heartbeat == 0
    proxy.hold = {ACK}
    ended = threading.Event()

    def heartbeats() -> None:
        while not ended.wait(0.2):
            for link in proxy.links:
                link.write(b"\x08\x00\x00\x00\x00\x00\x00\xce")

    beating = threading.Thread(target=heartbeats)
    beating.start()
    try:
        failure()
    finally:
        ended.set()
        finished(beating)


def test_half_a_frame_is_waited_for_but_not_for_ever(wire: Wire):
    proxy = wire.proxy()
    wire.configure(url=proxy.url, CONFIRM_TIMEOUT=IN_VAIN)
    publish_event(NAME, {})
    # More than a frame's head: py-amqp's own look at the socket would spin on the rest.
    proxy.links[0].write(ack(1)[:12])
    until(wire.pool._idle[0]._readable, "the half is here")
    failure()


def test_of_two_messages_with_one_id_the_unroutable_one_is_named(wire: Wire):
    """A replay to two handlers publishes one event id under two routing keys."""
    wire.unbind()
    wire.channel.queue_bind(wire.queue, wire.exchange, "second")
    proxy = wire.proxy()
    wire.configure(url=proxy.url, CONFIRM_TIMEOUT=IN_VAIN)
    ids = {"message_id": "one", "delivery_mode": 2}
    messages = [wire.message(routing_key=key, properties=ids) for key in ("second", "first")]
    proxy.hold = {ACK}
    thread, results = publishing(wire, messages)
    # The return comes before its confirm, whatever order the confirms come in.
    held_link(proxy, last=2).write(ack(2, multiple=True))
    finished(thread)
    assert [type(result) for result in results] == [type(None), UnroutableError]


# -- an unreachable, blocked or frozen broker -------------------------------------------------


def test_a_connection_that_is_known_to_be_blocked(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    proxy = wire.proxy()
    wire.configure(url=proxy.url)
    publish_event(NAME, {"n": 0})
    (channel,) = wire.pool._idle
    proxy.links[0].write(BLOCKED)
    until(channel._readable, "connection.blocked is here")
    for _ in range(2):
        error = failure({"n": 1})
        assert type(error) is BrokerUnavailableError
        assert "blocks publishers" in str(error)
    proxy.links[0].write(UNBLOCKED)
    until(channel._readable, "connection.unblocked is here")
    publish_event(NAME, {"n": 2})
    assert [payload["n"] for payload in wire.payloads()] == [0, 2]
    assert len(proxy.links) == 1
    # When it dies, a proxy keeps it, so `connection.unblocked` never comes.
    proxy.links[0].write(BLOCKED)
    until(channel._readable, "connection.blocked is here")
    proxy.links[0].dead = True
    assert type(failure({"n": 3})) is BrokerUnavailableError
    monkeypatch.setattr(confirms, "BLOCKED_SECONDS", 0.0)
    publish_event(NAME, {"n": 4})
    assert [payload["n"] for payload in wire.payloads()] == [4]
    assert len(proxy.links) == 3, "the first one, the one that asked, and the new one"


def test_a_relay_ends_its_wait_on_a_connection_that_died_while_it_was_blocked(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    proxy = wire.proxy()
    wire.configure(url=proxy.url)
    monkeypatch.setattr(confirms, "BLOCKED_SECONDS", 0.0)

    def block() -> bool:
        """Block the first connection when it waits for a confirm, and not before."""
        if proxy.links and proxy.links[0].dead and channel._unconfirmed:
            proxy.links[0].write(BLOCKED)
        return False

    channel = OutboxChannel(wire.pool.app, timeout=20, stop=block)
    try:
        assert channel.publish([wire.message()], mandatory=True) == [None]
        proxy.links[0].dead = True
        (error,) = channel.publish([wire.message()], mandatory=True)
        assert type(error) is PublishInterruptedError
        assert channel.publish([wire.message()], mandatory=True) == [None]
    finally:
        channel.leave()


@pytest.mark.parametrize("frames", range(1, 6))
def test_a_connection_that_falls_silent_while_it_is_opened(wire: Wire, frames: int):
    """Start, tune, open-ok, channel open-ok, select-ok: py-amqp waits for the last two for ever."""
    proxy = wire.proxy()
    wire.configure(url=proxy.url, CONFIRM_TIMEOUT=0.5)
    proxy.passes = frames - 1
    proxy.everything = True
    assert type(failure()) is BrokerUnavailableError


def test_a_broker_that_reads_nothing_for_a_while_is_waited_for(wire: Wire):
    """py-amqp gives such a connection up after one second (TCP_USER_TIMEOUT)."""
    proxy = wire.proxy()
    wire.configure(url=proxy.url, CONFIRM_TIMEOUT=10, MAX_BODY=20_000_000)
    publish_event(NAME, {})
    proxy.flowing.clear()
    waker = threading.Timer(3, proxy.flowing.set)
    waker.start()
    try:
        # More than socket buffers hold, so that the window is full.
        event_id = publish_event(NAME, {"text": "x" * 15_000_000})
    finally:
        waker.cancel()
        proxy.flowing.set()
    assert event_id in wire.ids()


def test_tls(wire: Wire):
    proxy = wire.proxy(tls=CERTIFICATE)
    wire.configure(
        url=proxy.url, celery={"broker_use_ssl": {"ca_certs": CERTIFICATE}}, CONFIRM_TIMEOUT=3
    )
    published = publish_many(NAME, [{"text": "x" * 20_000, "n": n} for n in range(200)])
    assert sorted(wire.ids()) == sorted(published)
    publish_event(NAME, {})
    assert len(proxy.links) == 1
    # Neither the write nor the goodbye waits for a peer that is silent.
    proxy.flowing.clear()
    began = time.monotonic()
    assert type(failure()) is PublishTimeoutError
    assert time.monotonic() - began < 5.9, "TLS waited for an answer to its goodbye"
    proxy.flowing.set()
    proxy.links[0].close()
    publish_event(NAME, {})
    (channel,) = wire.pool._idle
    proxy.links[-1].close()
    until(lambda: not channel.healthy(), "healthy() sees the end of a TLS connection")


def test_many_open_files(wire: Wire):
    """select.select() ends at descriptor 1024; each publish would have opened a connection."""
    proxy = wire.proxy()
    wire.configure(url=proxy.url)
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        for _ in range(3):
            publish_event(NAME, {})
        assert wire.pool._idle[0]._transport.sock.fileno() > 1024
    finally:
        for descriptor in spare:
            os.close(descriptor)
    assert len(proxy.links) == 1


# -- no channel is used again after a failure -------------------------------------------------


@pytest.mark.parametrize("events", [1, 3])
def test_a_confirm_that_has_arrived_is_in_time(wire: Wire, events: int):
    """Also if the process did not run from then until after the deadline.

    It begins anew with a confirm, for the other messages.
    """
    proxy = wire.proxy()
    wire.configure(url=proxy.url)
    publish_event(NAME, {})
    (channel,) = wire.pool._idle
    proxy.hold = {ACK}

    def stand_still() -> None:
        channel._before_read = lambda: None  # type: ignore[method-assign]
        link = held_link(proxy, last=1 + events)
        link.write(ack(2))
        until(channel._readable, "the confirm is here")
        channel._deadline = 0.0
        if events > 1:
            others.start()

    others = threading.Timer(0.5, lambda: proxy.links[0].write(ack(1 + events, multiple=True)))
    channel._before_read = stand_still  # type: ignore[method-assign]
    messages = [wire.message() for _ in range(events)]
    assert wire.pool.publish(messages, mandatory=True) == [None] * events


@contextmanager
def interrupted(when: Callable[[], object]) -> Iterator[None]:
    """Send SIGALRM once *when* is true, within a block that waits in vain."""

    def send() -> None:
        until(when, "it waits")
        os.kill(os.getpid(), signal.SIGALRM)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        finished(sending)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("interruption", [SoftTimeLimitExceeded, KeyboardInterrupt, SystemExit])
def test_an_exception_from_a_signal_goes_through(wire: Wire, interruption: type[BaseException]):
    """Celery's soft time limit is no failure of the broker; the channel is given up anyway."""
    proxy = wire.proxy()
    wire.configure(url=proxy.url)
    publish_event(NAME, {"n": 1})
    (channel,) = wire.pool._idle

    def interrupt(number: int, frame: object) -> None:
        raise interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        proxy.hold = {ACK}
        with interrupted(lambda: proxy.links[0].held), pytest.raises(interruption):
            publish_event(NAME, {"n": 2})
        # The same while the connection is opened.
        proxy.everything = True
        with interrupted(lambda: len(proxy.links) > 1), pytest.raises(interruption):
            publish_event(NAME, {"n": 3})
    finally:
        signal.signal(signal.SIGALRM, before)
    # A socket on which py-amqp was still shaking hands is out of reach: the collector's.
    gc.collect()
    assert channel.broken
    assert not wire.pool._idle
    proxy.release()
    assert publish_event(NAME, {"n": 4})


# -- the pool ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_pool_a_connection_for_each_use(wire: Wire, limit: int | None):
    """As Celery documents broker_pool_limit."""
    proxy = wire.proxy()
    wire.configure(url=proxy.url, celery={"broker_pool_limit": limit})
    for _ in range(3):
        publish_event(NAME, {})
    assert len(proxy.links) == 3
    until(lambda: all(link.closed for link in proxy.links), "none is left open")


def test_options_of_the_sockets_are_the_users(wire: Wire):
    option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    wire.configure(CONFIRM_TIMEOUT=5)
    publish_event(NAME, {})
    assert wire.pool._idle[0]._transport.sock.getsockopt(*option) == 5000
    settings = {"socket_settings": {socket.TCP_USER_TIMEOUT: 1234}}
    wire.configure(celery={"broker_transport_options": settings})
    publish_event(NAME, {})
    assert wire.pool._idle[0]._transport.sock.getsockopt(*option) == 1234


# -- many at once ----------------------------------------------------------------------------------


def arrived(wire: Wire, number: int) -> list[tuple[bytes, dict[str, Any], str]]:
    """Take messages out of the queue, without what the queue adds to them."""
    taken = wire.take(about=number)
    for message in taken:
        (message.properties.get("application_headers") or {}).pop("x-delivery-count", None)
    return [(bytes(m.body or b""), m.properties, m.delivery_info["routing_key"]) for m in taken]


def test_the_same_messages_arrive(wire: Wire):
    """Of every kind: larger than a frame, empty, unicode, many headers, other types of them."""
    large = {f"header-{n}": "ü" * 100 for n in range(250)}
    given = [
        wire.message(b""),
        wire.message(b"x" * 131_072),
        wire.message(b"y" * 400_000, headers=large),
        wire.message(routing_key="bestellung.größe.訂單"),
        wire.message(headers=large),
        wire.message(headers={"n": 2**40, "m": -1, "f": 1.5, "b": True, "t": "ü", "e": ""}),
        wire.message(headers={"list": [1, "a"], "table": {"a": 1}, "none": None, "raw": b"\xff"}),
        wire.message(properties={"message_id": "p", "priority": 3, "type": "t", "app_id": "a"}),
        wire.message(properties={}),
        *(wire.message(b"z" * n) for n in range(0, 130_000, 10_000)),
        *(wire.message(str(n).encode()) for n in range(300)),
    ]
    assert wire.pool.publish(given, mandatory=True) == [None] * len(given)
    ours = arrived(wire, len(given))
    for message in given:
        wire.channel.basic_publish(
            amqp.Message(
                message.body,
                application_headers=dict(message.headers),
                **dict(message.properties),
            ),
            wire.exchange,
            message.routing_key,
        )
    # Priorities order what is ready.
    declare = partial(wire.channel.queue_declare, wire.queue, passive=True)
    until(lambda: declare().message_count == len(given), "the queue has them")
    assert arrived(wire, len(given)) == ours
    if version_of(wire.channel.connection.server_properties) >= (4, 3):
        # By strict priority, 4 without one: docs/other-programs.md.
        given.sort(key=lambda message: message.properties.get("priority", 4), reverse=True)
    assert [body for body, *_ in ours] == [message.body for message in given]


UNWRITABLE: list[dict[str, Any]] = [
    {"headers": {"object": object()}},
    {"headers": {"large": 2**63}},
    {"headers": {"n" * 256: 1}},
    {"headers": {5: 1}},
    {"properties": {"delivery_mode": 256}},
    {"properties": {"delivery_mode": "2"}},
    {"properties": {"message_id": 5}},
    {"properties": {"message_id": "x" * 256}},
    {"routing_key": "ü" * 128},
    {"exchange": "x" * 256},
]


@pytest.mark.parametrize("size", [10, 400_000])
def test_what_cannot_be_encoded_is_refused(wire: Wire, size: int):
    """Nothing of it is written, and the messages around it are published."""
    good = [wire.message() for _ in UNWRITABLE]
    bad = [wire.message(b"x" * size, **changes) for changes in UNWRITABLE]
    messages = [message for pair in zip(good, bad, strict=True) for message in pair]
    results = wire.pool.publish(messages, mandatory=True)
    assert [type(result) for result in results] == [type(None), PublishRefusedError] * len(good)
    assert [error.reason.code for error in results[1::2] if error] == ["message-unwritable"] * 10
    assert sorted(wire.ids()) == sorted(message.event_id for message in good)


# -- what is published ----------------------------------------------------------------------------


def test_large_unroutable_events_are_returned(wire: Wire):
    """Each is returned with its body; a client that only writes would fill both sockets."""
    wire.unbind()
    wire.configure(UNROUTED="raise", CONFIRM_TIMEOUT=10)
    with pytest.raises(PublishError) as caught:
        publish_many(NAME, [{"text": "x" * 500_000}] * 60)
    assert len(caught.value.errors) == 60
    assert len(wire.pool._idle) == 1


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


def test_a_cancelled_coroutine_leaves_the_pool_as_it_was(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(declarations, "events", [])
    order_created = event(NAME)(lambda order_id: None)
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
