"""Connections to RabbitMQ, and publishing with confirms. The only place that opens a socket.

Facts that this rests on (amqp 5.4): ``basic_publish_confirm`` takes any Ack or Nack on its
channel for its own, so a late confirm would confirm the *next* publish. Here each confirm is
matched by its delivery tag, and a connection on which anything went wrong is never used again.
A Return comes before the Ack of the message that it returns.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import amqp
from amqp import exceptions as amqp_errors
from celery import Celery, current_app
from django.utils.module_loading import import_string
from kombu import Connection

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

logger = logging.getLogger(__name__)

#: Unconfirmed messages on a channel at most, so that a window is bounded in memory.
WINDOW: Final = 1000
#: Connections that wait in the pool for the next publish; more may be in use at a time.
IDLE_CONNECTIONS: Final = 10

_ENCODE_ERRORS = (TypeError, ValueError, KeyError, AttributeError, OverflowError)


def current_celery_app() -> Celery:
    """Return the current Celery app itself: the proxy has another identity in each thread."""
    app: Celery = current_app._get_current_object()  # noqa: SLF001 - Celery has no other way
    return app


def celery_app(settings: Settings) -> Celery:
    """Return the project's Celery app: ``CELERY_APP``, or the current one.

    Raises:
        ConfigurationError: ``CELERY_APP`` cannot be imported or is no Celery app.
    """
    if not settings.celery_app:
        return current_celery_app()
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


def connect(app: Celery, *, timeout: float, **transport_options: Any) -> Connection:
    """Open a connection for writing, each of the broker's addresses tried once.

    Args:
        timeout: seconds for connecting and for any single write.

    Raises:
        BrokerUnavailableError: no address answered, or the login was refused.
    """
    connection: Connection = app.connection_for_write(
        connect_timeout=timeout,
        transport_options={
            # Confirms are matched here, by delivery tag.
            "confirm_publish": False,
            "write_timeout": timeout,
            **transport_options,
        },
    )
    try:
        connection.ensure_connection(
            max_retries=max(1, len(connection.alt or ())),
            interval_start=0,
            interval_step=0,
            reraise_as_library_errors=False,
            timeout=timeout,
        )
    except Exception as exc:
        abandon(connection)
        raise BrokerUnavailableError(
            f"no connection to RabbitMQ at {connection.as_uri()}: {type(exc).__name__}: {exc}; "
            f"check that the broker runs and that the broker URL is right"
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
        conn.collect(socket_timeout=0.1)


class ConfirmChannel:
    """A connection of its own with one channel in confirm mode.

    Not for several threads at once. After :attr:`broken` is set it refuses to be used.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.pid = os.getpid()
        self.broken = False
        self.blocked = ""
        self._returned: dict[str, list[str]] = {}
        self._unconfirmed: dict[int, int] = {}
        self._results: list[PublishError | None] = []
        self._messages: Sequence[Message] = ()
        self._tag = 0
        self._conn = connect(
            app, timeout=timeout, on_blocked=self._on_blocked, on_unblocked=self._on_unblocked
        )
        self._amqp: amqp.Connection = self._conn.connection
        try:
            self._channel = self._amqp.channel()
            self._channel.confirm_select()
        except Exception as exc:
            self.close()
            raise BrokerUnavailableError(
                f"RabbitMQ gave no channel: {type(exc).__name__}: {exc}; check its log"
            ) from exc
        self._channel.events["basic_ack"].add(self._on_ack)
        self._channel.events["basic_nack"].add(self._on_nack)
        self._channel.events["basic_return"].add(self._on_return)

    def healthy(self) -> bool:
        """Read what waits on the socket, such as a close, and say whether it can be used."""
        if self.broken or self.pid != os.getpid():
            return False
        try:
            while select.select([self._amqp.transport.sock], [], [], 0)[0]:
                self._amqp.drain_events(timeout=0.1)
        except TimeoutError:
            pass
        except Exception:
            self.close()
            return False
        return True

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool, timeout: float
    ) -> list[PublishError | None]:
        """Publish and wait for all confirms, :data:`WINDOW` of them under way at a time.

        Args:
            mandatory: report a message that no queue is bound for as unroutable.
            timeout: seconds without any confirm after which the rest is given up.

        Returns:
            one entry per message, in order: ``None`` where it was confirmed (and, with
            *mandatory*, routed), else the error. Nothing is raised for a single message.
        """
        self._messages = messages
        self._results = [_unknown(message, "not published yet") for message in messages]
        self._unconfirmed, self._returned = {}, {}
        if self.blocked:
            return [
                BrokerUnavailableError(
                    f"RabbitMQ blocks publishers ({self.blocked}); {_named(message)} was not "
                    f"published; free memory or disk on the broker",
                    event_id=message.event_id,
                    event_name=message.name,
                )
                for message in messages
            ]
        sent = 0
        try:
            for index, message in enumerate(messages):
                self._send(index, message, mandatory)
                sent = index + 1
                if len(self._unconfirmed) >= WINDOW:
                    self._settle(timeout, WINDOW // 2)
            self._settle(timeout, 0)
        except Exception as exc:
            self._give_up(exc, sent)
        return self._results

    def _send(self, index: int, message: Message, mandatory: bool) -> None:
        raw = amqp.Message(
            message.body, application_headers=dict(message.headers), **dict(message.properties)
        )
        self._tag += 1
        self._unconfirmed[self._tag] = index
        self._channel.basic_publish(
            raw, exchange=message.exchange, routing_key=message.routing_key, mandatory=mandatory
        )

    def _settle(self, timeout: float, until: int) -> None:
        deadline = time.monotonic() + timeout
        waiting = len(self._unconfirmed)
        while len(self._unconfirmed) > until:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"no confirm within {timeout:g} s")
            self._amqp.drain_events(timeout=remaining)
            if len(self._unconfirmed) < waiting:
                waiting = len(self._unconfirmed)
                deadline = time.monotonic() + timeout

    def _confirmed(self, delivery_tag: int, multiple: bool) -> list[int]:
        if not multiple:
            index = self._unconfirmed.pop(delivery_tag, None)
            return [] if index is None else [index]
        tags = [tag for tag in self._unconfirmed if tag <= delivery_tag]
        return [self._unconfirmed.pop(tag) for tag in tags]

    def _on_ack(self, delivery_tag: int, multiple: bool) -> None:
        for index in self._confirmed(delivery_tag, multiple):
            message = self._messages[index]
            texts = self._returned.get(_returned_key(message.properties))
            if not texts:
                self._results[index] = None
                continue
            self._results[index] = UnroutableError(
                f"no queue is bound for {_named(message)} ({texts.pop()}); nobody handles it, "
                f"or a service has yet to run events_declare",
                event_id=message.event_id,
                event_name=message.name,
            )

    def _on_nack(self, delivery_tag: int, multiple: bool) -> None:
        self.broken = True
        for index in self._confirmed(delivery_tag, multiple):
            message = self._messages[index]
            self._results[index] = PublishNackedError(
                f"RabbitMQ refused {_named(message)}: a queue is full or unavailable; other "
                f"queues may hold it already, so repeat with the same event id",
                event_id=message.event_id,
                event_name=message.name,
            )

    def _on_return(
        self, exc: Exception, exchange: str, routing_key: str, message: amqp.Message
    ) -> None:
        key = _returned_key(message.properties)
        self._returned.setdefault(key, []).append(
            f"exchange {exchange!r}, routing key {routing_key!r}"
        )

    def _on_blocked(self, reason: str) -> None:
        self.blocked = str(reason) or "resource alarm"

    def _on_unblocked(self) -> None:
        self.blocked = ""

    def _give_up(self, exc: Exception, sent: int) -> None:
        """Turn an exception into the error of every message that has no answer yet."""
        self.close()
        pending = set(self._unconfirmed.values())
        local = isinstance(exc, _ENCODE_ERRORS) and not isinstance(exc, amqp_errors.AMQPError)
        for index, message in enumerate(self._messages):
            if index in pending:
                self._results[index] = (
                    _unencodable(message, exc)
                    if local and index == sent
                    else _translate(message, exc, self.blocked)
                )
            elif index >= sent:
                self._results[index] = BrokerUnavailableError(
                    f"{_named(message)} was not published, because the connection failed on a "
                    f"message before it: {exc}",
                    event_id=message.event_id,
                    event_name=message.name,
                )

    def close(self) -> None:
        """Give the connection up; it cannot be used again."""
        self.broken = True
        abandon(self._conn)

    def forget_after_fork(self) -> None:
        """Drop the child's copy of the socket without a word to the broker.

        A shutdown of the inherited socket would cut the parent's connection.
        """
        self.broken = True
        with suppress(Exception):
            transport = self._amqp.transport
            sock, transport.sock = transport.sock, None
            transport.connected = False
            os.close(sock.detach())


