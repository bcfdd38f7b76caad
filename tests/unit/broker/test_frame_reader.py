"""The frame reader reads what py-amqp reads, wherever a piece ends."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from struct import pack
from typing import Any

import amqp
import pytest
from amqp.exceptions import NotFound, RecoverableConnectionError, UnexpectedFrame
from amqp.method_framing import frame_handler
from amqp.serialization import dumps
from amqp.spec import Basic, Channel, Queue
from amqp.transport import TCPTransport
from hypothesis import given
from hypothesis import strategies as st

from django_amqp_events.broker.delivery_reader import DeliveryReader
from django_amqp_events.broker.frame_reader import PIECE, FrameReader
from django_amqp_events.message.types import Received

NUMBER, OTHER = 1, 2
TAG = "1:worker:queue"


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method(channel: int, signature: tuple[int, int], form: str, *values: Any) -> bytes:
    return frame(1, channel, pack(">HH", *signature) + dumps(form, values))


def delivery(
    channel: int = NUMBER,
    tag: int = 1,
    *,
    consumer: str = TAG,
    redelivered: bool = False,
    exchange: str = "events",
    key: str = "shop.order",
    headers: dict[str, Any] | None = None,
    body: bytes = b"[]",
    size: int = 100,
) -> list[bytes]:
    """Return the frames of a delivery, with so much of the body in each."""
    content = amqp.Message(b"", application_headers=headers or {})._serialize_properties()
    return [
        method(channel, Basic.Deliver, "sLbss", consumer, tag, redelivered, exchange, key),
        frame(2, channel, pack(">HHQ", 60, 0, len(body)) + content),
        *(frame(3, channel, body[at : at + size]) for at in range(0, len(body), size)),
    ]


class Hub:
    """Of kombu's event loop what is used."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def remove(self, fd: int) -> None:
        del self.readers[fd]

    def turn(self) -> bool:
        """Call the callbacks of readable sockets; return True if there were any."""
        ready, _, _ = select.select(list(self.readers), [], [], 0)
        for fd in ready:
            self.readers[fd]()
        return bool(ready)


class Reading:
    """A connection with a controlled peer, and the messages on its two channels.

    Args:
        ours: whether our reader takes the deliveries of the first channel, or py-amqp.
    """

    def __init__(self, ends: tuple[socket.socket, socket.socket], *, ours: bool = True) -> None:
        mine, self.peer = ends
        self.connection = amqp.Connection()
        transport = TCPTransport("localhost:5672")
        transport.sock = mine
        transport._setup_transport()
        transport.connected = True
        self.connection.transport = transport
        self.connection.channels = {}
        self.connection.on_inbound_frame = frame_handler(
            self.connection, self.connection.on_inbound_method
        )
        self.seen: list[Any] = []
        self.hub = Hub()
        self.channel = self.opened(NUMBER)
        self.other = self.opened(OTHER)
        if ours:
            self.channel.basic_consume = lambda _queue, callback: self.channel.callbacks.update(
                {TAG: callback}
            )
            DeliveryReader(self.channel).consume("queue", self.received)

    def opened(self, number: int) -> amqp.Channel:
        channel = amqp.Channel(self.connection, number, auto_decode=False)
        channel.is_open = True
        channel.callbacks[TAG] = lambda message: self.came(number, message)
        channel._pending[Queue.DeclareOk] = lambda *args: self.seen.append((number, *args))
        channel.basic_reject = lambda tag, requeue: self.seen.append((number, "rejected", tag))
        return channel

    def came(self, number: int, message: amqp.Message) -> None:
        properties = dict(message.properties)
        info = message.delivery_info
        self.seen.append(
            (
                number,
                message.delivery_tag,
                message.body or b"",  # py-amqp uses an empty str without a body
                properties.pop("application_headers", {}),
                properties,
                (info["exchange"], info["routing_key"], info["redelivered"]),
            )
        )

    def received(self, tag: int, message: Received) -> None:
        where = (message.exchange, message.routing_key, message.redelivered)
        self.seen.append((NUMBER, tag, message.body, message.headers, message.properties, where))

    def drain(self) -> None:
        """Read what has come."""
        while True:
            try:
                self.connection.drain_events(timeout=0)
            except TimeoutError:
                return


