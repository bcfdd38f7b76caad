"""What a worker does where RabbitMQ refuses it: a wrong password, a missing vhost, no permissions.

Celery takes that for a connection that was lost and tries again at once, five times a second and
for ever. A worker that was never let in is set up wrongly, and ends. One that was goes on, since
a password or permissions may be changed while it runs; it only asks less and less often.
"""

from __future__ import annotations

import logging
import math
from time import monotonic, sleep
from typing import Any, Final

from amqp.exceptions import AccessRefused
from celery import bootsteps
from celery.exceptions import WorkerShutdown
from celery.worker.state import maybe_shutdown

from ..broker.connection import refusal, urls

logger = logging.getLogger(__name__)

#: Seconds between two tries: doubled from the first to the last, and from the first again when none
#: was refused for twice the last.
PAUSE: Final = (1.0, 30.0)
#: Seconds between looks whether the worker shall end.
LOOK: Final = 0.2


class Login(bootsteps.StartStopStep):
    """Is asked when there is no connection or it broke, and told when there is one."""

    requires = ("celery.worker.consumer.connection:Connection",)
    label = "AMQP events login"

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self._pause, self._last = PAUSE[0], -math.inf
        # With several brokers each attempt begins with the first: another one may let it in.
        self._was_in = len(urls(c.app.conf.broker_read_url)) > 1
        self._before, self._after = (
            c.on_connection_error_before_connected,
            c.on_connection_error_after_connected,
        )
        c.on_connection_error_before_connected = self._not_connected
        c.on_connection_error_after_connected = self._broken
        super().__init__(c, **kwargs)

    def start(self, c: Any) -> None:
        self._was_in = True

    def _not_connected(self, exc: Exception) -> None:
        self._before(exc)
        why = refusal(exc)
        if why is None:
            return
        if not self._was_in:
            logger.critical("this worker does not start: %s", why)
            raise WorkerShutdown(1) from exc
        self._wait(why)

    def _broken(self, exc: Exception) -> None:
        self._after(exc)
        # It is let in, and may not use what a worker needs.
        if isinstance(exc, AccessRefused):
            self._wait(f"{exc.reply_text}: check the user's permissions on this vhost")

    def _wait(self, why: str) -> None:
        now = monotonic()
        if now - self._last > 2 * PAUSE[1]:
            self._pause = PAUSE[0]
        logger.error("%s; the next try is in %g s", why, self._pause)
        until = now + self._pause
        while monotonic() < until:
            maybe_shutdown()
            sleep(LOOK)
        self._pause, self._last = min(2 * self._pause, PAUSE[1]), monotonic()
