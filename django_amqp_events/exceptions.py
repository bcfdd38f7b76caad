"""Everything that this package raises, under one root.

Each message says what happened, to which event, handler or queue, and what to do next.
Control-flow exceptions, which are not failures, have a root of their own.

::

    AmqpEventsError
    ├── ConfigurationError (also django's ImproperlyConfigured)
    │   └── OutboxError
    ├── InvalidEventError (also ValueError)
    │   └── InvalidEditError
    ├── AppendOnlyError (also TypeError)
    ├── DirectCallError (also TypeError)
    ├── RolledBackError
    ├── TopologyError
    │   ├── TopologyDriftError
    │   └── BrokerRequirementError
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

from django.core.exceptions import ImproperlyConfigured

from .reasons import Reason


class AmqpEventsError(Exception):
    """Root of the errors of django_amqp_events."""


class ConfigurationError(AmqpEventsError, ImproperlyConfigured):
    """``AMQP_EVENTS`` or a declaration is wrong; ``manage.py check`` lists everything."""


class OutboxError(ConfigurationError):
    """The outbox cannot take the event as things are: no table, or the wrong transaction."""


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


class AppendOnlyError(AmqpEventsError, TypeError):
    """A row of the audit cannot be changed or deleted."""

    @classmethod
    def of(cls, model: str) -> AppendOnlyError:
        """Return the error of a model's rows."""
        return cls(
            f"rows of {model} are added and never changed: they say who did what. Only "
            f"`manage.py events_prune` deletes them, together with their event"
        )


class DirectCallError(AmqpEventsError, TypeError):
    """A handler was run in a way that would go round settlement; publish its event instead."""

    @classmethod
    def of(cls, handler: str) -> DirectCallError:
        """Return the error of a handler that was run like an ordinary task."""
        return cls(
            f"handler {handler!r} was called as a Celery task, which would go round its retries "
            f"and its archive; publish its event instead, or call it as a function to run it here"
        )

    @classmethod
    def of_event(cls, event: str) -> DirectCallError:
        """Return the error of an event that was called like a task."""
        return cls(
            f"event {event!r} is no Celery task: call it, or its publish(), with the payload by "
            f"name; its handlers run in workers"
        )


class RolledBackError(AmqpEventsError):
    """A handler with ``once`` returned, and its transaction cannot be committed any more.

    A database error was swallowed inside of it: all that the handler wrote is rolled back. Put
    the statement that may fail into a block of its own, ``transaction.atomic(using=…)``.
    """

    @classmethod
    def of(cls, handler: str, event_id: str, alias: str) -> RolledBackError:
        """Return the error of a handler and the event that it was run for."""
        return cls(
            f"handler {handler!r} has returned for event {event_id!r}, but a database error was "
            f"swallowed inside its transaction on {alias!r} (or something else has ended that): "
            f"everything it wrote there is rolled back. Put the statement that may fail into a "
            f"block of its own, `with transaction.atomic(using={alias!r})`, inside the try"
        )


class TopologyError(AmqpEventsError):
    """The broker's exchanges, queues or bindings do not allow the operation."""


class TopologyDriftError(TopologyError):
    """The broker has something else than is declared; run ``manage.py events_declare``."""


class BrokerRequirementError(TopologyError):
    """The broker lacks something that nothing-is-lost rests on, such as a feature flag."""


class PublishError(AmqpEventsError):
    """A publish was not confirmed.

    Attributes:
        event_id: the id under which a repeat is safe: pass it as ``using(event_id=…)``.
        event_name: the event, or the routing key of an internal copy.
        errors: after ``publish_many``: every event that failed, by its event id.
        published: ``False`` when the message is surely in no queue, ``None`` when that is
            not known (a queue may hold it), ``True`` never.
    """

    published: bool | None = None

    def __init__(self, message: str, *, event_id: str = "", event_name: str = "") -> None:
        super().__init__(message)
        self.event_id = event_id
        self.event_name = event_name
        self.errors: dict[str, PublishError] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_publish_error, (type(self), str(self), self.event_id, self.event_name))


def _rebuild_publish_error(
    cls: type[PublishError], message: str, event_id: str, event_name: str
) -> PublishError:
    return cls(message, event_id=event_id, event_name=event_name)


class BrokerUnavailableError(PublishError):
    """No connection could be made, or the broker blocks publishers; nothing was published."""

    published = False


class PublishTimeoutError(PublishError):
    """No confirm came in time; whether the event was stored is not known."""


class PublishInterruptedError(PublishError):
    """The connection broke before the confirm; whether the event was stored is not known."""


class PublishNackedError(PublishError):
    """The broker refused responsibility.

    One queue that refuses nacks the publisher although other queues may have taken the
    message, so a repeat can double it there: repeat under the same event id.
    """


class PublishRefusedError(PublishError):
    """The broker closed the channel or connection over this publish (permission, frame size)."""

    published = False


class MessageTooLargeError(PublishError):
    """The body is larger than ``MAX_BODY``; nothing was published."""

    published = False


class ExchangeMissingError(PublishError):
    """The exchange does not exist; run ``manage.py events_declare``. Nothing was published."""

    published = False


class UnroutableError(PublishError):
    """No queue is bound for this routing key, and policy says that this is an error."""

    published = False


class ControlFlow(Exception):
    """Root of exceptions that steer and are not errors."""


class Malformed(ControlFlow):
    """A delivery cannot be understood; it is archived with ``reason`` and its raw bytes."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail
