"""Let remote control add and cancel the handlers' queues, and stop a worker as a signal does.

Celery would declare such a queue with arguments of its own. RabbitMQ refuses that with 406, and
Celery connects again.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from celery.exceptions import WorkerShutdown
from celery.platforms import EX_OK

from ..logs import get_logger
from .celery_internals import control_command
from .celery_internals import state as worker_state
from .jobs import all_jobs

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


@control_command()
def shutdown(state: Any, msg: str = "Got shutdown from remote", **_: Any) -> None:
    """Shutdown worker(s)."""
    logger.warning("%s", msg)
    if threading.current_thread() is not threading.main_thread():
        # The state belongs to the process: its other workers must keep running.
        raise WorkerShutdown(EX_OK)
    stop = partial(setattr, worker_state, "should_stop", EX_OK)
    jobs = next((jobs for jobs in all_jobs if jobs.c is state.consumer), None)
    if jobs is None:
        stop()
    else:
        jobs.stop_signals.stop(stop)
