"""Let remote control add, cancel and list the handlers' queues.

Celery would declare such a queue with arguments of its own. RabbitMQ refuses that with 406, and
Celery connects again.
"""

from __future__ import annotations

from typing import Any

from kombu import Exchange, Queue

from ..logs import get_logger
from .celery_internals import mailbox_of

logger = get_logger(__name__)


def replace(step: Any) -> None:
    """Handle ``add_consumer`` and ``cancel_consumer`` for the queues of a step, and list them."""
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
    node = mailbox_of(c)
    if node is None or (celerys := node.handlers.get("active_queues")) is None:
        return

    def active_queues(state: Any) -> list[dict[str, Any]]:
        return [*celerys(state), *(queue.as_dict(recurse=True) for queue in _queues(step))]

    # A copy: Celery's is one for all workers of a process.
    node.handlers = {**node.handlers, "active_queues": active_queues}


def _queues(step: Any) -> list[Queue]:
    arguments = {queue.name: dict(queue.arguments) for queue in step.topology.queues}
    patterns = {
        name: [pattern for handler in handlers for pattern in handler.bindings]
        for name, handlers in step.registry.by_queue().items()
    }
    return [
        Queue(
            name,
            Exchange(step.names.events, "topic"),
            routing_key=next(iter(patterns.get(name, ())), ""),
            queue_arguments=arguments.get(name),
        )
        for name in sorted(step.consumed)
    ]
