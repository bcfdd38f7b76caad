"""Publish several messages, one of which RabbitMQ may refuse, and record each answer.

RabbitMQ closes the channel over a refused message, and the confirms of its neighbours are lost:
those before it may be stored, those behind it were not read. It does not always name the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from ..callables import nothing
from ..exceptions import BrokerUnavailableError, PublishError
from ..message.types import Message
from ..reasons import Reason
from .publish_errors import unavailable_errors


def publish_each(
    publish: Callable[[Sequence[Message]], Sequence[PublishError | None]],
    messages: Sequence[Message],
    record: Callable[[int, PublishError | None], object],
    *,
    windows: Iterable[Sequence[int]] | None = None,
    last: Collection[str] = ("broker",),
    stop: Callable[[], bool] = nothing,
) -> None:
    """Publish messages in windows, and record the answer of each one after its window.

    What RabbitMQ has not read because of a refused message is published in a window of its own.

    Args:
        publish: publishes a window. It may raise, and then nothing more is published.
        record: receives the index of a message and its error; ``None`` if it is confirmed.
        windows: indexes of the messages that are published together; all, by default. A refused
            message costs those of its window their confirms.
        last: scopes of errors after which no window is published, since it would fail as well;
            BrokerUnavailableError is recorded for its messages.
        stop: called before each window; returns True to publish no more.
    """
    remaining = deque([range(len(messages))] if windows is None else windows)
    why: Reason | None = None
    while remaining:
        if not (window := remaining.popleft()):
            continue
        tried = [messages[index] for index in window]
        if why is None and stop():
            why = Reason("process-ends")
        errors = publish(tried) if why is None else unavailable_errors(tried, why)
        failed = [error for error in errors if error is not None]
        refused = any(error.scope not in last for error in failed)
        if failed and not refused:
            why = failed[0].reason
        behind: list[int] = []
        for index, error in zip(window, errors, strict=True):
            if refused and isinstance(error, BrokerUnavailableError):
                behind.append(index)
            else:
                record(index, error)
        remaining.appendleft(behind)
