"""Handle events: what happens in a worker between a delivery and its settlement.

The path of a delivery through the modules:

``celery_signals``     waits for Celery to signal that this process is a worker
``bootstrap``          installs the steps; lists what is replaced on Celery's instances
``queue_step``         consumes queues: missing ones, lost connections, shutdowns
``bootstep``           consumes the handlers' queues and gives each delivery to Celery
``dispatch``           reads a delivery: event, handler, whether it is due (pure)
``request``            Celery's request for a delivery; only a verdict settles it
``tracing``            runs the handler under Celery's tracer, in the pool
``task``, ``binding``  the Celery task of a handler; binds the payload to its parameters
``inbox``              effects in the database happen once
``verdict``            decides: handled, retry, archive or requeue (pure)
``outgoing``           builds the message that a verdict publishes (pure)
``settlement``         publishes that message and waits for its confirm
``acks``               acks the delivery

Beside it: ``consumer_step`` is the public base of steps that consume other queues; ``fast_paths``
chooses the optional modules in ``fast/``; ``reaper`` runs events alone whose workers have died;
``hang_detector``, ``connection_errors``, ``cold_shutdown`` and ``log_forks`` keep a worker from
hanging;
``celery_internals`` and ``billiard_internals`` hold every use of a private name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..message.types import Received as Received
    from .consumer_step import AMQPConsumerStep as AMQPConsumerStep

__all__ = ["AMQPConsumerStep", "Received"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are used: every process imports this package."""
    if name in __all__:
        from . import consumer_step

        return getattr(consumer_step, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
