"""Report handlers that do not end: in the log and by a signal."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Final
from weakref import WeakKeyDictionary

from celery import bootsteps
from django.db import close_old_connections

from .. import signals
from ..conf import get_settings
from ..logs import get_logger
from .delivery import Delivery, Job
from .jobs import all_jobs, title
from .prefetch import HOLDING

logger = get_logger(__name__)

#: Longest time in seconds between two checks.
CHECK_INTERVAL: Final = 5.0
#: Seconds after a handler's time limit in which its pool may end the run.
ENDING: Final = 5.0


class Watch(bootsteps.StartStopStep):
    """A bootstep that checks the running handlers, in a thread of its own.

    It ends no handler: prefork has time limits for that, and other pools cannot.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)
    label = "AMQP events watch"
    #: Seconds after which a run is reported, set by ``events_worker``; 0 for never, ``None`` for
    #: the limit of its handler.
    hang_after: float | None = None

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self._reported: WeakKeyDictionary[Job, float] = WeakKeyDictionary()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(c, **kwargs)

    def start(self, c: Any) -> None:
        if self.hang_after == 0 or (self._thread is not None and self._thread.is_alive()):
            return
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="amqp-events-watch", daemon=True)
        self._thread.start()

    def stop(self, c: Any) -> None:
        """Continue, since a handler that hangs also keeps a warm shutdown from ending."""

    terminate = stop

    def shutdown(self, c: Any) -> None:
        self._stopping.set()

    def limit(self, first: Delivery) -> float:
        """Return the seconds after which a job counts as hanging: a run, or a publish with hooks.

        Args:
            first: its first delivery.
        """
        if self.hang_after:
            return self.hang_after
        handler = first.handler if first.item.runs else None
        if handler and (limit := handler.time_limit or handler.soft_time_limit):
            return limit + ENDING
        return HOLDING * get_settings().consumer_timeout

    def _run(self) -> None:
        interval = min(CHECK_INTERVAL, self.hang_after / 4) if self.hang_after else CHECK_INTERVAL
        while not self._stopping.wait(interval):
            try:
                for jobs in all_jobs:
                    for job in jobs.running.copy():  # the main thread changes it
                        self._check(job)
            except Exception:
                logger.exception("the check for hanging handlers failed; it continues")

    def _check(self, job: Job) -> None:
        """Report a run that exceeds its limit, and again each time its duration has doubled."""
        if job.began is None:
            return
        seconds = time.monotonic() - job.began
        first = job.deliveries[0]
        if seconds < self._reported.get(job, self.limit(first)):
            return
        self._reported[job] = 2 * seconds
        name, event = first.name, first.reading.event
        pid = job.pid or os.getpid()
        logger.error(
            "%s has not ended after %d s, in process %s. Set timeouts on the calls of the handler "
            "and of its hooks and receivers, or a time limit on the handler.",
            title(job.deliveries),
            seconds,
            pid,
            extra=first.log_fields,
        )
        close_old_connections()
        signals.event_hanging.send_robust(
            get_settings().service, handler=name, event=event, seconds=seconds, pid=pid
        )
        close_old_connections()