@contextmanager
def reading(*, ours: bool = True) -> Iterator[Reading]:
    ends = socket.socketpair()
    try:
        yield (it := Reading(ends, ours=ours))
    finally:
        inbound = getattr(it.connection.blocking_read, "__self__", None)
        if isinstance(inbound, FrameReader):
            inbound.close()
            assert not it.hub.readers
        for end in ends:
            end.close()


def read(
    pieces: list[bytes], *, several: bool | None, ours: bool = True
) -> tuple[list[Any], int, str]:
    """Return what comes of pieces that arrive one after another, and then the end.

    Args:
        ours: whether our reader takes the deliveries.
        several: for an event loop; ``None``: py-amqp reads them, all at once, since it would
            look for the rest of a frame again and again for ever.
    """
    with reading(ours=ours) as it:
        if several is None:
            pieces = [b"".join(pieces)]
        else:
            FrameReader(it.channel, several=several)
        error = ""
        try:
            for piece in pieces[:-1]:
                it.peer.sendall(piece)
                it.drain()
            it.peer.sendall(b"".join(pieces[-1:]))
            it.peer.shutdown(socket.SHUT_WR)
            it.drain()
        except Exception as exc:  # noqa: BLE001 - that it is the same is what is looked at
            error = type(exc).__name__
        return it.seen, it.connection.bytes_recv, error


