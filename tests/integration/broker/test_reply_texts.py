"""Each text of RabbitMQ that decides something, as the broker of today words it.

test_confirms.py has a body that is too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import amqp
import pytest
from amqp import exceptions as amqp_errors

from django_amqp_events.broker import reply_texts
from django_amqp_events.broker.reply_texts import Difference
from django_amqp_events.message.types import Message
from tests.conftest import Vhost

from ..wire import raw_connection

Refused = Callable[[Callable[[amqp.Channel], object]], BaseException]


@pytest.fixture
def refused(fresh_vhost: Vhost) -> Iterator[Refused]:
    """Return RabbitMQ's refusal of a call by a user who may read and write "own" only."""
    node, path, user = fresh_vhost.node, fresh_vhost.path, f"reader-{fresh_vhost.name[-8:]}"
    node.http("PUT", f"/api/users/{user}", {"password": "secret", "tags": ""})
    own = {"configure": ".*", "write": "^(own|amq.topic)$", "read": "^own$"}
    node.http("PUT", f"/api/permissions/{path}/{user}", own)
    topic = {"exchange": "amq.topic", "write": "^own$", "read": ".*"}
    node.http("PUT", f"/api/topic-permissions/{path}/{user}", topic)
    url = f"amqp://{user}:secret@{fresh_vhost.url.rpartition('@')[2]}"

    def refuse(call: Callable[[amqp.Channel], object]) -> BaseException:
        connection = raw_connection(url)
        try:
            channel = connection.channel()

            def wait_for_the_refusal() -> None:
                call(channel)
                channel.queue_declare("own", durable=True)  # of a publish, which has no answer

            with pytest.raises(amqp_errors.AMQPError) as caught:
                wait_for_the_refusal()
            refusal: BaseException = caught.value
            return refusal
        finally:
            connection.collect()

    yield refuse
    node.http("DELETE", f"/api/users/{user}")


def message(exchange: str, key: str) -> Message:
    return Message(exchange=exchange, routing_key=key, body=b"", headers={}, properties={})


def test_a_refusal_names_its_subject(refused: Refused) -> None:
    def publish(exchange: str, key: str) -> BaseException:
        return refused(lambda channel: channel.basic_publish(amqp.Message(""), exchange, key))

    for exchange in ("amq.direct", "there-is-none"):
        exc = publish(exchange, "a.b")
        assert reply_texts.is_about(exc, message(exchange, "x"))
        assert not reply_texts.is_about(exc, message("own", "a.b"))
        assert not reply_texts.is_too_large(exc)
    exc = publish("amq.topic", "a.b")
    assert reply_texts.is_about(exc, message("amq.topic", "a.b"))
    assert not reply_texts.is_about(exc, message("amq.topic", "own"))

    def consume(channel: amqp.Channel) -> None:
        channel.queue_declare("other", durable=True)
        channel.basic_consume("other")

    exc = refused(consume)
    assert reply_texts.names_queue(exc, "other")
    assert not reply_texts.names_queue(exc, "own")


@pytest.mark.parametrize(
    ("argument", "declared", "found"),
    [
        ("x-max-length", 7, "none"),
        ("x-overflow", "reject-publish", "none"),
        ("durable", False, "true"),
    ],
)
def test_an_inequivalent_declaration(
    refused: Refused, argument: str, declared: Any, found: str
) -> None:
    def declare(channel: amqp.Channel) -> None:
        channel.queue_declare("own", durable=True, auto_delete=False)
        durable = argument != "durable"
        arguments = {argument: declared} if durable else {}
        channel.queue_declare("own", durable=durable, auto_delete=False, arguments=arguments)

    exc = refused(declare)
    assert isinstance(exc, amqp_errors.PreconditionFailed)
    expected = Difference(argument, str(declared).lower(), found)
    assert reply_texts.inequivalent(exc) == expected
    assert not reply_texts.is_invalid_property(exc)


def test_a_property_that_a_stream_never_has(refused: Refused) -> None:
    exc = refused(
        lambda channel: channel.queue_declare(
            "stream", durable=False, exclusive=True, arguments={"x-queue-type": "stream"}
        )
    )
    assert isinstance(exc, amqp_errors.PreconditionFailed)
    assert reply_texts.is_invalid_property(exc)
