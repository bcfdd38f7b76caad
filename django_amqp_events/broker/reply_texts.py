"""What RabbitMQ tells only in the text of a reply; no other module reads these texts.

tests/integration/broker/test_reply_texts.py provokes each on a broker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from amqp import exceptions as amqp_errors

from ..message.types import Message

_SIZE: Final = re.compile(r"message size \d+ is larger than .*?(\d+)")
_TOPIC: Final = re.compile(r"topic '(.*)' in exchange '(.*)' in")
_INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for .*: "
    r"received (?P<declared>.*?) but current is (?P<found>.*)$",
    re.DOTALL,
)
_VALUE: Final = re.compile(r"^(?:the value )?'(?P<value>.*?)'(?: of type '\w+')?$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Difference:
    """An argument that differs on the broker; values are text, ``none`` if unset."""

    argument: str
    declared: str
    found: str

    def __str__(self) -> str:
        return f"{self.argument} is {self.found}, declared is {self.declared}"


def reply_text(exc: BaseException) -> str:
    """Return the text of a reply, or the text of another error."""
    return str(getattr(exc, "reply_text", "") or exc)


def is_too_large(exc: BaseException) -> bool:
    """Return True if a message is larger than RabbitMQ accepts."""
    return isinstance(exc, amqp_errors.ContentTooLarge) or "message size" in reply_text(exc)


def is_about(exc: BaseException, message: Message) -> bool:
    """Return True if a refused publish is of this message."""
    text = reply_text(exc)
    if size := _SIZE.search(text):
        return len(message.body) > int(size[1])
    if topic := _TOPIC.search(text):
        return (message.routing_key, message.exchange) == topic.groups()
    return f"exchange '{message.exchange}'" in text


def names_queue(exc: BaseException, queue: str) -> bool:
    """Return True if a refused access is to this queue."""
    return f"'{queue}'" in reply_text(exc)


def inequivalent(exc: amqp_errors.PreconditionFailed) -> Difference | None:
    """Return the argument for which a declaration was refused."""
    match = _INEQUIVALENT.search(reply_text(exc))
    if match is None:
        return None

    def plain(text: str) -> str:
        value = _VALUE.match(text)
        return value["value"] if value else text

    return Difference(match["argument"], plain(match["declared"]), plain(match["found"]))


def is_invalid_property(exc: amqp_errors.PreconditionFailed) -> bool:
    """Return True if a queue of this type has a property that it never has."""
    return "invalid property" in reply_text(exc)