class PublisherPool:
    """Confirm channels of one process, for any number of threads, safe after a fork."""

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[ConfirmChannel] = []
        self._all: list[ConfirmChannel] = []

    def publish(self, messages: Sequence[Message], *, mandatory: bool) -> list[PublishError | None]:
        """Publish as :meth:`ConfirmChannel.publish` does, on a channel of the pool."""
        try:
            channel = self._acquire()
        except BrokerUnavailableError as exc:
            return [
                BrokerUnavailableError(str(exc), event_id=m.event_id, event_name=m.name)
                for m in messages
            ]
        try:
            return channel.publish(messages, mandatory=mandatory, timeout=self.timeout)
        except BaseException:
            # A signal or time limit in the middle: what is under way is unknown.
            channel.close()
            raise
        finally:
            self._release(channel)

    def _acquire(self) -> ConfirmChannel:
        while True:
            with self._lock:
                channel = self._idle.pop() if self._idle else None
            if channel is None:
                channel = ConfirmChannel(self.app, timeout=self.timeout)
                with self._lock:
                    self._all.append(channel)
                return channel
            if channel.healthy():
                return channel
            self._release(channel)

    def _release(self, channel: ConfirmChannel) -> None:
        with self._lock:
            if not channel.broken and len(self._idle) < IDLE_CONNECTIONS:
                self._idle.append(channel)
                return
            if channel in self._all:
                self._all.remove(channel)
        channel.close()

    def close(self) -> None:
        """Close every idle connection; the pool can be used again afterwards."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._all = [channel for channel in self._all if channel not in idle]
        for channel in idle:
            channel.close()

    def forget_after_fork(self) -> None:
        self._lock = threading.Lock()
        for channel in self._all:
            channel.forget_after_fork()
        self._idle, self._all = [], []


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
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in _pools.values():
        pool.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _named(message: Message) -> str:
    return f"{message.name or message.routing_key!r} ({message.event_id or 'no id'})"


def _returned_key(properties: Any) -> str:
    return str(properties.get("message_id", ""))


def _unknown(message: Message, why: str) -> PublishInterruptedError:
    return PublishInterruptedError(
        f"{_named(message)}: {why}", event_id=message.event_id, event_name=message.name
    )


def _unencodable(message: Message, exc: Exception) -> PublishError:
    return PublishRefusedError(
        f"{_named(message)} cannot be written as an AMQP message: {type(exc).__name__}: {exc}; "
        f"look at its headers",
        event_id=message.event_id,
        event_name=message.name,
    )


def _translate(message: Message, exc: Exception, blocked: str) -> PublishError:
    """Name what an exception says about a message that was on its way."""
    ids = {"event_id": message.event_id, "event_name": message.name}
    what = _named(message)
    if isinstance(exc, (TimeoutError, socket.timeout)):
        why = f" (RabbitMQ blocks publishers: {blocked})" if blocked else ""
        return PublishTimeoutError(
            f"no confirm for {what} in time{why}: it may be stored; repeat with the same event id",
            **ids,
        )
    if isinstance(exc, amqp_errors.NotFound):
        return ExchangeMissingError(
            f"{exc.reply_text}: {what} was not published; run `manage.py events_declare`", **ids
        )
    if isinstance(exc, amqp_errors.PreconditionFailed) and "max" in str(exc.reply_text):
        return MessageTooLargeError(
            f"{exc.reply_text}: {what} was not published; publish a reference to the data", **ids
        )
    code = getattr(exc, "reply_code", None) or getattr(exc, "code", 0)
    if isinstance(exc, amqp_errors.AMQPError) and not isinstance(
        exc, (amqp_errors.RecoverableConnectionError, amqp_errors.ConnectionForced)
    ):
        return PublishRefusedError(
            f"RabbitMQ refused {what} ({code}: {getattr(exc, 'reply_text', '') or exc}); check "
            f"the user's permissions and the broker's log",
            **ids,
        )
    return PublishInterruptedError(
        f"the connection broke before {what} was confirmed ({type(exc).__name__}: {exc}): it "
        f"may be stored; repeat with the same event id",
        **ids,
    )
