"""Answers of messages that are published more than once."""

from __future__ import annotations

from collections.abc import Sequence

from django_amqp_events import BrokerUnavailableError, PublishError, PublishInterruptedError
from django_amqp_events.broker.isolation import publish_each
from django_amqp_events.broker.publish_errors import build_error
from django_amqp_events.message.types import Message


def test_what_may_be_stored_is_not_said_to_be_unpublished():
    """The connection breaks, and then there is none to publish again."""
    messages = [
        Message(
            exchange="events",
            routing_key="shop.order.created",
            body=b"",
            headers={},
            properties={},
            event_id=event_id,
        )
        for event_id in "ab"
    ]
    windows: list[int] = []

    def publish(window: Sequence[Message]) -> list[PublishError | None]:
        windows.append(len(window))
        kind = PublishInterruptedError if len(window) > 1 else BrokerUnavailableError
        return [build_error(kind, message, "connection-broke", error="cut") for message in window]

    answers: dict[int, PublishError | None] = {}
    publish_each(publish, messages, answers.__setitem__, repeat=True)
    assert windows == [2, 1], "no window after the one without a connection"
    assert list(answers) == [0, 1]
    assert {error and error.published for error in answers.values()} == {None}
    assert {type(error) for error in answers.values()} == {PublishInterruptedError}
