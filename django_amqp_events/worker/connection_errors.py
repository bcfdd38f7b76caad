"""React when RabbitMQ refuses a worker: a wrong password, a missing vhost, no permissions.

Celery treats this as a lost connection and retries at once, five times a second and without end.
A worker that was never accepted is configured wrongly, so it ends. One that was accepted before
retries with a growing delay, since a password or permissions may change while it runs.
"""

from __future__ import annotations

import logging
import math
from time import monotonic, sleep
from typing import Any, Final

from amqp.exceptions import AccessRefused
from celery import bootsteps
from celery.exceptions import WorkerShutdown

from ..backoff import Backoff
from ..broker.connection import broker_urls, login_refusal
from .celery_internals import state

logger = logging.getLogger(__name__)

#: Delays before the next try. They restart when twice the longest has passed without a refusal.
BACKOFF: Final = Backoff(1.0, 30.0)
#: Seconds between two checks whether the worker is asked to stop.
STOP_CHECK: Final = 0.2


class Login(bootsteps.StartStopStep):
    """A bootstep that is called when a connection fails, is lost or is established."""

    requires = ("celery.worker.consumer.connection:Connection",)
    label = "AMQP events login"

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self._refusals, self._last = 0, -math.inf
        # With several brokers each attempt begins with the first; another may accept the worker.
        self._was_accepted = len(broker_urls(c.app.conf.broker_read_url)) > 1
        self._before, self._after = (
            c.on_connection_error_before_connected,
            c.on_connection_error_after_connected,
        )
        c.on_connection_error_before_connected = self._not_connected
        c.on_connection_error_after_connected = self._broken
        super().__init__(c, **kwargs)

    def start(self, c: Any) -> None:
        self._was_accepted = True

    def _not_connected(self, exc: Exception) -> None:
        self._before(exc)
        refused = login_refusal(exc)
        if refused is None:
            return
        if not self._was_accepted:
            logger.critical("this worker does not start: %s", refused)
            raise WorkerShutdown(1) from exc
        self._wait(refused)

    def _broken(self, exc: Exception) -> None:
        self._after(exc)
        # The login succeeded, but a permission is missing.
        if isinstance(exc, AccessRefused):
            self._wait(f"{exc.reply_text}: check the user's permissions on this vhost")

    def _wait(self, refused: str) -> None:
        now = monotonic()
        if now - self._last > 2 * BACKOFF.last:
            self._refusals = 0
        wait = BACKOFF.delay(self._refusals)
        logger.error("%s; the next try is in %g s", refused, wait)
        until = now + wait
        while monotonic() < until:
            state.maybe_shutdown()
            sleep(STOP_CHECK)
        self._refusals, self._last = self._refusals + 1, monotonic()
