"""The exceptions of this package; each message says what happened and what to do next.

::

    AmqpEventsError
    ├── ConfigurationError (also django's ImproperlyConfigured)
    │   └── OutboxError
    ├── InvalidEventError (also ValueError)
    │   └── InvalidEditError
    ├── DirectCallError (also TypeError)
    ├── RolledBackError
    ├── TopologyError
    │   └── TopologyDriftError
    └── PublishError
        ├── BrokerUnavailableError
        ├── PublishTimeoutError
        ├── PublishInterruptedError
        ├── PublishNackedError
        ├── PublishRefusedError
        ├── MessageTooLargeError
        ├── ExchangeMissingError
        └── UnroutableError
    ControlFlow
    └── Malformed
"""

from __future__ import annotations

from typing import Literal

from django.core.exceptions import ImproperlyConfigured

from .options import Problem
from .reasons import Reason


class AmqpEventsError(Exception):
    """Root of the errors of django_amqp_events."""


class ConfigurationError(AmqpEventsError, ImproperlyConfigured):
    """``AMQP_EVENTS`` or a declaration is invalid; ``manage.py check`` lists all errors.

    Attributes:
        problems: the :class:`~.options.Problem` of each line, where these are known.
    """

    problems: tuple[Problem, ...] = ()


class OutboxError(ConfigurationError):
    """The outbox cannot store the event: it has no table, or the transaction is wrong."""


class InvalidEventError(AmqpEventsError, ValueError):
    """The payload violates the event's contract or is not JSON; nothing was published."""


class InvalidEditError(InvalidEventError):
    """An edited payload cannot be published; nothing was published.

    Attributes:
        problems: the reasons, for the form field.
    """

    def __init__(self, *problems: Reason) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class DirectCallError(AmqpEventsError, TypeError):
    """A handler was called like a Celery task."""

    @classmethod
    def of(cls, handler: str) -> DirectCallError:
        return cls(
            f"handler {handler!r} was called as a Celery task, which would bypass its retries and "
            f"the archive. Publish its event instead, or call it as a function to run it here"
        )


class RolledBackError(AmqpEventsError):
    """A handler with ``once`` swallowed a database error, so its transaction is rolled back."""

    @classmethod
    def of(cls, handler: str, event_id: str, alias: str) -> RolledBackError:
        return cls(
            f"handler {handler!r} returned for event {event_id!r}, but its transaction on "
            f"{alias!r} is rolled back, because a database error in it was swallowed or other code "
            f"ended it. Put the statement that may fail inside the try into its own "
            f"`with transaction.atomic(using={alias!r})`"
        )


class TopologyError(AmqpEventsError):
    """The broker's exchanges, queues or bindings do not allow the operation."""


class TopologyDriftError(TopologyError):
    """The broker differs from what is declared; run ``manage.py events_declare``."""


class PublishError(AmqpEventsError):
    """A publish was not confirmed.

    Attributes:
        reason: why, without the event, so that events that failed for one reason share it.
        event_id: publish again with ``using(event_id=…)`` to repeat safely.
        event_name: the event, or the routing key of an internal copy.
        errors: after ``publish_many``, the failed events by id.
        published: ``False`` if the message is certainly in no queue, ``None`` if it may be in one.
        scope: what it concerns: this ``message`` wherever it is published, a ``queue`` that it is
            for, its ``exchange``, or the ``broker``, and so every message.
    """

    published: bool | None = None
    scope: Literal["message", "queue", "exchange", "broker"] = "broker"

    def __init__(self, reason: Reason | str, *, event_id: str = "", event_name: str = "") -> None:
        self.reason = Reason.of(reason)
        super().__init__(self.reason)
        self.event_id = event_id
        self.event_name = event_name
        self.errors: dict[str, PublishError] = {}

    def __str__(self) -> str:
        if not (self.event_id or self.event_name):
            return str(self.reason)
        outcome = "was not confirmed" if self.published is None else "was not published"
        return f"{self.event_name!r} ({self.event_id or 'no id'}) {outcome}: {self.reason}"


class BrokerUnavailableError(PublishError):
    """No connection could be made, or the broker blocks publishers; nothing was published."""

    published = False


class PublishTimeoutError(PublishError):
    """No confirm came in time; the event may be stored."""


class PublishInterruptedError(PublishError):
    """The connection broke before the confirm; the event may be stored."""


class PublishNackedError(PublishError):
    """The broker refused the message for at least one queue; others may have stored it."""

    scope = "queue"


class PublishRefusedError(PublishError):
    """The broker closed the channel or connection because of the publish (permissions, size)."""

    published = False
    scope = "message"


class MessageTooLargeError(PublishError):
    """The body is larger than ``MAX_BODY``; nothing was published."""

    published = False
    scope = "message"


class ExchangeMissingError(PublishError):
    """The exchange does not exist; run ``manage.py events_declare``. Nothing was published."""

    published = False
    scope = "exchange"


class UnroutableError(PublishError):
    """No queue is bound for this routing key, and ``UNROUTED`` makes that an error."""

    published = False
    scope = "queue"


class ControlFlow(Exception):
    """Root of exceptions that control the flow and are not errors."""


class Malformed(ControlFlow):
    """A delivery cannot be decoded; it is archived with its raw bytes and this text."""
