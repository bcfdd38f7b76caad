"""Connections to RabbitMQ, and publishing with confirms. The only place that opens a socket.

Facts that this rests on (amqp 5.4): ``basic_publish_confirm`` takes any Ack or Nack on its
channel for its own, so a late confirm would confirm the *next* publish. Here each confirm is
matched by its delivery tag, and a connection on which anything went wrong is never used again.
A Return comes before the Ack of the message that it returns.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any, Final

import amqp
from amqp import exceptions as amqp_errors
from amqp.serialization import dumps
from celery import Celery, current_app
from django.utils.module_loading import import_string
from kombu import Connection

from . import conf
from .conf import Settings
from .envelope import Message
from .exceptions import (
    BrokerUnavailableError,
    ConfigurationError,
    ExchangeMissingError,
    MessageTooLargeError,
    PublishError,
    PublishInterruptedError,
    PublishNackedError,
    PublishRefusedError,
    PublishTimeoutError,
    UnroutableError,
)
from .wire import Encoder

logger = logging.getLogger(__name__)

#: Unconfirmed messages on a channel at most, so that a window is bounded in memory.
WINDOW: Final = 1000
#: Bytes that are written to the socket together, with the fast path "frames".
GATHER: Final = 64 * 1024
#: Seconds for the rest of a frame of which the beginning is here.
REST_OF_FRAME: Final = 0.1
#: Seconds that the broker has to say goodbye, at exit for each idle connection.
GOODBYE: Final = 0.5

#: Stands for an answer that is not here yet.
_NO_ANSWER: Final = PublishInterruptedError("not published yet")

#: What py-amqp and the sockets below it raise. Anything else comes from elsewhere, such as
#: Celery's SoftTimeLimitExceeded out of a signal handler, and is not the broker's failure.
_AMQP_ERRORS = (
    amqp_errors.AMQPError,
    OSError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    struct.error,
)
#: The broker's answers that blame the publish itself; it took nothing of it.
_REFUSALS = (
    amqp_errors.AccessRefused,
    amqp_errors.PreconditionFailed,
    amqp_errors.ContentTooLarge,
    amqp_errors.ResourceLocked,
    amqp_errors.FrameError,
    amqp_errors.FrameSyntaxError,
    amqp_errors.NotAllowed,
    amqp_errors.AMQPNotImplementedError,
)


def current_celery_app() -> Celery:
    """Return the current Celery app itself: the proxy has another identity in each thread."""
    app: Celery = current_app._get_current_object()  # noqa: SLF001 - Celery has no other way
    return app


def is_fallback(app: Celery) -> bool:
    """Say whether *app* is the one that Celery makes when a project has made none.

    It is made by ``celery._state._get_current_app`` as ``Celery("default",
    set_as_current=False)``; both are public attributes.
    """
    return bool(app.main == "default" and not app.set_as_current)


def celery_app(settings: Settings) -> Celery:
    """Return the project's Celery app: ``CELERY_APP``, or the current one.

    Raises:
        ConfigurationError: ``CELERY_APP`` cannot be imported or is no Celery app, or there is
            no current one: Celery would make one of its own, with a broker on localhost.
    """
    if not settings.celery_app:
        app = current_celery_app()
        if is_fallback(app):
            raise ConfigurationError(
                "there is no current Celery app in this thread, so the broker is not known; "
                "import the project's app in its __init__.py and make it the default "
                '(app.set_default()), or name it: AMQP_EVENTS["CELERY_APP"] = "project.celery.app"'
            )
        return app
    try:
        app = import_string(settings.celery_app)
    except ImportError as exc:
        raise ConfigurationError(
            f'AMQP_EVENTS["CELERY_APP"] is {settings.celery_app!r}, which cannot be imported: '
            f"{exc}; give the dotted path of the Celery app"
        ) from exc
    if not isinstance(app, Celery):
        raise ConfigurationError(
            f'AMQP_EVENTS["CELERY_APP"] is {settings.celery_app!r}, a '
            f"{type(app).__name__}; give the dotted path of the Celery app"
        )
    return app


def urls(option: str | Sequence[str] | None) -> Sequence[str]:
    """Return the brokers that a URL option of Celery names, at least one: ``""`` is the default."""
    return option.split(";") if isinstance(option, str) else option or [""]


def unconnected(app: Celery, **options: Any) -> Connection:
    """Return a connection for writing that is not open yet.

    Raises:
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    try:
        connection: Connection = app.connection_for_write(**options)
        driver = connection.transport.driver_name
    except Exception as exc:
        # kombu imports the transport here, and says AttributeError where its library is missing.
        raise ConfigurationError(
            f"the transport of the broker URL cannot be used ({type(exc).__name__}: {exc}); events "
            f"need RabbitMQ (amqp://…) and py-amqp"
        ) from exc
    if driver != "py-amqp":
        raise ConfigurationError(
            f"the broker URL is {connection.as_uri()}; events need RabbitMQ (amqp://…) and py-amqp"
        )
    return connection


