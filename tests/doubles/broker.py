"""A broker that answers as it is told, in the place of a connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django_amqp_events.exceptions import PublishError
from django_amqp_events.message.types import Message
from django_amqp_events.publish.pending import Backend
from tests.archive_rows import NOW


@dataclass
class Broker(Backend):
    """Records messages; *errors* are its first answers, and *answer* returns the others."""

    answer: Callable[[Message], PublishError | None] = lambda message: None
    errors: list[PublishError | None] = field(default_factory=list)
    windows: list[list[Message]] = field(default_factory=list)

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        assert mandatory
        self.windows.append(list(messages))
        return [self.errors.pop(0) if self.errors else self.answer(each) for each in messages]

    def now(self) -> datetime:
        return NOW

    @property
    def messages(self) -> list[Message]:
        return [message for window in self.windows for message in window]

    @property
    def payloads(self) -> list[dict[str, Any]]:
        return [json.loads(message.body)[1] for message in self.messages]
