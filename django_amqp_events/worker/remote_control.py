"""Let remote control add and cancel the handlers' queues.

Celery would declare such a queue with arguments of its own. RabbitMQ refuses that with 406, and
Celery connects again.
"""

from __future__ import annotations

from typing import Any

from ..logs import get_logger

logger = get_logger(__name__)


def replace(step: Any) -> None:
    """Handle ``add_consumer`` and ``cancel_consumer`` for the queues of a step."""
    c = step.c
    add, cancel = c.add_task_queue, c.cancel_task_queue
    known = step.known(step.settings, step.registry)

    def add_task_queue(queue: str, *args: Any, **kwargs: Any) -> None:
        if queue not in known:
            add(queue, *args, **kwargs)
            return
        if step.unsupported:
            logger.error("not consuming %r: %s", queue, step.unsupported)
            return
        step.queues.add(queue)
        logger.info("consuming %r by remote control", queue)
        if step.channel is None:
            c.call_soon(step.open)
        else:
            step.consume(queue)

    def cancel_task_queue(queue: str) -> None:
        if queue not in known:
            cancel(queue)
            return
        step.forget(queue)
        logger.info("no longer consuming %r by remote control", queue)

    c.add_task_queue, c.cancel_task_queue = add_task_queue, cancel_task_queue
