"""Publishing while faults hit any frame: an answer says what is true of the message in the queue.

Hypothesis makes windows of good and bad messages in several threads, and faults between any two
frames of their connections. `AMQP_EVENTS_FUZZ=5000` in the environment tries 5000, at random.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from broker import Node
from django_amqp_events import (
    BrokerUnavailableError,
    ExchangeMissingError,
    MessageTooLargeError,
    PublishError,
    PublishInterruptedError,
    PublishNackedError,
    PublishRefusedError,
    PublishTimeoutError,
    UnroutableError,
)
from django_amqp_events.broker.confirms import ConfirmChannel
from django_amqp_events.broker.isolation import publish_each
from django_amqp_events.broker.publisher_pool import PublisherPool
from django_amqp_events.message.types import Message
from tests.conftest import slow
from tests.stateful import FUZZ

from ..wire import (
    ACK,
    BLOCKED,
    NACK,
    NAME,
    UNBLOCKED,
    Link,
    Proxy,
    Wire,
    ack,
    in_threads,
    message_size,
    until,
)

#: Seconds for a confirm: where all come, and where some are withheld.
PATIENT, IMPATIENT = 20.0, 0.5
#: Seconds without a frame after which a proxy passes on the confirms that it shuffles.
IDLE = 0.01
#: Bytes of the largest message on the private node.
LARGEST = 300_000
CHANNEL_CLOSE, CONNECTION_CLOSE = (20, 40), (10, 50)
LONG_RUN = FUZZ in os.environ

#: How a message differs from a good one, and its error.
BAD: dict[str, tuple[dict[str, Any], type[PublishError]]] = {
    "exchange": ({"exchange": "nowhere"}, ExchangeMissingError),
    "header for RabbitMQ": ({"headers": {"CC": "no list"}}, PublishRefusedError),
    "header for py-amqp": ({"headers": {"when": object()}}, PublishRefusedError),
    "key": ({"routing_key": "x" * 300}, PublishRefusedError),
    "property": ({"properties": {"priority": "high"}}, PublishRefusedError),
    "unroutable": ({"routing_key": "nobody"}, UnroutableError),
    "full queue": ({"routing_key": "full"}, PublishNackedError),
    "too large": ({"body": b"x" * (LARGEST + 1)}, MessageTooLargeError),
}
GOOD = {"good": 10, "large": 200_000, "empty": 0}
#: By the pool, and isolated: as a replay does it, and as a relay that knows the bad message.
WAYS = ("pool", "isolate", "alone")
#: What any message may get when a connection or a neighbour fails.
UNKNOWN = (PublishInterruptedError, PublishTimeoutError, BrokerUnavailableError)


@dataclass(frozen=True)
class Fault:
    """What happens before a frame of a connection; both are counted from 0."""

    link: int
    upwards: bool
    frame: int
    kind: str
    amount: int


@dataclass(frozen=True)
class Window:
    """Messages that are published together, and one of :data:`WAYS`."""

    kinds: tuple[str, ...]
    how: str


@dataclass
class Sent:
    """A message, the answers to each time it was published, and the last answer of all."""

    kind: str
    how: str
    message: Message
    answers: list[PublishError | None] = field(default_factory=list)
    last: list[PublishError | None] = field(default_factory=list)


#: Faults after which an answer may be missing.
LOSSES = ("cut", "reset", "tear", "stall")
UPWARDS = (*LOSSES, "delay")
DOWNWARDS = (*LOSSES, "delay", "block", "unblock", "shuffle")

#: Each kind of bad message between good ones, at three places, in each way to publish.
EACH_KIND = [
    [
        Window(tuple(kind if at == place else "good" for at in range(5)), how)
        for kind in BAD
        for how in WAYS
    ]
    for place in (0, 2, 4)
]

faults = st.booleans().flatmap(
    lambda upwards: st.builds(
        Fault,
        link=st.integers(0, 4),
        upwards=st.just(upwards),
        frame=st.integers(0, 40),
        kind=st.sampled_from(UPWARDS if upwards else DOWNWARDS),
        amount=st.integers(0, 800),
    )
)
windows = st.builds(
    Window,
    # Half of the windows have good messages only.
    kinds=st.one_of(
        st.lists(st.sampled_from([*GOOD]), min_size=1, max_size=12),
        st.lists(st.sampled_from([*GOOD, "good", "good", *BAD]), min_size=1, max_size=12),
    ).map(tuple),
    how=st.sampled_from(WAYS),
)


class FaultyProxy(Proxy):
    """A proxy that applies faults to the frames of its connections.

    The frames of one direction keep their order, as TCP does. Confirms may overtake each other, be
    joined and be split, which RabbitMQ may do too; but not a return, or the end of the channel.
    """

    def __init__(self, url: str, plan: Sequence[Fault], random: Random) -> None:
        self.plan, self.random = list(plan), random
        super().__init__(url)

    def settle(self) -> None:
        """Wait until the broker has read what it was sent and closed each connection."""
        for thread in self._threads[1:]:
            thread.join(20)
            assert not thread.is_alive(), "the package has left a connection open"

    def _upwards(self, link: Link) -> None:
        with suppress(OSError, ValueError):  # the other thread has closed it
            self._pump(link, link.client, link.server, upwards=True)
        self._end(link)

    def _downwards(self, link: Link) -> None:
        with suppress(OSError, ValueError):  # the other thread has closed it
            self._pump(link, link.server, link.client, upwards=False)
        self._end(link)

    def _end(self, link: Link, *, reset: bool = False) -> None:
        """Close the client's side; the broker reads the rest first."""
        link.closed = True
        if reset:
            linger = struct.pack("ii", 1, 0)
            link.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            with suppress(OSError):
                link.client.shutdown(socket.SHUT_RD)  # for the other thread, which reads it
            link.client.close()
        for sock, side in ((link.client, socket.SHUT_RDWR), (link.server, socket.SHUT_WR)):
            with suppress(OSError):
                sock.shutdown(side)

    def _pump(
        self, link: Link, source: socket.socket, target: socket.socket, *, upwards: bool
    ) -> None:
        number = next(at for at, each in enumerate(self.links) if each is link)
        confirms: Shuffled | None = None
        stalled, index = False, -1
        for frame in _frames(source, header=upwards):
            if link.closed and not upwards:
                continue  # until the broker closes it
            if frame:
                index += 1
            for fault in self.plan if frame else ():
                if (fault.link, fault.upwards, fault.frame) != (number, upwards, index):
                    continue
                match fault.kind:
                    case "cut" | "reset":
                        self._end(link, reset=fault.kind == "reset")
                    case "tear":
                        target.sendall(frame[: 1 + fault.amount % max(1, len(frame) - 1)])
                        self._end(link)
                    case "delay":
                        time.sleep(fault.amount / 1000)
                    case "stall":
                        stalled = True
                    case "block" | "unblock" if index > 2:
                        target.sendall(BLOCKED if fault.kind == "block" else UNBLOCKED)
                    case "shuffle":
                        confirms = confirms or Shuffled(self.random)
            if stalled or (link.closed and upwards and not frame):
                continue
            data = frame if confirms is None else confirms.passed(frame)
            if data and not link.closed:
                target.sendall(data)


