"""Acks in multiples cover what was answered, and nothing else, in whatever order answers come."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from amqp import spec
from amqp.exceptions import RecoverableConnectionError
from amqp.method_framing import frame_writer
from amqp.serialization import dumps, loads
from hypothesis import given
from hypothesis import strategies as st
from kombu.message import Message

from django_amqp_events.worker.acks import APPLIED_SECONDS, IN_FLIGHT, Acks
from django_amqp_events.worker.fast.batched_acks import BatchedAcks


class Broker:
    """A channel with RabbitMQ's rule: an ack of many covers every open delivery up to its tag."""

    no_ack_consumers = None
    channel_id = 7

    def __init__(self) -> None:
        self.connection: Any = SimpleNamespace(
            transport=SimpleNamespace(write=self._write), bytes_sent=0
        )
        self.writes = 0
        self.open: list[int] = []
        self.acked: list[int] = []
        self.requeued: list[int] = []
        self.frames = 0

    def deliver(self) -> Message:
        self.open.append(len(self.open) + len(self.acked) + len(self.requeued) + 1)
        return Message(channel=self, delivery_tag=self.open[-1])

    def _write(self, frames: bytes) -> None:
        """Take acks; each is what py-amqp writes."""
        self.writes += 1
        while frames:
            tag, multiple = loads("Lb", frames, 11)[0]
            assert frames[:21] == written(self.channel_id, tag, multiple=multiple)
            self.basic_ack(tag, multiple)
            frames = frames[21:]

    def basic_ack(self, tag: int, multiple: bool = False) -> None:
        self.frames += 1
        assert tag in self.open, "RabbitMQ closes the channel: unknown delivery tag"
        covered = [each for each in self.open if each <= tag] if multiple else [tag]
        self.open = [each for each in self.open if each not in covered]
        self.acked += covered

    def basic_reject(self, tag: int, requeue: bool) -> None:
        assert requeue
        assert tag in self.open
        self.open.remove(tag)
        self.requeued.append(tag)


def written(number: int, tag: int, *, multiple: bool) -> bytes:
    """Return the frame of an ack as py-amqp writes it."""
    found: list[bytes] = []
    transport = SimpleNamespace(write=lambda frame: found.append(bytes(frame)))
    connection = SimpleNamespace(frame_max=131072, bytes_sent=0)
    write = frame_writer(connection, transport)
    write(1, number, spec.Basic.Ack, dumps("Lb", (tag, multiple)), None)
    return found[0]


def acks(together: bool = True) -> Acks:
    return (BatchedAcks if together else Acks)((OSError,))


@given(st.data(), st.booleans())
def test_any_order(data: Any, together: bool) -> None:
    channel, ours = Broker(), acks(together)
    held: list[Message] = []
    wanted: dict[str, set[int]] = {"acked": set(), "requeued": set()}
    for step in data.draw(st.lists(st.sampled_from("dddaarl"), max_size=40)):
        if step == "d":
            message = channel.deliver()
            ours.received(message)
            held.append(message)
        elif step == "l":
            # A delivery lost to a signal's exception: it must not be acknowledged.
            channel.deliver()
        elif held and step == "a":
            chosen = data.draw(st.lists(st.sampled_from(held), unique_by=id, min_size=1))
            ours.ack(chosen)
            wanted["acked"] |= {message.delivery_tag for message in chosen}
            held = [message for message in held if message not in chosen]
        elif held:
            message = held.pop(data.draw(st.integers(0, len(held) - 1)))
            ours.reject(message)
            wanted["requeued"].add(message.delivery_tag)
    assert set(channel.acked) == wanted["acked"]
    assert set(channel.requeued) == wanted["requeued"]


def test_many_in_a_frame() -> None:
    channel, ours = Broker(), acks()
    messages = [channel.deliver() for _ in range(10)]
    for message in messages:
        ours.received(message)
    ours.ack([*messages[:4], messages[6]])
    assert (sorted(channel.acked), channel.frames, channel.writes) == ([1, 2, 3, 4, 7], 2, 1)
    assert channel.connection.bytes_sent == 2
    ours.ack([messages[5], messages[4]])
    assert (sorted(channel.acked), channel.frames) == ([1, 2, 3, 4, 5, 6, 7], 3)
    ours.ack(messages[7:])
    assert (channel.open, channel.frames) == ([], 4)


def test_a_connection_that_is_lost_is_not_acked_on(caplog: pytest.LogCaptureFixture) -> None:
    channel, ours = Broker(), acks()
    messages = [channel.deliver() for _ in range(3)]
    for message in messages:
        ours.received(message)
    channel.connection.transport.write = _broken(OSError("gone"))
    ours.ack(messages[:1])
    assert "could not ack 1 deliveries" in caplog.text
    channel.connection.transport.write = _broken(BrokenPipeError("gone"))
    with pytest.raises(BrokenPipeError):
        ours.ack(messages[1:])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("settle", ["ack", "reject"])
def test_many_before_the_end_are_waited_for(
    together: bool, settle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acks that RabbitMQ holds back when the channel closes would be lost."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    channel, ours = Broker(), acks(together)
    messages = [channel.deliver() for _ in range(2 * IN_FLIGHT)]
    for message in messages:
        ours.received(message)
    settling: Any = ours.reject if settle == "reject" else lambda message: ours.ack([message])
    for message in messages[1:IN_FLIGHT]:
        settling(message)
    ours.wait_until_applied()
    assert not slept
    settling(messages[-1])
    ours.wait_until_applied()
    assert slept == [APPLIED_SECONDS]
    later = time.monotonic() + APPLIED_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    ours.wait_until_applied()
    assert len(slept) == 1


def _broken(error: OSError) -> Any:
    def write(_frames: bytes) -> None:
        raise error

    return write


def test_reopened_channel_starts_with_new_tags() -> None:
    """Its delivery tags restart, so old deliveries must not be taken for new ones."""
    channel, ours = Broker(), acks()
    for message in [channel.deliver() for _ in range(3)]:
        ours.received(message)
    channel.open.clear()
    with pytest.raises(RecoverableConnectionError, match="opened again"):
        ours.received(channel.deliver())


def test_a_delivery_of_an_older_channel_says_nothing_of_this_one() -> None:
    ours = acks()
    first, second = Broker(), Broker()
    old = [first.deliver() for _ in range(3)]
    for message in old:
        ours.received(message)
    new = [second.deliver() for _ in range(4)]
    for message in new:
        ours.received(message)
    ours.ack([old[2], new[0], new[1], new[3]])
    assert (first.acked, sorted(second.acked)) == ([3], [1, 2, 4])
    ours.reject(old[0])
    ours.ack([new[2]])
    assert (second.open, first.requeued) == ([], [1])