bodies = st.binary(max_size=300)
deliveries = st.builds(
    delivery,
    st.sampled_from([NUMBER, NUMBER, NUMBER, OTHER]),
    st.integers(1, 2**40),
    consumer=st.sampled_from([TAG, TAG, TAG, "gone"]),
    redelivered=st.booleans(),
    exchange=st.sampled_from(["events", "", "ä"]),
    key=st.text(max_size=5),
    headers=st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=2),
    body=bodies,
    size=st.sampled_from([100, 300, 300, 300]),
)
answers = st.builds(
    lambda channel, name: [method(channel, Queue.DeclareOk, "sll", name, 1, 0)],
    st.sampled_from([NUMBER, OTHER]),
    st.text(max_size=5),
)
heartbeats = st.just([frame(8, 0, b"")])


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Frames of some channels, mixed as AMQP lets them be, cut anywhere."""
    lanes: dict[int, list[bytes]] = {0: [], NUMBER: [], OTHER: []}
    for part in draw(st.lists(st.one_of(deliveries, deliveries, answers, heartbeats), max_size=8)):
        lanes[part[0][1] * 256 + part[0][2]].extend(part)
    frames = []
    while left := [lane for lane in lanes.values() if lane]:
        # Mostly what belongs together comes together.
        lane = left[draw(st.integers(0, len(left) - 1))]
        for _ in range(draw(st.sampled_from([1, 3, 99]))):
            if lane:
                frames.append(lane.pop(0))
    whole = b"".join(frames)
    cuts = sorted({0, len(whole), *draw(st.lists(st.integers(0, len(whole)), max_size=6))})
    return [whole[begin:end] for begin, end in pairwise(cuts)]


@given(streams(), st.booleans())
def test_the_same_as_py_amqp(pieces: list[bytes], several: bool) -> None:
    theirs = read(pieces, several=None, ours=False)
    assert read(pieces, several=several) == theirs
    assert read(pieces, several=None) == theirs


@given(
    streams(),
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), max_size=3),
    st.booleans(),
)
def test_the_same_where_bytes_are_damaged(
    pieces: list[bytes], changes: list[tuple[int, int]], several: bool
) -> None:
    """No delivery is read that py-amqp does not read, and none in another way."""
    raw = bytearray(b"".join(pieces))
    for at, byte in changes:
        if at < len(raw):
            raw[at] = byte
    ours, _, our_error = read([bytes(raw)], several=several)
    theirs, _, their_error = read([bytes(raw)], several=None)
    assert (ours, our_error) == (theirs, their_error)


@pytest.mark.parametrize(("several", "first"), [(True, [1, 2, 3]), (False, [1])])
def test_one_or_several_in_one_call(several: bool, first: list[int]) -> None:
    with reading() as it:
        FrameReader(it.channel, several=several)
        it.peer.sendall(b"".join(b"".join(delivery(tag=tag)) for tag in (1, 2, 3)))
        it.connection.drain_events(timeout=1)
        assert [seen[1] for seen in it.seen] == first
        it.drain()
        assert [seen[1] for seen in it.seen] == [1, 2, 3]


def test_deliveries_while_the_channel_closes_are_left_to_the_broker() -> None:
    with reading() as it:
        FrameReader(it.channel, several=True)
        it.channel.is_closing = True
        it.peer.sendall(b"".join(delivery(tag=1)))
        it.drain()
        assert it.seen == []


def test_a_consumer_that_reads_on() -> None:
    """A synchronous call within a delivery processes other frames in order."""
    with reading() as it:
        order: list[str] = []

        def outer(tag: int, **_fields: Any) -> None:
            it.channel.callbacks[TAG] = inner
            order.append(f"{tag} begins")
            it.connection.drain_events(timeout=1)
            order.append(f"{tag} ends")

        def inner(tag: int, **_fields: Any) -> None:
            order.append(str(tag))

        it.channel.callbacks[TAG] = outer
        FrameReader(it.channel, hub=it.hub, several=True)
        it.peer.sendall(b"".join(b"".join(delivery(tag=tag)) for tag in (1, 2, 3)))
        it.connection.drain_events(timeout=1)
        assert order == ["1 begins", "2", "3", "1 ends"]


def test_deliveries_behind_an_answer() -> None:
    """Their bytes have left the socket, so the event loop is asked to call again."""
    with reading() as it:
        FrameReader(it.channel, hub=it.hub, several=True)
        answer = method(NUMBER, Queue.DeclareOk, "sll", "queue", 1, 0)
        it.peer.sendall(answer + b"".join(b"".join(delivery(tag=tag)) for tag in (1, 2)))
        it.connection.drain_events(timeout=1)
        assert [seen[1] for seen in it.seen] == [Queue.DeclareOk]
        assert it.hub.turn()
        assert [seen[1] for seen in it.seen[1:]] == [1, 2]
        assert not it.hub.turn()
        # And again, also where something else was faster.
        it.peer.sendall(answer + b"".join(delivery(tag=3)))
        it.connection.drain_events(timeout=1)
        it.drain()
        assert it.hub.turn()
        assert [seen[1] for seen in it.seen[3:]] == [3]
        assert not it.hub.turn()


def test_a_connection_that_is_lost_with_something_left() -> None:
    with reading() as it:
        FrameReader(it.channel, hub=it.hub)
        it.peer.sendall(b"".join(b"".join(delivery(tag=tag)) for tag in (1, 2)))
        it.connection.drain_events(timeout=1)
        it.connection.transport = None
        assert it.hub.turn()
        assert [seen[1] for seen in it.seen] == [1]
        assert not it.hub.turn()


def test_a_part_of_a_delivery_is_waited_for_at_the_socket() -> None:
    """Otherwise the event loop would be called without end."""
    with reading() as it:
        FrameReader(it.channel, hub=it.hub, several=True)
        first, *rest = delivery(tag=2)
        it.peer.sendall(b"".join(delivery(tag=1)) + first)
        it.drain()
        while it.hub.turn():
            pass
        assert [seen[1] for seen in it.seen] == [1]
        it.peer.sendall(b"".join(rest))
        it.drain()
        assert [seen[1] for seen in it.seen] == [1, 2]


class Socket:
    """A socket that counts what the kernel is asked for."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in {"recv", "settimeout"}:
            return found

        def call(*args: Any) -> Any:
            self.asked.append(name)
            return found(*args)

        return call