def refusal(exc: BaseException) -> str | None:
    """Say why RabbitMQ does not let somebody in and what to do, ``None`` if it is not that."""
    if isinstance(exc, amqp_errors.AccessRefused):
        return (
            "RabbitMQ refuses the login; check user and password in the broker URL, and that the "
            "user may log in from this machine (guest may from localhost alone)"
        )
    if isinstance(exc, amqp_errors.NotAllowed):
        return (
            "RabbitMQ does not open the vhost; check its name in the broker URL, that there is "
            "one, that the user has permissions on it, and that no limit of connections is reached"
        )
    return None


def connect(app: Celery, *, timeout: float, **transport_options: Any) -> Connection:
    """Open a connection for writing, each of the broker's addresses tried once.

    Args:
        timeout: seconds for connecting, shared by the addresses, and for any single read or
            write afterwards.

    Raises:
        BrokerUnavailableError: no address answered, or the login was refused.
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    options: dict[str, Any] = {
        # Confirms are matched here, by delivery tag.
        "confirm_publish": False,
        "write_timeout": timeout,
        **transport_options,
    }
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # py-amqp sets one second: a broker that reads nothing for longer would lose connections.
        options["socket_settings"] = {
            socket.TCP_USER_TIMEOUT: int(timeout * 1000),
            **(app.conf.broker_transport_options.get("socket_settings") or {}),
        }
    addresses = len(urls(app.conf.broker_write_url))
    connection = unconnected(app, connect_timeout=timeout / addresses, transport_options=options)
    try:
        connection.ensure_connection(
            max_retries=addresses - 1,
            interval_start=0,
            interval_step=0,
            reraise_as_library_errors=False,
            timeout=timeout,
        )
        # py-amqp waits for ever for answers such as that to opening a channel.
        connection.connection.transport.sock.settimeout(timeout)
    except _AMQP_ERRORS as exc:
        abandon(connection)
        raise BrokerUnavailableError(
            f"no connection to RabbitMQ at {connection.as_uri()}: {type(exc).__name__}: {exc}; "
            f"{refusal(exc) or 'check that the broker runs and that the broker URL is right'}"
        ) from exc
    return connection


@contextmanager
def connection(app: Celery, *, timeout: float) -> Iterator[Connection]:
    """Open a connection for the time of a block."""
    conn = connect(app, timeout=timeout)
    try:
        yield conn
    finally:
        abandon(conn)


def abandon(conn: Connection) -> None:
    """Close the socket without the closing handshake, which could wait for a dead broker."""
    with suppress(Exception):
        if conn.connected:
            # TLS has a closing handshake as well.
            conn.connection.transport.sock.settimeout(0)
    with suppress(Exception):
        conn.collect()


class ConfirmChannel:
    """A connection of its own with one channel in confirm mode, opened by the first publish.

    Not for several threads at once. After :attr:`broken` is set it refuses to be used.

    Args:
        timeout: seconds for any single read or write.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self.pid = os.getpid()
        self.broken = False
        self.blocked = ""
        self._returned: dict[tuple[str, str, str], list[str]] = {}
        self._unconfirmed: dict[int, int] = {}
        self._results: list[PublishError | None] = []
        self._messages: Sequence[Message] = ()
        self._tag = self._sent = 0
        self._encoder: Encoder | None = None
        # Frames that are not written yet, by the message's index, and their bytes.
        self._unwritten: list[tuple[int, bytes]] = []
        self._gathered = 0
        self._patience = self._deadline = 0.0
        self._conn: Connection | None = None
        self._amqp: Any = None
        self._transport: Any = None
        self._channel: Any = None
        self._poll: Callable[[], object] = bool

    def _open(self, timeout: float) -> None:
        self._conn = connect(
            self.app,
            timeout=timeout,
            on_blocked=self._on_blocked,
            on_unblocked=self._on_unblocked,
            # Nobody would send them while the connection waits in the pool, and those of the
            # broker would look like life while a confirm does not come. TCP's keepalive is on.
            heartbeat=0,
        )
        self._amqp = self._conn.connection
        self._transport = self._amqp.transport
        try:
            self._channel = self._amqp.channel()
            self._channel.confirm_select()
        except _AMQP_ERRORS as exc:
            raise BrokerUnavailableError(
                f"RabbitMQ gave no channel: {type(exc).__name__}: {exc}; check its log"
            ) from exc
        self._transport.sock.settimeout(self.timeout)
        self._poll = _poll(self._transport.sock)
        if "frames" in conf.load()[0].fast_paths:
            self._encoder = Encoder(self._channel.channel_id, self._amqp.frame_max)
        self._channel.events["basic_ack"].add(self._on_ack)
        self._channel.events["basic_nack"].add(self._on_nack)
        self._channel.events["basic_return"].add(self._on_return)

    def healthy(self) -> bool:
        """Read what waits on the socket, such as a close, and say whether it can be used."""
        if self.pid != os.getpid():
            self.forget_after_fork()
        elif self._conn is not None and not self.broken:
            try:
                self._read_waiting()
            except _AMQP_ERRORS:
                self.close()
        return not self.broken

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool, timeout: float
    ) -> list[PublishError | None]:
        """Publish and wait for all confirms, :data:`WINDOW` of them under way at a time.

        Args:
            mandatory: report a message that no queue is bound for as unroutable.
            timeout: seconds without any confirm, connecting included, after which the rest is
                given up.

        Returns:
            one entry per message, in order: ``None`` where it was confirmed (and, with
            *mandatory*, routed), else the error. Nothing is raised for a single message.
        """
        if self.broken:
            return _unavailable(messages, "its connection was given up")
        self._patience, self._deadline = timeout, time.monotonic() + timeout
        try:
            if self._conn is None:
                self._open(timeout)
        except BrokerUnavailableError as exc:
            self.close()
            return _unavailable(messages, str(exc))
        except BaseException:
            self.close()
            raise
        if self.blocked:
            return _unavailable(
                messages,
                f"RabbitMQ blocks publishers ({self.blocked}); free memory or disk on the broker",
            )
        self._messages = messages
        self._results = [_NO_ANSWER] * len(messages)
        self._unconfirmed, self._returned, self._sent = {}, {}, 0
        try:
            for index, message in enumerate(messages):
                self._send(index, message, mandatory)
                if self.blocked:
                    # What is written now lies before a broker that does not read.
                    self._flush()
                    self._settle(0)
                elif len(self._unconfirmed) + len(self._unwritten) >= WINDOW:
                    self._flush()
                    self._settle(WINDOW // 2)
            self._flush()
            self._settle(0)
        except _AMQP_ERRORS as exc:
            self._give_up(exc)
        except BaseException:
            # A signal or a time limit in the middle: what is under way is unknown.
            self.close()
            raise
        finally:
            results, self._results, self._messages = self._results, [], ()
            self._unwritten, self._gathered = [], 0
        return results

    def _send(self, index: int, message: Message, mandatory: bool) -> None:
        """Write a message, or keep it for a write that it shares with others."""
        if self._encoder is not None:
            frames = self._encoder.frames(message, mandatory=mandatory)
            if frames is not None:
                self._unwritten.append((index, frames))
                self._gathered += len(frames)
                # The first one does not wait: the broker has something to do meanwhile.
                if self._gathered >= GATHER or not self._unconfirmed:
                    self._flush()
                return
            self._flush()
        raw = self._encode(index, message)
        if raw is None:
            return
        self._read_waiting()
        self._expect(index)
        # Not basic_publish, which reads first, and spins where half a frame is all there is.
        self._channel.send_method(
            amqp.spec.Basic.Publish,
            "Bssbb",
            (0, message.exchange, message.routing_key, mandatory, False),
            raw,
        )

    def _flush(self) -> None:
        """Write what was kept, with one system call; to a broker that is blocked one by one."""
        while self._unwritten:
            self._read_waiting()
            number = 1 if self.blocked else len(self._unwritten)
            batch, self._unwritten = self._unwritten[:number], self._unwritten[number:]
            self._gathered = 0
            # Before the write: where it ends in the middle, nothing is known of any of them.
            for index, _ in batch:
                self._expect(index)
            self._transport.write(b"".join([frames for _, frames in batch]))
            if self.blocked:
                self._settle(0)

    def _expect(self, index: int) -> None:
        """Note that from now on the broker may have this message."""
        self._tag += 1
        self._unconfirmed[self._tag] = index
        self._sent = index + 1

    def _encode(self, index: int, message: Message) -> amqp.Message | None:
        """Build the message, or note that it cannot be written, before a byte of it is."""
        try:
            raw = amqp.Message(
                message.body, application_headers=dict(message.headers), **dict(message.properties)
            )
            properties = raw._serialize_properties()  # noqa: SLF001 - py-amqp has no other way
            raw._serialize_properties = lambda: properties  # noqa: SLF001 - once is enough
            dumps("ss", (message.exchange, message.routing_key))
            # They have to fit in one frame; RabbitMQ closes the connection over a larger one.
            if len(properties) > self._amqp.frame_max - 64:
                raise ValueError(f"headers and properties take {len(properties)} bytes")
        except _AMQP_ERRORS as exc:
            self._results[index] = PublishRefusedError(
                f"{named(message)} cannot be written as an AMQP message: "
                f"{type(exc).__name__}: {exc}; look at its headers",
                event_id=message.event_id,
                event_name=message.name,
            )
            return None
        return raw

    def _read_waiting(self) -> None:
        """Handle what the broker has sent, without waiting for more."""
        with suppress(TimeoutError):
            while self._readable():
                self._amqp.blocking_read(REST_OF_FRAME)

    def _readable(self) -> bool:
        # TLS may have decrypted more than was asked for.
        pending = getattr(self._transport.sock, "pending", None)
        return bool((pending is not None and pending()) or self._poll())

    def _settle(self, until: int) -> None:
        """Wait until no more than *until* messages are unconfirmed."""
        while len(self._unconfirmed) > until:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"no confirm within {self._patience:g} s")
            # Not drain_events: it begins its time-out anew with every half of an answer.
            self._amqp.blocking_read(remaining)

    def _confirmed(self, delivery_tag: int, multiple: bool) -> list[int]:
        self._deadline = time.monotonic() + self._patience
        if not multiple:
            index = self._unconfirmed.pop(delivery_tag, None)
            return [] if index is None else [index]
        tags = list(takewhile(lambda tag: tag <= delivery_tag, self._unconfirmed))
        return [self._unconfirmed.pop(tag) for tag in tags]

    def _on_ack(self, delivery_tag: int, multiple: bool) -> None:
        for index in self._confirmed(delivery_tag, multiple):
            if not self._returned:
                self._results[index] = None
                continue
            message = self._messages[index]
            key = (message.exchange, message.routing_key, _message_id(message.properties))
            texts = self._returned.get(key)
            if not texts:
                self._results[index] = None
                continue
            self._results[index] = UnroutableError(
                f"no queue is bound for {named(message)} ({texts.pop()}); nobody handles it, "
                f"or a service has yet to run events_declare",
                event_id=message.event_id,
                event_name=message.name,
            )

    def _on_nack(self, delivery_tag: int, multiple: bool) -> None:
        self.broken = True
        for index in self._confirmed(delivery_tag, multiple):
            message = self._messages[index]
            self._results[index] = PublishNackedError(
                f"RabbitMQ refused {named(message)}: a queue is full or unavailable; other "
                f"queues may hold it already, so repeat with the same event id",
                event_id=message.event_id,
                event_name=message.name,
            )

    def _on_return(
        self, exc: Exception, exchange: str, routing_key: str, message: amqp.Message
    ) -> None:
        key = (exchange, routing_key, _message_id(message.properties))
        self._returned.setdefault(key, []).append(
            f"exchange {exchange!r}, routing key {routing_key!r}"
        )

    def _on_blocked(self, reason: str) -> None:
        self.blocked = str(reason) or "resource alarm"

    def _on_unblocked(self) -> None:
        self.blocked = ""

    def _give_up(self, exc: Exception) -> None:
        """Turn an exception into the error of every message that has no answer yet."""
        self.close()
        unanswered = [index for index, result in enumerate(self._results) if result is _NO_ANSWER]
        alone = sum(index < self._sent for index in unanswered) == 1
        for index in unanswered:
            message = self._messages[index]
            if index < self._sent:
                self._results[index] = _translate(message, exc, self.blocked, alone)
            else:
                self._results[index] = BrokerUnavailableError(
                    f"{named(message)} was not published, because the connection failed on a "
                    f"message before it: {exc}",
                    event_id=message.event_id,
                    event_name=message.name,
                )

    def close(self) -> None:
        """Give the connection up; it cannot be used again."""
        if self.pid != os.getpid():
            self.forget_after_fork()
        self.broken = True
        if self._conn is not None:
            abandon(self._conn)

    def leave(self) -> None:
        """Close a connection that nothing is wrong with: RabbitMQ logs the others as warnings."""
        if not self.broken and self._amqp is not None:
            with suppress(*_AMQP_ERRORS):
                self._transport.sock.settimeout(GOODBYE)
                self._amqp.close()
        self.close()

    def forget_after_fork(self) -> None:
        """Drop the child's copy of the socket without a word to the broker.

        A shutdown of the inherited socket would cut the parent's connection.
        """
        self.broken = True
        with suppress(AttributeError, OSError):
            sock, self._transport.sock = self._transport.sock, None
            self._transport.connected = False
            os.close(sock.detach())