def _frames(source: socket.socket, *, header: bool) -> Iterator[bytes]:
    """Read frames; the last may be a part of one. Yield b"" whenever there is none."""
    buffer = bytearray()
    while True:
        size = 8 if header else 7
        if not header and len(buffer) >= size:
            size += struct.unpack(">BHI", buffer[:7])[2] + 1
        if len(buffer) >= size and (header or size > 7):
            yield bytes(buffer[:size])
            del buffer[:size]
            header = False
            continue
        if not select.select([source], [], [], IDLE)[0]:
            yield b""
            continue
        data = source.recv(1 << 18)
        if not data:
            yield bytes(buffer)
            return
        buffer += data


class Shuffled:
    """Confirms that are held until the broker is quiet, and then come in another order."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._settled: set[int] = set()
        self._held: dict[int, bool] = {}

    def passed(self, frame: bytes) -> bytes:
        method = struct.unpack(">HH", frame[7:11]) if frame[:1] == b"\x01" else None
        if method in (ACK, NACK):
            tag, multiple = struct.unpack(">QB", frame[11:20])
            # A shuffle may begin after some confirms; to repeat them changes nothing.
            first = max(1, tag - 1000) if multiple & 1 else tag
            for each in range(first, tag + 1):
                if each not in self._settled:
                    self._settled.add(each)
                    self._held[each] = method == NACK
            return b""
        if not frame or method in (CHANNEL_CLOSE, CONNECTION_CLOSE):
            return self._release() + frame
        return frame

    def _release(self) -> bytes:
        held, self._held = self._held, {}
        tags = list(held)
        self._random.shuffle(tags)
        frames = []
        if tags and not any(held.values()) and self._random.random() < 0.5:
            # One confirm for all up to a tag, if all before it are settled.
            last = self._random.choice(tags)
            if all(tag in held or tag in self._settled for tag in range(min(tags), last)):
                frames.append(ack(last, multiple=True))
                tags = [tag for tag in tags if tag > last]
        frames += [ack(tag, nack=held[tag]) for tag in tags]
        return b"".join(frames)


@pytest.fixture(params=[False, *slow(True)], ids=["shared", "limited"])
def limited(request: pytest.FixtureRequest) -> bool:
    """Whether the broker is a private node that takes no message larger than LARGEST."""
    return bool(request.param)


@pytest.fixture
def wire(request: pytest.FixtureRequest, limited: bool) -> Iterator[Wire]:
    with ExitStack() as stack:
        if limited:
            node: Node = request.getfixturevalue("private_node")
            stack.enter_context(message_size(node, LARGEST))
            url = node.amqp_url()
        else:
            url = request.getfixturevalue("vhost").url
        wire = stack.enter_context(Wire.on(url))
        wire.unbind()
        wire.channel.queue_bind(wire.queue, wire.exchange, NAME)
        limits = {"x-max-length": 0, "x-overflow": "reject-publish"}
        full = f"{wire.exchange}.full"
        wire.channel.queue_declare(full, durable=True, auto_delete=False, arguments=limits)
        wire.channel.queue_bind(full, wire.exchange, "full")
        yield wire


def build(wire: Wire, kind: str, how: str) -> Sent:
    event_id = str(uuid4())
    body = event_id.encode() + b"x" * GOOD.get(kind, 0)
    changes = BAD[kind][0] if kind in BAD else {}
    properties = {"message_id": event_id, "delivery_mode": 2, **changes.get("properties", {})}
    values: dict[str, Any] = {
        "exchange": wire.exchange,
        "routing_key": NAME,
        "body": body,
        "headers": {},
        "event_id": event_id,
        "name": NAME,
        **changes,
        "properties": properties,
    }
    return Sent(kind, how, Message(**values))


def publish(pool: PublisherPool, sent: list[Sent], how: str) -> None:
    by_id = {each.message.event_id: each for each in sent}

    def watched(messages: Sequence[Message]) -> Sequence[PublishError | None]:
        answers = pool.publish(messages, mandatory=True)
        for message, answer in zip(messages, answers, strict=True):
            by_id[message.event_id].answers.append(answer)
        return answers

    messages = [each.message for each in sent]
    if how == "pool":
        for each, answer in zip(sent, watched(messages), strict=True):
            each.last.append(answer)
        return
    bad = [index for index, each in enumerate(sent) if how == "alone" and each.kind in BAD]
    good = [index for index in range(len(sent)) if index not in bad]
    publish_each(
        watched,
        messages,
        lambda index, answer: sent[index].last.append(answer),
        windows=[good, *([index] for index in bad)],
    )


def check(sent: Sent, stored: int, *, lossless: bool) -> None:
    """Compare the answers about a message with how often it is in the queue."""
    assert len(sent.last) == 1, "each message is answered once"
    (last,) = sent.last
    told = f"{sent.kind} {sent.how}: {stored} in the queue, {sent.answers}, then {last!r}"
    confirmed = sent.answers.count(None)
    unknown = sum(answer is not None and answer.published is None for answer in sent.answers)
    assert confirmed <= stored <= confirmed + unknown, told
    assert last is not None or stored, told
    assert last is None or last.published is None or not stored, told
    for answer in (*sent.answers, last):
        if sent.kind in GOOD:
            assert answer is None or type(answer) in UNKNOWN, told
        else:
            assert type(answer) in (BAD[sent.kind][1], *UNKNOWN), told
    if not lossless:
        return
    assert stored <= 1, told
    if sent.how == "alone":
        expected = BAD[sent.kind][1] if sent.kind in BAD else type(None)
        assert type(last) is expected, told
    elif sent.how == "isolate":
        # What RabbitMQ has not read because of a neighbour is published.
        assert not isinstance(last, (BrokerUnavailableError, PublishTimeoutError)), told


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def play(
    wire: Wire,
    publishers: Sequence[Sequence[Window]],
    plan: Sequence[Fault],
    seed: int,
    limit: int,
    *,
    limited: bool,
) -> None:
    """Publish in several threads through a faulty proxy, and compare answers and queue."""
    descriptors, threads = _descriptors(), threading.active_count()
    withheld = any(fault.kind in ("stall", "block") for fault in plan)
    random = Random(seed)
    proxy = FaultyProxy(wire.url, plan, random)
    app = Celery("model", broker=proxy.url, set_as_current=False)
    app.conf.broker_pool_limit = limit
    pool = PublisherPool(app, timeout=IMPATIENT if withheld else PATIENT)
    sent: list[Sent] = []

    def work(number: int) -> None:
        for window in publishers[number]:
            kinds = [kind for kind in window.kinds if limited or kind != "too large"]
            window_sent = [build(wire, kind, window.how) for kind in kinds]
            sent.extend(window_sent)
            publish(pool, window_sent, window.how)

    raised = in_threads(len(publishers), work)
    assert not raised, raised
    lossless = not any(fault.kind in (*LOSSES, "block") for fault in plan)

    proxy.plan = []
    for link in proxy.links:
        link.write(UNBLOCKED)
    for channel in pool._idle:
        assert not channel._unconfirmed
        assert not channel.broken
    last = build(wire, "good", "pool")

    def again() -> bool:
        last.last.clear()
        publish(pool, [last], "pool")
        return last.last == [None]

    until(again, "the pool can publish again")
    sent.append(last)

    pool.close()
    proxy.settle()
    proxy.end()
    known = {each.message.event_id: each for each in sent}
    bodies = wire.take(about=sum(each.answers.count(None) for each in sent))
    found = Counter(message.properties["message_id"] for message in bodies)
    assert found.keys() <= known.keys(), "something is in the queue that was not sent"
    for message in bodies:
        assert bytes(message.body) == known[message.properties["message_id"]].message.body
    for each in sent:
        check(each, found[each.message.event_id], lossless=lossless)
    assert _descriptors() == descriptors
    assert threading.active_count() == threads


@pytest.mark.timeout(0 if LONG_RUN else 300)
@settings(
    max_examples=int(os.environ.get(FUZZ, "20")),
    derandomize=not LONG_RUN,
    deadline=None,
    database=None,
    suppress_health_check=[*HealthCheck],
    # What depends on time may not happen again, so the first example tells more than a shrunk one.
    phases=[Phase.explicit, Phase.generate],
)
@example(publishers=EACH_KIND, plan=[], seed=0, limit=3)
@given(
    publishers=st.lists(st.lists(windows, min_size=1, max_size=3), min_size=1, max_size=3),
    plan=st.lists(faults, max_size=5),
    seed=st.integers(0, 2**16),
    limit=st.integers(1, 3),
)
def test_an_answer_is_true(
    wire: Wire,
    limited: bool,
    publishers: list[list[Window]],
    plan: list[Fault],
    seed: int,
    limit: int,
):
    play(wire, publishers, plan, seed, limit, limited=limited)


def channels() -> list[ConfirmChannel]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is ConfirmChannel]


def test_no_channel_outlives_its_pool(wire: Wire, limited: bool):
    of_other_tests = channels()
    windows = [[Window(("good", "exchange", "good"), "isolate")]] * 3
    play(
        wire,
        windows,
        [Fault(0, True, 8, "cut", 0), Fault(1, False, 6, "tear", 3)],
        1,
        2,
        limited=limited,
    )
    assert not [channel for channel in channels() if channel not in of_other_tests]
