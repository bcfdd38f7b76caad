"""Read a connection in large pieces, for the fast path ``reads``.

For one delivery, py-amqp makes a dozen system calls: it reads the head, the payload and the last
byte of each frame, and sets a time-out before and after each. Here everything that has arrived is
read at once and passed to py-amqp frame by frame. Frames:
https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Any, Final

from amqp import Channel
from amqp.exceptions import RecoverableConnectionError, UnexpectedFrame
from amqp.transport import TCPTransport

from .delivery_reader import DELIVER, METHOD

_END: Final = 0xCE
#: Size of type, channel and size, which come before a frame's payload; one byte comes after it.
_HEAD: Final = 7
_unpack_head: Final = Struct(">BHI").unpack_from
#: Largest read in bytes.
PIECE: Final = 65536
#: Errors after which the connection is still open, as in py-amqp. TLS reports ENOENT without data.
_NOTHING_YET: Final = (errno.EAGAIN, errno.EINTR, errno.ENOENT)


class PartialError(Exception):
    """The rest of a frame has not arrived yet."""


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
        hub: kombu's event loop that polls the connection, if one does: it cannot see what was read
            from the socket and is not used yet.
        several: whether one call of ``drain_events`` delivers everything that has arrived, or one
            message: a pool that handles it at once must return to the event loop.

    Raises:
        OSError: there is no file descriptor to wake the event loop; nothing has changed.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        hub: Any = None,
        several: bool = False,
    ) -> None:
        connection = channel.connection
        self._connection = connection
        self._number = channel.channel_id
        self._several = several
        self._bell = Wakeup(hub, self._go_on) if hub is not None else None
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
            passed = False
            try:
                several = self._several and self._delivery_follows()
                while not self._pass_on():
                    passed = True
                if several:
                    self._pass_on_deliveries()
            except PartialError:
                if passed:
                    # So that the caller can send heartbeats while a large message arrives.
                    return False
                self._receive(timeout)
                continue
            except Exception:
                self._ask()
                raise
            self._ask()
            return True

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
        # Before the call, which may read from this connection.
        self._at = end + 1
        complete: bool = self._connection.on_inbound_frame((kind, channel, payload))
        return complete

    def _pass_on_deliveries(self) -> None:
        """Pass on the deliveries that come next and have arrived."""
        with suppress(PartialError):
            while not self._closed and self._delivery_follows():
                while not self._pass_on():
                    pass

    def _delivery_follows(self) -> bool:
        """Return True if the next frame begins a delivery.

        Raises:
            PartialError: there is no complete frame.
        """
        kind, channel, start, _ = self._frame(self._at)
        deliver = self._buffer[start : start + len(DELIVER)] == DELIVER
        return kind == METHOD and channel == self._number and deliver

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