class PublisherPool:
    """Confirm channels of one process, for any number of threads, safe after a fork.

    At most Celery's ``broker_pool_limit`` connections are open at a time, so that a web server
    with a hundred threads does not storm the broker. As in Celery, ``None`` and 0 mean no limit
    and a connection for every use.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self.limit: int = app.conf.broker_pool_limit or 0
        # Reentrant: a signal handler may publish while its thread is in here.
        self._changed = threading.Condition()
        self._idle: list[ConfirmChannel] = []
        # Weak: one that an exception out of a signal handler made us lose takes no place.
        self._all: weakref.WeakSet[ConfirmChannel] = weakref.WeakSet()

    def publish(self, messages: Sequence[Message], *, mandatory: bool) -> list[PublishError | None]:
        """Publish as :meth:`ConfirmChannel.publish` does, on a channel of the pool.

        Waits at most ``timeout`` seconds for a connection to become free.
        """
        if not messages:
            return []
        channel = self._acquire()
        if channel is None:
            return _unavailable(
                messages,
                f"all {self.limit} connections to RabbitMQ were busy for {self.timeout:g} s; "
                f"raise Celery's broker_pool_limit, or look why the broker is slow",
            )
        try:
            return channel.publish(messages, mandatory=mandatory, timeout=self.timeout)
        finally:
            self._release(channel)

    def _acquire(self) -> ConfirmChannel | None:
        deadline = time.monotonic() + self.timeout
        while True:
            with self._changed:
                while not self._idle and self.limit and len(self._all) >= self.limit:
                    if not self._changed.wait(deadline - time.monotonic()):
                        return None
                if not self._idle:
                    channel = ConfirmChannel(self.app, timeout=self.timeout)
                    self._all.add(channel)
                    return channel
                channel = self._idle.pop()
            if channel.healthy():
                return channel
            self._release(channel)

    def _release(self, channel: ConfirmChannel) -> None:
        keep = self.limit and not channel.broken
        if not keep:
            channel.leave()
        with self._changed:
            if keep:
                self._idle.append(channel)
            else:
                self._all.discard(channel)
            self._changed.notify()

    def close(self) -> None:
        """Close every idle connection; the pool can be used again afterwards."""
        with self._changed:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.leave()
        with self._changed:
            self._all.difference_update(idle)
            self._changed.notify_all()

    def forget_after_fork(self) -> None:
        """Start anew in a child process."""
        for channel in self._all:
            channel.forget_after_fork()
        self._changed = threading.Condition()
        self._idle, self._all = [], weakref.WeakSet()


_pools: dict[tuple[int, float], PublisherPool] = {}
_pools_lock = threading.Lock()


def publisher_pool(settings: Settings) -> PublisherPool:
    """Return this process's pool for the project's Celery app."""
    app = celery_app(settings)
    key = (id(app), settings.confirm_timeout)
    pool = _pools.get(key)
    if pool is None or pool.app is not app:
        with _pools_lock:
            pool = _pools.get(key)
            if pool is None or pool.app is not app:
                pool = _pools[key] = PublisherPool(app, timeout=settings.confirm_timeout)
    return pool


def close_pools() -> None:
    """Close the idle publishing connections of this process."""
    for pool in list(_pools.values()):
        pool.close()


def _after_fork_in_child() -> None:
    global _pools_lock  # noqa: PLW0603 - the parent's may be held by a thread that is not here
    _pools_lock = threading.Lock()
    for pool in _pools.values():
        pool.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(close_pools)


def _poll(sock: Any) -> Callable[[], object]:
    """Return a function that says whether something can be read at once."""
    try:
        poll = select.poll()
    except AttributeError:  # eventlet takes it away
        return lambda: select.select([sock], [], [], 0)[0]
    # Not select.select, which ends at descriptor 1024.
    poll.register(sock, select.POLLIN)
    return lambda: poll.poll(0)


def named(message: Message) -> str:
    """Name a message, as the errors of publishing do."""
    return f"{message.name or message.routing_key!r} ({message.event_id or 'no id'})"


def _message_id(properties: Any) -> str:
    return str(properties.get("message_id", ""))


def _unavailable(messages: Sequence[Message], why: str) -> list[PublishError | None]:
    return [
        BrokerUnavailableError(
            f"{named(message)} was not published: {why}",
            event_id=message.event_id,
            event_name=message.name,
        )
        for message in messages
    ]


def _blames(text: str, message: Message, alone: bool) -> bool:
    """Say whether the broker's reply text is about this message, of several under way."""
    if alone:
        return True
    if size := re.search(r"message size \d+ is larger than .*?(\d+)", text):
        return len(message.body) > int(size[1])
    if topic := re.search(r"topic '(.*)' in exchange '(.*)' in", text):
        return (message.routing_key, message.exchange) == topic.groups()
    return f"exchange '{message.exchange}'" in text


