"""Publish several messages, one of which RabbitMQ may refuse.

RabbitMQ closes the channel over a refused message, and the confirms of its neighbours are lost:
those before it may be stored, those behind it were not read. It does not always name the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from ..exceptions import (
    BrokerUnavailableError,
    ExchangeMissingError,
    MessageTooLargeError,
    PublishError,
    PublishRefusedError,
)
from ..message.headers import without_publisher_headers
from ..message.types import Message

#: Errors of one message, whatever its exchange and queues are.
OF_ONE_MESSAGE: Final = (MessageTooLargeError, PublishRefusedError)


def isolate(
    publish: Callable[[Sequence[Message]], Sequence[PublishError | None]],
    messages: Sequence[Message],
    *,
    alone: Collection[int] = (),
    repeat: bool = False,
    strip: bool = True,
) -> Iterator[dict[int, PublishError | None]]:
    """Publish messages in windows; yield the answers of each window by the index of the message.

    What RabbitMQ has not read because of a refused message is published in a window of its own. The
    caller may renew leases between windows, or end; messages without an answer are not confirmed.

    Args:
        publish: publishes a window. It may raise, and then nothing more is published.
        alone: indexes of messages that have failed before; each is a window, after the others.
        repeat: publish an unconfirmed message once more, alone, instead of yielding its error.
        strip: publish a refused message once more, alone, without its publisher's headers: these
            may be the cause, and the event does not depend on them.
    """
    messages = list(messages)
    windows = deque([[index for index in range(len(messages)) if index not in alone]])
    windows.extend([index] for index in alone)
    stripped: set[int] = set()
    first: dict[int, PublishError] = {}
    while windows:
        if not (window := windows.popleft()):
            continue
        errors = dict(zip(window, publish([messages[at] for at in window]), strict=True))
        culprits = (*OF_ONE_MESSAGE, ExchangeMissingError)
        refused = any(isinstance(error, culprits) for error in errors.values())
        behind: list[int] = []
        for index in window:
            error = errors[index]
            if strip and isinstance(error, PublishRefusedError) and index not in stripped:
                stripped.add(index)
                messages[index] = without_publisher_headers(messages[index])
                windows.append([index])
            elif refused and isinstance(error, BrokerUnavailableError):
                behind.append(index)
            elif repeat and error is not None and len(window) > 1:
                first[index] = error
                windows.append([index])
            else:
                if index in first and isinstance(error, BrokerUnavailableError):
                    # Not published again, but the first time it may have been stored.
                    errors[index] = first[index]
                continue
            del errors[index]
        windows.appendleft(behind)
        yield errors
