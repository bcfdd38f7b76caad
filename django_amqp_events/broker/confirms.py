"""Publish with confirms on a connection of its own."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Final

import amqp
from amqp.serialization import dumps
from celery import Celery
from kombu import Connection

from .. import conf
from ..exceptions import (
    BrokerUnavailableError,
    PublishError,
    PublishInterruptedError,
    PublishNackedError,
    PublishRefusedError,
    UnroutableError,
)
from ..message.types import Message
from .connection import (
    AMQP_ERRORS,
    close_socket,
    connect,
    describe_message,
    message_id_of,
    publish_error,
    unavailable_errors,
)
from .fast.frame_writer import FrameWriter

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
        self._encoder: FrameWriter | None = None
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
        except AMQP_ERRORS as exc:
            raise BrokerUnavailableError(
                f"RabbitMQ gave no channel: {type(exc).__name__}: {exc}; check its log"
            ) from exc
        self._transport.sock.settimeout(self.timeout)
        self._poll = _poll(self._transport.sock)
        if "frames" in conf.load()[0].fast_paths:
            self._encoder = FrameWriter(self._channel.channel_id, self._amqp.frame_max)
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
            except AMQP_ERRORS:
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
            return unavailable_errors(messages, "its connection was given up")
        self._patience, self._deadline = timeout, time.monotonic() + timeout
        try:
            if self._conn is None:
                self._open(timeout)
        except BrokerUnavailableError as exc:
            self.close()
            return unavailable_errors(messages, str(exc))
        except BaseException:
            self.close()
            raise
        if self.blocked:
            return unavailable_errors(
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
        except AMQP_ERRORS as exc:
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
        except AMQP_ERRORS as exc:
            self._results[index] = PublishRefusedError(
                f"{describe_message(message)} cannot be written as an AMQP message: "
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
            key = (message.exchange, message.routing_key, message_id_of(message.properties))
            texts = self._returned.get(key)
            if not texts:
                self._results[index] = None
                continue
            self._results[index] = UnroutableError(
                f"no queue is bound for {describe_message(message)} ({texts.pop()}); "
                f"nobody handles it, "
                f"or a service has yet to run events_declare",
                event_id=message.event_id,
                event_name=message.name,
            )

    def _on_nack(self, delivery_tag: int, multiple: bool) -> None:
        self.broken = True
        for index in self._confirmed(delivery_tag, multiple):
            message = self._messages[index]
            self._results[index] = PublishNackedError(
                f"RabbitMQ refused {describe_message(message)}: a queue is full or unavailable; "
                f"other "
                f"queues may hold it already, so repeat with the same event id",
                event_id=message.event_id,
                event_name=message.name,
            )

    def _on_return(
        self, exc: Exception, exchange: str, routing_key: str, message: amqp.Message
    ) -> None:
        key = (exchange, routing_key, message_id_of(message.properties))
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
                self._results[index] = publish_error(message, exc, self.blocked, alone)
            else:
                self._results[index] = BrokerUnavailableError(
                    f"{describe_message(message)} was not published, because the connection failed "
                    f"on a "
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
            close_socket(self._conn)

    def leave(self) -> None:
        """Close a connection that nothing is wrong with: RabbitMQ logs the others as warnings."""
        if not self.broken and self._amqp is not None:
            with suppress(*AMQP_ERRORS):
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


def _poll(sock: Any) -> Callable[[], object]:
    """Return a function that says whether something can be read at once."""
    try:
        poll = select.poll()
    except AttributeError:  # eventlet takes it away
        return lambda: select.select([sock], [], [], 0)[0]
    # Not select.select, which ends at descriptor 1024.
    poll.register(sock, select.POLLIN)
    return lambda: poll.poll(0)
