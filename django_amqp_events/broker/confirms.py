"""Publish with confirms on a dedicated connection."""

from __future__ import annotations

import os
import select
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Final

import amqp
from amqp import spec
from amqp.exceptions import FrameSyntaxError
from celery import Celery
from kombu import Connection

from ..callables import nothing
from ..exceptions import (
    BrokerUnavailableError,
    PublishError,
    PublishInterruptedError,
    PublishNackedError,
    PublishRefusedError,
)
from ..message.types import Message
from ..reasons import Reason
from .connection import AMQP_ERRORS, close_socket, connect
from .publish_errors import (
    build_error,
    interrupted_error,
    message_id,
    unavailable_errors,
    unroutable_error,
)

#: Largest number of unconfirmed messages on a channel, which bounds their memory.
WINDOW: Final = 1000
#: Seconds to wait for the rest of a frame that has begun to arrive.
REST_OF_FRAME: Final = 0.1
#: Shortest time limit in seconds: 0 would be none.
LEAST: Final = 0.1
#: Longest single wait for confirms in seconds.
SLICE: Final = 0.5
#: Seconds to wait for the closing handshake of an idle connection.
GOODBYE: Final = 0.5
#: Seconds for which a connection is taken for blocked before another one asks whether it is.
BLOCKED_SECONDS: Final = 60.0
#: What no queue gets.
_NOWHERE: Final = Message(
    exchange="", routing_key="amqp-events:nowhere", body=b"", headers={}, properties={}
)


#: What py-amqp raises for a message that it cannot encode.
_UNWRITABLE: Final = (
    FrameSyntaxError, LookupError, TypeError, ValueError, AttributeError, OverflowError,
    RecursionError, struct.error,
)  # fmt: skip

#: Marks a message without an answer.
_NO_ANSWER: Final = PublishInterruptedError("not published yet")


