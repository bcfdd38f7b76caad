"""Acks and rejects: whatever the order, each delivery is settled once and no other with it."""

from __future__ import annotations

import pytest
from amqp.exceptions import RecoverableConnectionError
from hypothesis import given
from hypothesis import strategies as st

from django_amqp_events.worker.acks import APPLIED_SECONDS, IN_FLIGHT, Acks


class Channel:
    """What RabbitMQ makes of the frames: the deliveries that are acked and requeued."""

    def __init__(self) -> None:
        self.connection: object = self
        self.unsettled: set[int] = set()
        self.acked: list[int] = []
        self.requeued: list[int] = []
        self.frames = 0

    def basic_ack(self, tag: int, multiple: bool = False) -> None:
        self.frames += 1
        covered = {one for one in self.unsettled if one <= tag} if multiple else {tag}
        assert tag in self.unsettled, "RabbitMQ closes the channel over an unknown tag"
        self.unsettled -= covered
        self.acked += sorted(covered)

    def basic_reject(self, tag: int, requeue: bool) -> None:
        assert requeue
        assert tag in self.unsettled
        self.frames += 1
        self.unsettled.discard(tag)
        self.requeued.append(tag)


def made(deliveries: int) -> tuple[Channel, Acks]:
    channel = Channel()
    acks = Acks(channel, (OSError,))
    for tag in range(1, deliveries + 1):
        channel.unsettled.add(tag)
        acks.received(tag)
    return channel, acks


@given(
    st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(1, 30), min_size=1, max_size=16)), max_size=20
    )
)
def test_each_is_settled_once(settled: list[tuple[bool, set[int]]]) -> None:
    channel, acks = made(30)
    acked: set[int] = set()
    requeued: set[int] = set()
    for ack, tags in settled:
        (acks.ack if ack else acks.requeue)(tags)
        new = tags - acked - requeued
        (acked if ack else requeued).update(new)
        assert (set(channel.acked), set(channel.requeued)) == (acked, requeued)
    assert len(channel.acked) == len(acked)


def test_a_job_is_acked_with_one_frame() -> None:
    channel, acks = made(32)
    acks.ack(range(1, 17))
    assert channel.frames == 1
    acks.ack(range(18, 33))
    assert channel.frames == 16
    acks.ack([17])
    assert channel.frames == 17


def test_a_lost_connection_is_not_written_to() -> None:
    channel, acks = made(2)
    channel.connection = None
    acks.ack([1])
    acks.requeue([2])
    assert acks.lost
    assert channel.frames == 0


def test_an_error_is_not_raised_in_the_pools_callback() -> None:
    channel, acks = made(2)

    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError

    channel.basic_ack = broken  # type: ignore[method-assign]
    acks.ack([1, 2])


def test_a_channel_that_was_opened_again_is_not_acked_on() -> None:
    _, acks = made(3)
    with pytest.raises(RecoverableConnectionError):
        acks.received(1)


@pytest.mark.parametrize(("frames", "waits"), [(IN_FLIGHT - 1, False), (IN_FLIGHT, True)])
def test_the_channel_closes_when_rabbitmq_has_the_acks(
    frames: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, acks = made(2 * IN_FLIGHT)
    for number in range(frames):
        acks.ack([2 + 2 * number])  # none is covered by another
    waited: list[float] = []
    monkeypatch.setattr("django_amqp_events.worker.acks.time.sleep", waited.append)
    acks.wait_until_applied()
    assert waited == ([APPLIED_SECONDS] if waits else [])