def _translate(message: Message, exc: Exception, blocked: str, alone: bool) -> PublishError:
    """Name what an exception says about a message that was on its way.

    Args:
        alone: no other message was; else the exception may be about another one.
    """
    ids = {"event_id": message.event_id, "event_name": message.name}
    what = named(message)
    if isinstance(exc, TimeoutError):
        why = f" (RabbitMQ blocks publishers: {blocked})" if blocked else ""
        return PublishTimeoutError(
            f"no confirm for {what} in time{why}: it may be stored; repeat with the same event id",
            **ids,
        )
    text = str(getattr(exc, "reply_text", "") or exc)
    if isinstance(exc, (amqp_errors.NotFound, *_REFUSALS)) and _blames(text, message, alone):
        if isinstance(exc, amqp_errors.NotFound):
            return ExchangeMissingError(
                f"{text}: {what} was not published; run `manage.py events_declare`, or publish it "
                f"again if EXCHANGE has another name by now",
                **ids,
            )
        if isinstance(exc, amqp_errors.ContentTooLarge) or "message size" in text:
            return MessageTooLargeError(
                f"{text}: {what} was not published; publish a reference to the data", **ids
            )
        return PublishRefusedError(
            f"RabbitMQ refused {what} ({exc.reply_code}: {text}); check the user's permissions "
            f"and the broker's log",
            **ids,
        )
    return PublishInterruptedError(
        f"the connection broke before {what} was confirmed ({type(exc).__name__}: {exc}): it "
        f"may be stored; repeat with the same event id",
        **ids,
    )
