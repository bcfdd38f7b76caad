"""Errors of messages that were not confirmed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from amqp import exceptions as amqp_errors

from ..exceptions import (
    BrokerUnavailableError,
    ExchangeMissingError,
    MessageTooLargeError,
    PublishError,
    PublishInterruptedError,
    PublishRefusedError,
    PublishTimeoutError,
)
from ..message.types import Message

#: RabbitMQ's answers to a publish that it did not accept.
_REFUSALS = (
    amqp_errors.NotFound,
    amqp_errors.AccessRefused,
    amqp_errors.PreconditionFailed,
    amqp_errors.ContentTooLarge,
    amqp_errors.ResourceLocked,
    amqp_errors.FrameError,
    amqp_errors.FrameSyntaxError,
    amqp_errors.NotAllowed,
    amqp_errors.AMQPNotImplementedError,
)


def describe_message(message: Message) -> str:
    """Return a message's name and id as publish errors show them."""
    return f"{message.name or message.routing_key!r} ({message.event_id or 'no id'})"


def message_id(properties: Any) -> str:
    return str(properties.get("message_id", ""))


def build_error(kind: type[PublishError], message: Message, text: str) -> PublishError:
    """Return an error that carries the message's event id and name."""
    return kind(text, event_id=message.event_id, event_name=message.name)


def unavailable_errors(messages: Sequence[Message], why: str) -> list[PublishError | None]:
    """Return an error for each of several messages that were not published."""
    return [
        build_error(
            BrokerUnavailableError, message, f"{describe_message(message)} was not published: {why}"
        )
        for message in messages
    ]


def interrupted_error(message: Message, exc: Exception, blocked: str, alone: bool) -> PublishError:
    """Return the error of a message that was written but not confirmed.

    Args:
        exc: why no confirm came.
        blocked: RabbitMQ's reason for blocking publishers, ``""`` if it does not.
        alone: no other message was unconfirmed; otherwise *exc* may be about another one.
    """
    what = describe_message(message)
    if isinstance(exc, TimeoutError):
        why = f" (RabbitMQ blocks publishers: {blocked})" if blocked else ""
        return build_error(
            PublishTimeoutError,
            message,
            f"no confirm for {what} in time{why}: it may be stored; repeat with the same event id",
        )
    text = str(getattr(exc, "reply_text", "") or exc)
    if isinstance(exc, _REFUSALS) and (alone or _is_about(text, message)):
        if isinstance(exc, amqp_errors.NotFound):
            return build_error(
                ExchangeMissingError,
                message,
                f"{text}: {what} was not published; run `manage.py events_declare`, or publish it "
                f"again if EXCHANGE has changed",
            )
        if isinstance(exc, amqp_errors.ContentTooLarge) or "message size" in text:
            return build_error(
                MessageTooLargeError,
                message,
                f"{text}: {what} was not published; publish a reference to the data",
            )
        return build_error(
            PublishRefusedError,
            message,
            f"RabbitMQ refused {what} ({exc.reply_code}: {text}); check the user's permissions "
            f"and the broker's log",
        )
    return build_error(
        PublishInterruptedError,
        message,
        f"the connection broke before {what} was confirmed ({type(exc).__name__}: {exc}): it "
        f"may be stored; repeat with the same event id",
    )


def _is_about(text: str, message: Message) -> bool:
    """Return True if RabbitMQ's reply text is about this message."""
    if size := re.search(r"message size \d+ is larger than .*?(\d+)", text):
        return len(message.body) > int(size[1])
    if topic := re.search(r"topic '(.*)' in exchange '(.*)' in", text):
        return (message.routing_key, message.exchange) == topic.groups()
    return f"exchange '{message.exchange}'" in text
