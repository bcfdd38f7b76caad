"""A connection that is read in large pieces, for the fast path ``reads``.

py-amqp asks the socket for the seven bytes of a frame's head, then for its payload, then for its
last byte, and sets a time-out before and after each frame: a dozen system calls and four passes
through its state for one delivery. Here whatever has come is read at once, and a delivery that is
there whole, in the three frames that events nearly always have, goes to its consumer without
anything in between. All other frames, of other channels too, go the way they always went. Frames:
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
#: Type, channel and size stand before the payload of a frame, and one byte behind it.
_HEAD: Final = 7
_unpack_head: Final = Struct(">BHI").unpack_from
#: Class and the body's size stand in a content header before the properties, two bytes at least.
_unpack_content: Final = Struct(">HxxQ").unpack_from
_CONTENT: Final = 14
_BASIC: Final = 60
#: Delivery tag, redelivered, and the length of the exchange's name.
_unpack_deliver: Final = Struct(">QBB").unpack_from
#: Bytes that are asked for at a time.
PIECE: Final = 65536
#: Texts that are remembered at most: publishers may make up routing keys.
_REMEMBERED: Final = 1024
#: As for py-amqp, the connection is still one after these. TLS calls a lack of data ENOENT.
_NOTHING_YET: Final = (errno.EAGAIN, errno.EINTR, errno.ENOENT)


class Delivered:
    """The part of ``amqp.Message`` that a consumer reads."""

    __slots__ = ("body", "delivery_info", "delivery_tag")

    def __init__(self, delivery_info: dict[str, Any], body: bytes) -> None:
        self.delivery_tag: int = delivery_info["delivery_tag"]
        self.delivery_info = delivery_info
        self.body = body


class PartialError(Exception):
    """The rest of a delivery has not come yet."""


class Wakeup:
    """Wakes an event loop for its next turn.

    A timer would not: ten that are due at once end kombu's turn with a poll of a second, and what a
    timer raises is only logged.
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
    """Reads a connection from now on, in the thread that reads it anyway.

    Args:
        channel: an open channel of it that does nothing but consume.
        frames: what reads that channel's frames.
        hub: kombu's event loop that polls the connection, if one does: what was read and not used
            yet is not seen at the socket.
        several: whether one call of ``drain_events`` hands over all deliveries that have come, or
            one: who handles an event at once looks up in between.
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
        # py-amqp has got the beginning of a delivery, and gets the rest.
        self._begun = False
        self._passed_on = 0
        self._several = several
        self._bell = Wakeup(hub, self._go_on) if hub is not None else None
        self._largest = connection.frame_max - 8
        self._texts: dict[bytes, str] = {}
        # What py-amqp has read and not used yet comes first.
        self._transport = connection.transport
        self._buffer: bytes = self._transport._read_buffer  # noqa: SLF001 - py-amqp's own
        self._transport._read_buffer = b""  # noqa: SLF001
        self._at = 0
        self._plain = isinstance(self._transport, TCPTransport)
        # A short piece was all there was: an event loop's question whether there is more is
        # answered without looking, since its poll says so anyway.
        self._empty = False
        connection.blocking_read = self.read

    def read(self, timeout: float | None = None) -> bool:
        """Deal with what comes next, in place of py-amqp's ``Connection.blocking_read``.

        Args:
            timeout: seconds to wait for something to come; ``None``: for ever.

        Returns:
            whether a method is complete, with its content.

        Raises:
            TimeoutError: nothing came in time.
            OSError: the connection is lost.
            amqp.exceptions.RecoverableConnectionError: it was closed here.
            amqp.exceptions.UnexpectedFrame: what came is no frame.
        """
        while True:
            try:
                complete = self._deliver() or self._pass_on()
            except PartialError:
                # The rest will show at the socket, whoever waits for it there.
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
        """Have what is left used in the next turn, such as what came behind an answer or error."""
        if self._bell is None or self._at == len(self._buffer):
            return
        try:
            self._frame(self._at)
        except PartialError:
            return
        except UnexpectedFrame:
            pass  # who reads it will say so
        self._bell.ring()

    def _go_on(self) -> None:
        if self._at < len(self._buffer) and not self._closed:
            with suppress(TimeoutError):
                self._connection.drain_events(timeout=0)

    @property
    def _closed(self) -> bool:
        # Not by the property, which would connect.
        return self._connection._transport is not self._transport  # noqa: SLF001

    def _pass_on(self) -> bool:
        """Pass one frame on to py-amqp, and say whether a method is complete with it.

        Raises:
            PartialError: there is no whole one.
        """
        kind, channel, start, end = self._frame(self._at)
        payload = self._buffer[start:end]
        self._at = end + 1
        self._passed_on = passed_on = self._passed_on + 1
        complete: bool = self._connection.on_inbound_frame((kind, channel, payload))
        if channel == self._number and passed_on == self._passed_on:  # nobody has read on in there
            self._begun = not complete
        return complete

    def _deliver(self) -> bool:
        """Hand over deliveries that are whole and come next, and say whether there was one.

        Raises:
            PartialError: what comes next is a part of one, and there was none before.
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
            # Whoever gets it may read on in there: it is no longer in the buffer.
            self._at, self._frames.header = behind, header
            # Frames, in fact: for those who watch the heartbeats.
            self._connection.bytes_recv += 3 if delivered.body else 2
            callback(delivered)
            found = True
            if not self._several:
                break
        return found

    def _delivery(self) -> tuple[Delivered, bytes, int] | None:
        """Read a delivery in three frames, or in two without a body.

        Returns:
            it, its content header, and where the next frame begins; ``None`` where something else
            comes next, or there is anything unusual about it, which py-amqp deals with.

        Raises:
            PartialError: not all of it is here.
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
        """Read the arguments of Basic.Deliver, as far as they are usual."""
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
        """Return type and channel of a frame, and where its payload begins and ends.

        Raises:
            PartialError: not all of it is here.
            amqp.exceptions.UnexpectedFrame: it does not end as a frame does.
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
        """Wait for more, and take all that there is, up to a piece."""
        transport = self._transport
        if self._closed:
            raise RecoverableConnectionError("the connection was closed")
        at_once = timeout == 0 and self._plain
        if at_once and self._empty:
            self._empty = False
            raise TimeoutError
        try:
            if at_once and transport.sock.gettimeout() is None:
                # As the socket is, not made non-blocking and blocking again for each piece.
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