class ConfirmChannel:
    """A connection with one channel in confirm mode, opened by the first publish.

    Not thread-safe. A lost connection is replaced by the next publish.

    Args:
        timeout: seconds for connecting and the first confirm, for any single write, and without
            any further confirm, after which the remaining messages of a publish fail.
    """

    #: Seconds between heartbeats. Nothing would send them while the connection is idle in the pool,
    #: and RabbitMQ's would hide that a confirm does not come. TCP keepalive is on.
    heartbeat = 0

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self._deadline = 0.0
        self._reset()

    def _reset(self) -> None:
        self.pid = os.getpid()
        self.broken = False
        self.blocked = ""
        self._asked = 0.0
        # Returned messages that are not confirmed yet, by exchange, routing key and message id.
        self._returned: Counter[tuple[str, str, str]] = Counter()
        self._unconfirmed: dict[int, int] = {}
        self._results: list[PublishError | None] = []
        self._messages: Sequence[Message] = ()
        self._tag = self._sent = 0
        self._conn: Connection | None = None
        self._amqp: Any = None
        self._transport: Any = None
        self._channel: Any = None
        self._poll: Callable[[], object] = nothing

    def connect(self) -> None:
        """Connect, unless the connection is open and can be used.

        Raises:
            BrokerUnavailableError: no connection, or RabbitMQ blocks publishers.
        """
        self._deadline = time.monotonic() + self.timeout
        if not self.healthy() or self._missed_unblocked():
            self.close()
            self._reset()
        if self._conn is None:
            try:
                self._open()
            except BaseException:
                self.close()
                raise
        if self.blocked:
            raise BrokerUnavailableError(Reason("broker-blocks", blocked=self.blocked))

    def _open(self) -> None:
        self._conn = connect(
            self.app,
            timeout=self.timeout,
            on_blocked=self._on_blocked,
            on_unblocked=self._on_unblocked,
            heartbeat=self.heartbeat,
        )
        self._amqp = self._conn.connection
        self._transport = self._amqp.transport
        try:
            self._limit_answer()
            self._channel = self._amqp.channel()
            self._limit_answer()
            self._channel.confirm_select()
        except AMQP_ERRORS as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise BrokerUnavailableError(Reason("channel-refused", error=error)) from exc
        self._transport.sock.settimeout(self.timeout)
        self._poll = _poll(self._transport.sock)
        self._channel.events["basic_ack"].add(self._on_ack)
        self._channel.events["basic_nack"].add(self._on_nack)
        self._channel.events["basic_return"].add(self._on_return)

    def _limit_answer(self) -> None:
        """Let the next answer come until the deadline."""
        self._transport.sock.settimeout(max(LEAST, self._deadline - time.monotonic()))

    def healthy(self) -> bool:
        """Read what has arrived, such as a close, and return True if the channel can be used."""
        if self.pid != os.getpid():
            self.forget_after_fork()
        elif self._conn is not None and not self.broken:
            try:
                self._read_waiting()
            except AMQP_ERRORS:
                self.close()
        return not self.broken

    def publish(self, messages: Sequence[Message], *, mandatory: bool) -> list[PublishError | None]:
        """Publish messages and wait for their confirms, at most :data:`WINDOW` at a time.

        Args:
            mandatory: report a message that no queue is bound for as unroutable.

        Returns:
            one entry per message, in order: ``None`` if it was confirmed (and, with *mandatory*,
            routed), otherwise its error. Nothing is raised for a single message.
        """
        try:
            self.connect()
        except BrokerUnavailableError as exc:
            return unavailable_errors(messages, exc.reason)
        self._messages = messages
        self._results = [_NO_ANSWER] * len(messages)
        self._unconfirmed, self._returned, self._sent = {}, Counter(), 0
        try:
            for index, message in enumerate(messages):
                self._send(index, message, mandatory)
                if self.blocked:
                    # A blocked broker does not read what is written now.
                    self._await_confirms(0)
                elif len(self._unconfirmed) >= WINDOW:
                    self._await_confirms(WINDOW // 2)
            self._await_confirms(0)
        except AMQP_ERRORS as exc:
            self._give_up(exc)
        except BaseException:
            # A signal or a time limit: whether the unconfirmed messages are stored is unknown.
            self.close()
            raise
        finally:
            results, self._results, self._messages = self._results, [], ()
        return results

    def _send(self, index: int, message: Message, mandatory: bool) -> None:
        """Write a message, or set its error if it cannot be encoded."""
        self._read_waiting()
        # Before the write: if it is interrupted, the message may be stored.
        self._tag += 1
        self._unconfirmed[self._tag], self._sent = index, index + 1
        try:
            content = amqp.Message(
                message.body, application_headers=dict(message.headers), **message.properties
            )
            route = (0, message.exchange, message.routing_key, mandatory, False)
            self._channel.send_method(spec.Basic.Publish, "Bssbb", route, content)
        except _UNWRITABLE as exc:
            # py-amqp encodes a message before it writes any of it.
            del self._unconfirmed[self._tag]
            self._tag -= 1
            error = f"{type(exc).__name__}: {exc}"
            self._results[index] = build_error(
                PublishRefusedError, message, "message-unwritable", error=error
            )

    def _read_waiting(self) -> None:
        """Handle what the broker has sent without waiting for more."""
        with suppress(TimeoutError):
            while self._readable():
                self._amqp.blocking_read(REST_OF_FRAME)

    def _readable(self) -> bool:
        # TLS may have decrypted more than was read.
        pending = getattr(self._transport.sock, "pending", None)
        return bool((pending is not None and pending()) or self._poll())

    def _await_confirms(self, until: int) -> None:
        """Wait until no more than *until* messages are unconfirmed."""
        while len(self._unconfirmed) > until:
            self._before_read()
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                # This process may have stood still, with confirms in its socket.
                self._read_waiting()
                if self._unconfirmed and self._deadline <= time.monotonic():
                    raise TimeoutError(f"no confirm within {self.timeout:g} s")
                continue
            # drain_events restarts its time-out with each part of an answer. After a time-out
            # py-amqp keeps a frame that it has read in part.
            with suppress(TimeoutError):
                self._amqp.blocking_read(min(remaining, SLICE))

    def _before_read(self) -> None:
        """Do nothing; called at least every :data:`SLICE` seconds, for subclasses."""

    def _confirmed(self, delivery_tag: int, multiple: bool) -> list[int]:
        self._deadline = time.monotonic() + self.timeout
        if not multiple:
            index = self._unconfirmed.pop(delivery_tag, None)
            return [] if index is None else [index]
        tags = list(takewhile(lambda tag: tag <= delivery_tag, self._unconfirmed))
        return [self._unconfirmed.pop(tag) for tag in tags]

    def _on_ack(self, delivery_tag: int, multiple: bool) -> None:
        for index in self._confirmed(delivery_tag, multiple):
            message = self._messages[index]
            key = (message.exchange, message.routing_key, message_id(message.properties))
            if not self._returned[key]:
                self._results[index] = None
                continue
            self._returned[key] -= 1
            self._results[index] = unroutable_error(message)

    def _on_nack(self, delivery_tag: int, multiple: bool) -> None:
        self.broken = True
        for index in self._confirmed(delivery_tag, multiple):
            message = self._messages[index]
            self._results[index] = build_error(PublishNackedError, message, "nacked")

    def _on_return(
        self, exc: Exception, exchange: str, routing_key: str, message: amqp.Message
    ) -> None:
        self._returned[exchange, routing_key, message_id(message.properties)] += 1

    def _on_blocked(self, reason: str) -> None:
        self.blocked, self._asked = str(reason) or "resource alarm", time.monotonic()

    def _on_unblocked(self) -> None:
        self.blocked = ""

    def _missed_unblocked(self) -> bool:
        """Return True if RabbitMQ no longer blocks publishers, and this connection was not told.

        It has died, and a proxy or firewall hides that. RabbitMQ reads nothing from a connection
        that it blocks, so another one is asked.
        """
        if not self.blocked or time.monotonic() < self._asked + BLOCKED_SECONDS:
            return False
        self._asked = time.monotonic()
        if not accepts_publishes(self.app, max(LEAST, self._deadline - time.monotonic())):
            return False
        return not self.healthy() or bool(self.blocked)

    def _give_up(self, exc: Exception) -> None:
        """Close the connection, and set the error of every message that has no answer yet."""
        self.close()
        unanswered = [index for index, result in enumerate(self._results) if result is _NO_ANSWER]
        alone = len([index for index in unanswered if index < self._sent]) == 1
        for index in unanswered:
            message = self._messages[index]
            if index < self._sent:
                self._results[index] = interrupted_error(message, exc, self.blocked, alone)
            else:
                self._results[index] = build_error(
                    BrokerUnavailableError, message, "connection-broke-before", error=str(exc)
                )

    def close(self) -> None:
        """Close the connection without a handshake; the channel cannot be used again."""
        if self.pid != os.getpid():
            self.forget_after_fork()
        self.broken = True
        if self._conn is not None:
            close_socket(self._conn)

    def leave(self) -> None:
        """Close the connection with a handshake; RabbitMQ logs a warning for one without."""
        if not self.broken and self._amqp is not None:
            with suppress(*AMQP_ERRORS):
                self._transport.sock.settimeout(GOODBYE)
                self._amqp.close()
        self.close()

    def forget_after_fork(self) -> None:
        """Close the child's copy of the socket without telling the broker.

        A shutdown of the inherited socket would end the parent's connection.
        """
        self.broken = True
        with suppress(AttributeError, OSError):
            sock, self._transport.sock = self._transport.sock, None
            self._transport.connected = False
            os.close(sock.detach())


class _Question(ConfirmChannel):
    """A connection that is closed as soon as RabbitMQ blocks it."""

    # RabbitMQ learns from its own that a blocked connection is closed.
    heartbeat = 10

    def _before_read(self) -> None:
        if self.blocked:
            self._deadline = 0.0


def accepts_publishes(app: Celery, timeout: float) -> bool:
    """Return True if RabbitMQ answers a publish on a new connection."""
    channel = _Question(app, timeout=timeout)
    [error] = channel.publish([_NOWHERE], mandatory=False)
    channel.leave()
    if channel.blocked:
        return False  # RabbitMQ may still confirm the first publish of a connection
    # If RabbitMQ refuses it for lack of permission, RabbitMQ has read it.
    return error is None or isinstance(error, PublishRefusedError)


def _poll(sock: Any) -> Callable[[], object]:
    """Return a function that returns true if the socket has something to read."""
    try:
        poll = select.poll()
    except AttributeError:  # eventlet removes it
        return lambda: select.select([sock], [], [], 0)[0]
    # select.select refuses descriptors from 1024.
    poll.register(sock, select.POLLIN)
    return lambda: poll.poll(0)
