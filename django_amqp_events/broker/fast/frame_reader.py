"""Read a connection in large pieces, for the fast path ``reads``.

For one delivery, py-amqp makes a dozen system calls: it reads the head, the payload and the last
byte of each frame, and sets a time-out before and after each. Here everything that has arrived is
read at once. A complete delivery in the usual three frames goes straight to its consumer; all other
frames, also of other channels, go to py-amqp. Frames:
https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class
from typing import Any, Final

from amqp import Channel
from amqp.exceptions import RecoverableConnectionError, UnexpectedFrame
from amqp.transport import TCPTransport

from ..delivery_headers import (
    DELIVER,
    HEADER,
    METHOD,
    HeaderReader,
)

_BODY: Final = 3
_END: Final = 0xCE
#: Size of type, channel and size, which come before a frame's payload; one byte comes after it.
_HEAD: Final = 7
_unpack_head: Final = Struct(">BHI").unpack_from
#: Class and body size, which come before the properties of a content header (at least 2 bytes).
_unpack_content: Final = Struct(">HxxQ").unpack_from
_CONTENT: Final = 14
_BASIC: Final = 60
#: Delivery tag, redelivered, and the length of the exchange's name.
_unpack_deliver: Final = Struct(">QBB").unpack_from
#: Largest read in bytes.
PIECE: Final = 65536
#: Largest number of cached texts: publishers may invent routing keys.
_REMEMBERED: Final = 1024
#: Errors after which the connection is still open, as in py-amqp. TLS reports ENOENT without data.
_NOTHING_YET: Final = (errno.EAGAIN, errno.EINTR, errno.ENOENT)


class Delivered:
    """The part of ``amqp.Message`` that a consumer uses."""

    __slots__ = ("body", "delivery_info", "delivery_tag")

    def __init__(self, delivery_info: dict[str, Any], body: bytes) -> None:
        self.delivery_tag: int = delivery_info["delivery_tag"]
        self.delivery_info = delivery_info
        self.body = body


class PartialError(Exception):
    """The rest of a frame or delivery has not arrived yet."""


class Wakeup:
    """Wakes an event loop for its next turn.

    A timer does not work: after ten that are due at once, kombu polls for a second, and it only
    logs what a timer raises.
    """

    def __init__(self, hub: Any, answer: Callable[[], None]) -> None:
        self._hub = hub
        self._answer = answer
        self._rung = False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        hub.add_reader(self._reading, self._on_rung)

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            os.write(self._writing, b".")

    def close(self) -> None:
        self._hub.remove(self._reading)
        os.close(self._reading)
        os.close(self._writing)

    def _on_rung(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._reading, 1)
        self._rung = False
        self._answer()


class FrameReader:
    """Replaces ``blocking_read`` of a connection, in the thread that reads it anyway.

    Args:
        channel: an open channel of the connection that only consumes.
        frames: the reader of that channel's properties.
        hub: kombu's event loop that polls the connection, if one does: it cannot see what was read
            from the socket and is not used yet.
        several: whether one call of ``drain_events`` delivers everything that has arrived, or one
            message: a pool that handles it at once must return to the event loop.
    """

    def __init__(
        self,
        channel: Channel,
        frames: HeaderReader,
        *,
        hub: Any = None,
        several: bool = False,
    ) -> None:
        connection = channel.connection
        self._connection = connection
        self._channel = channel
        self._number = channel.channel_id
        self._frames = frames
        # py-amqp has the beginning of a delivery, so it gets the rest.
        self._begun = False
        self._passed_on = 0
        self._several = several
        self._bell = Wakeup(hub, self._go_on) if hub is not None else None
        self._largest = connection.frame_max - 8
        self._texts: dict[bytes, str] = {}
        # What py-amqp has read already comes first.
        self._transport = connection.transport
        self._buffer: bytes = self._transport._read_buffer  # noqa: SLF001 - in amqp_internals
        self._transport._read_buffer = b""  # noqa: SLF001
        self._at = 0
        self._plain = isinstance(self._transport, TCPTransport)
        # A short piece was everything: then an event loop that reads again gets an immediate
        # TimeoutError, since its poll shows whether there is more.
        self._empty = False
        connection.blocking_read = self.read

    def read(self, timeout: float | None = None) -> bool:
        """Handle the next frames, in place of py-amqp's ``Connection.blocking_read``.

        Args:
            timeout: seconds to wait for data; ``None``: forever.

        Returns:
            whether a method is complete, with its content.

        Raises:
            TimeoutError: nothing arrived in time.
            OSError: the connection is lost.
            amqp.exceptions.RecoverableConnectionError: it was closed by this process.
            amqp.exceptions.UnexpectedFrame: the data is not a frame.
        """
        while True:
            try:
                complete = self._deliver() or self._pass_on()
            except PartialError:
                # The rest will arrive at the socket, also for an event loop that polls it.
                self._receive(timeout)
                continue
            except Exception:
                self._ask()
                raise
            self._ask()
            return complete

    def close(self) -> None:
        """Unregister from the event loop; the connection is lost or about to close."""
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def _ask(self) -> None:
        """Have the rest handled in the next turn, such as frames behind an answer or error."""
        if self._bell is None or self._at == len(self._buffer):
            return
        try:
            self._frame(self._at)
        except PartialError:
            return
        except UnexpectedFrame:
            pass  # raised when it is read
        self._bell.ring()

    def _go_on(self) -> None:
        if self._at < len(self._buffer) and not self._closed:
            with suppress(TimeoutError):
                self._connection.drain_events(timeout=0)

    @property
    def _closed(self) -> bool:
        # The property would connect.
        return self._connection._transport is not self._transport  # noqa: SLF001

    def _pass_on(self) -> bool:
        """Pass a frame to py-amqp; return True if it completes a method.

        Raises:
            PartialError: there is no complete frame.
        """
        kind, channel, start, end = self._frame(self._at)
        payload = self._buffer[start:end]
        self._at = end + 1
        self._passed_on = passed_on = self._passed_on + 1
        complete: bool = self._connection.on_inbound_frame((kind, channel, payload))
        if channel == self._number and passed_on == self._passed_on:  # no nested read
            self._begun = not complete
        return complete

    def _deliver(self) -> bool:
        """Deliver the complete messages that come next; return True if there was one.

        Raises:
            PartialError: the first delivery is not complete.
        """
        channel, found = self._channel, False
        while not self._begun and channel.connection is self._connection and not channel.is_closing:
            try:
                next_one = self._delivery()
            except PartialError:
                if found:
                    break
                raise
            if next_one is None:
                break
            delivered, header, behind = next_one
            callback = channel.callbacks.get(delivered.delivery_info["consumer_tag"])
            if callback is None:
                break
            # Before the callback, which may read from this connection.
            self._at, self._frames.header = behind, header
            # py-amqp counts frames here, for its heartbeats.
            self._connection.bytes_recv += 3 if delivered.body else 2
            callback(delivered)
            found = True
            if not self._several:
                break
        return found

    def _delivery(self) -> tuple[Delivered, bytes, int] | None:
        """Read a delivery in three frames, or in two without a body.

        Returns:
            the delivery, its content header, and the position of the next frame; ``None`` if
            something else comes next, or anything unusual, which py-amqp handles.

        Raises:
            PartialError: it is not complete.
        """
        number, buffer = self._number, self._buffer
        kind, channel, start, end = self._frame(self._at)
        if kind != METHOD or channel != number or buffer[start : start + 4] != DELIVER:
            return None
        method = buffer[start + 4 : end]
        kind, channel, start, end = self._frame(end + 1)
        if kind != HEADER or channel != number or end - start < _CONTENT:
            return None
        header = buffer[start:end]
        basic, size = _unpack_content(header)
        if basic != _BASIC or size > self._largest:
            return None
        body = b""
        if size:
            kind, channel, start, end = self._frame(end + 1)
            if kind != _BODY or channel != number or end - start != size:
                return None
            body = buffer[start:end]
        info = self._info(method)
        return None if info is None else (Delivered(info, body), header, end + 1)

    def _info(self, method: bytes) -> dict[str, Any] | None:
        """Return the arguments of a usual Basic.Deliver, ``None`` for others."""
        texts = self._texts
        try:
            at = 1 + method[0]
            consumer_tag = method[1:at]
            tag, redelivered, size = _unpack_deliver(method, at)
            start = at + 10
            at = start + size
            exchange = method[start:at]
            routing_key = method[at + 1 :]
            if method[at] != len(routing_key):
                return None
            return {
                "consumer_tag": texts.get(consumer_tag) or self._text(consumer_tag),
                "delivery_tag": tag,
                "redelivered": redelivered & 1 == 1,
                "exchange": texts.get(exchange) or self._text(exchange),
                "routing_key": texts.get(routing_key) or self._text(routing_key),
            }
        except (IndexError, UnicodeDecodeError, StructError):
            return None

    def _text(self, raw: bytes) -> str:
        if len(self._texts) >= _REMEMBERED:
            self._texts.clear()
        text = self._texts[raw] = raw.decode("utf-8", "surrogatepass")
        return text

    def _frame(self, at: int) -> tuple[int, int, int, int]:
        """Return a frame's type and channel, and the start and end of its payload.

        Raises:
            PartialError: it is not complete.
            amqp.exceptions.UnexpectedFrame: its last byte is wrong.
        """
        buffer = self._buffer
        have, start = len(buffer), at + _HEAD
        if have < start:
            raise PartialError
        kind, channel, size = _unpack_head(buffer, at)
        end = start + size
        if have <= end:
            raise PartialError
        if buffer[end] != _END:
            raise UnexpectedFrame(f"a frame ends with {buffer[end]:#04x}, not with {_END:#04x}")
        return kind, channel, start, end

    def _receive(self, timeout: float | None) -> None:
        """Wait for data, and read everything that has arrived, up to :data:`PIECE`."""
        transport = self._transport
        if self._closed:
            raise RecoverableConnectionError("the connection was closed")
        at_once = timeout == 0 and self._plain
        if at_once and self._empty:
            self._empty = False
            raise TimeoutError
        try:
            if at_once and transport.sock.gettimeout() is None:
                # Without switching the socket to non-blocking and back.
                piece: bytes = transport.sock.recv(PIECE, socket.MSG_DONTWAIT)
            else:
                with transport.having_timeout(timeout):
                    piece = transport.sock.recv(PIECE)
        except TimeoutError:
            raise
        except OSError as exc:
            if exc.errno in _NOTHING_YET:
                raise TimeoutError from exc
            transport.connected = False
            raise
        if not piece:
            transport.connected = False
            raise OSError("Server unexpectedly closed connection")
        self._empty = self._bell is not None and self._plain and len(piece) < PIECE
        left = self._buffer[self._at :] if self._at < len(self._buffer) else b""
        self._buffer, self._at = left + piece, 0
