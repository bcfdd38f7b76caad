"""Durable events between Django services, on Celery workers and RabbitMQ."""

from __future__ import annotations

from .context import ReceivedEvent, current_event
from .declare.retry_policy import RetryPolicy
from .decorators import Event, event, handler
from .exceptions import (
    AmqpEventsError,
    BrokerUnavailableError,
    ConfigurationError,
    DirectCallError,
    ExchangeMissingError,
    InvalidEventError,
    MessageTooLargeError,
    OutboxError,
    PublishError,
    PublishInterruptedError,
    PublishNackedError,
    PublishRefusedError,
    PublishTimeoutError,
    RolledBackError,
    TopologyDriftError,
    TopologyError,
    UnroutableError,
)
from .publish.publisher import Options, publish_event, publish_many

__all__ = [
    # declaring
    "event",
    "handler",
    "Event",
    "RetryPolicy",
    # publishing
    "publish_event",
    "publish_many",
    "Options",
    # handling
    "current_event",
    "ReceivedEvent",
    # errors
    "AmqpEventsError",
    "BrokerUnavailableError",
    "ConfigurationError",
    "DirectCallError",
    "ExchangeMissingError",
    "InvalidEventError",
    "MessageTooLargeError",
    "OutboxError",
    "PublishError",
    "PublishInterruptedError",
    "PublishNackedError",
    "PublishRefusedError",
    "PublishTimeoutError",
    "RolledBackError",
    "TopologyDriftError",
    "TopologyError",
    "UnroutableError",
]
__version__ = "0.1.0"