def test_event_loop_reads_the_socket_once() -> None:
    with reading() as it:
        transport = it.connection.transport
        transport.sock = counting = Socket(transport.sock)
        transport._setup_transport()
        FrameReader(it.channel, hub=it.hub, several=True)
        for turn in (1, 2):
            it.peer.sendall(b"".join(delivery(tag=turn)))
            it.drain()
            assert [seen[1] for seen in it.seen] == [1, 2][:turn]
            assert counting.asked == ["recv"] * turn


def test_one_in_each_turn_of_an_event_loop() -> None:
    with reading() as it:
        FrameReader(it.channel, hub=it.hub)
        it.peer.sendall(b"".join(b"".join(delivery(tag=tag)) for tag in (1, 2, 3)))
        it.connection.drain_events(timeout=1)
        for turn in (1, 2, 3):
            assert [seen[1] for seen in it.seen] == [1, 2, 3][:turn]
            assert it.hub.turn() == (turn < 3)


def test_deliveries_behind_an_error() -> None:
    with reading() as it:
        it.connection.frame_writer = lambda *_args: None
        it.other._do_revive = lambda: None
        FrameReader(it.channel, hub=it.hub, several=True)
        refused = method(OTHER, Channel.Close, "BsBB", 404, "no queue", *Queue.Declare)
        it.peer.sendall(refused + b"".join(delivery(tag=1)) + b"\x01")
        with pytest.raises(NotFound):
            it.connection.drain_events(timeout=1)
        assert it.hub.turn()
        assert [seen[1] for seen in it.seen] == [1]
        # The beginning of a frame shows at the socket when there is more of it.
        it.drain()
        assert not it.hub.turn()


def test_buffered_bytes_of_py_amqp_come_first() -> None:
    with reading() as it:
        first = b"".join(delivery(tag=1))
        it.connection.transport._read_buffer = first[:20]
        FrameReader(it.channel, hub=it.hub, several=True)
        it.peer.sendall(first[20:] + b"".join(delivery(tag=2)))
        it.drain()
        assert [seen[1] for seen in it.seen] == [1, 2]


def test_a_body_larger_than_a_piece() -> None:
    with reading() as it:
        it.connection.frame_max = 2 * PIECE
        FrameReader(it.channel, hub=it.hub, several=True)
        body = bytes(range(256)) * 600
        raw = b"".join(delivery(body=body, size=2 * PIECE - 8))
        it.peer.setblocking(False)
        while raw:
            try:
                raw = raw[it.peer.send(raw) :]
            except BlockingIOError:
                it.drain()
        it.drain()
        assert [seen[2] for seen in it.seen] == [body]


def closed(it: Reading) -> None:
    it.peer.close()


def reset(it: Reading) -> None:
    it.connection.transport.sock.close()


@pytest.mark.parametrize("end", [closed, reset])
def test_the_end_of_a_connection(end: Callable[[Reading], None]) -> None:
    """Earlier deliveries count; then the connection reports that it is closed."""
    with reading() as it:
        FrameReader(it.channel, hub=it.hub, several=True)
        it.peer.sendall(b"".join(delivery(tag=1) + delivery(tag=2))[:-1])
        it.connection.drain_events(timeout=1)
        end(it)
        with pytest.raises(OSError, match=r"closed|descriptor"):
            it.connection.drain_events(timeout=1)
        assert not it.connection.connected
        assert [seen[1] for seen in it.seen] == [1]
        it.connection.transport = None
        with pytest.raises(RecoverableConnectionError):
            it.connection.drain_events(timeout=1)


def test_invalid_frame_is_refused() -> None:
    with reading() as it:
        FrameReader(it.channel, hub=it.hub, several=True)
        it.peer.sendall(b"".join(delivery())[:-1] + b"\x00")
        with pytest.raises(UnexpectedFrame):
            it.connection.drain_events(timeout=1)
        assert it.seen == []
