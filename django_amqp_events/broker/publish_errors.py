"""Build the errors of messages that were not confirmed.

What an error concerns is its ``scope`` (``PublishError`` in ``exceptions.py``).
"""

from __future__ import annotations

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
    UnroutableError,
)
from ..message.types import Message
from ..reasons import Reason
from .reply_texts import is_about, is_too_large, reply_text

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


def message_id(properties: Any) -> str:
    return str(properties.get("message_id", ""))


def build_error(
    kind: type[PublishError], message: Message, code: str, **params: object
) -> PublishError:
    """Return an error with the message's event id and name, for a code of :mod:`~.reasons`."""
    return of_message(kind, message, Reason(code, **params))


def of_message(kind: type[PublishError], message: Message, reason: Reason) -> PublishError:
    name = message.name or message.routing_key
    return kind(reason, event_id=message.event_id, event_name=name)


def unavailable_errors(messages: Sequence[Message], why: Reason) -> list[PublishError | None]:
    """Return an error for each of several messages that were not published."""
    return [of_message(BrokerUnavailableError, message, why) for message in messages]


def unroutable_error(message: Message) -> PublishError:
    """Return the error of a message for which no queue is bound."""
    route = {"exchange": repr(message.exchange), "routing_key": repr(message.routing_key)}
    return build_error(UnroutableError, message, "unroutable", **route)


def interrupted_error(message: Message, exc: Exception, blocked: str, alone: bool) -> PublishError:
    """Return the error of a message that was written but not confirmed.

    Args:
        exc: why no confirm came.
        blocked: RabbitMQ's reason for blocking publishers, ``""`` if it does not.
        alone: no other message was unconfirmed; otherwise *exc* may be about another one.
    """
    if isinstance(exc, TimeoutError):
        if blocked:
            return build_error(
                PublishTimeoutError, message, "confirm-late-blocked", blocked=blocked
            )
        return build_error(PublishTimeoutError, message, "confirm-late")
    text = reply_text(exc)
    if isinstance(exc, _REFUSALS) and (alone or is_about(exc, message)):
        if isinstance(exc, amqp_errors.NotFound):
            return build_error(ExchangeMissingError, message, "exchange-missing", reply=text)
        if is_too_large(exc):
            return build_error(MessageTooLargeError, message, "message-too-large", reply=text)
        reply = f"{exc.reply_code}: {text}"
        return build_error(PublishRefusedError, message, "publish-refused", reply=reply)
    error = f"{type(exc).__name__}: {exc}"
    return build_error(PublishInterruptedError, message, "connection-broke", error=error)
