"""The loop of the relay, the mirror, the batch runner, the snapshots and the companion."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError
from django.db import Error, close_old_connections, connections

from . import liveness
from .backoff import Backoff
from .databases import error_line, problem_text
from .exceptions import AmqpEventsError, BrokerUnavailableError, ConfigurationError
from .logs import get_logger

#: Delays between retries; jitter shortens each by up to a half.
BACKOFF: Final = Backoff(0.5, 30.0)
#: Seconds between polls of ``stop`` during a wait.
POLL_INTERVAL: Final = 0.1

logger = get_logger(__name__)


def sleep(seconds: float, stop: Callable[[], bool]) -> None:
    """Wait for *seconds*, or until *stop* returns True."""
    end = time.monotonic() + seconds
    while not stop() and (left := end - time.monotonic()) > 0:
        time.sleep(min(POLL_INTERVAL, left))


class ServiceLoop:
    """Repeats a step until it is stopped; retries it after an error of the broker or database.

    Reports an error when it first occurs and when it is over, not at each retry.

    Args:
        part: the name in ``events_health``, if it examines the loop.
        work: names the work in reports, as in "mirroring billing:archive".
        tell: receives the reports, each a line of text.
        stop: returns True to end the loop.
        errors: what is retried.
        fatal: what ends the loop instead, because a retry would fail again.
    """

    def __init__(
        self,
        *,
        part: str = "",
        work: str,
        tell: Callable[[str], object],
        stop: Callable[[], bool],
        errors: tuple[type[Exception], ...] = (Error, AmqpEventsError),
        fatal: tuple[type[Exception], ...] = (ConfigurationError,),
    ) -> None:
        self.work = work
        self.tell = tell
        self.errors = errors
        self.fatal = fatal
        self.failures = 0
        self._stop = stop
        self._reported = self._told = ""
        self._part = liveness.Part(part, lambda: self._told)

    def stop(self) -> bool:
        """Return True if the loop is to end, and record that it turns; a long step polls it."""
        self._part.turn()
        return self._stop()

    def leave(self) -> None:
        """Record no turns until the step ends: it has a loop of its own."""
        self._part.end()

    def run(self, step: Callable[[], float | None]) -> None:
        """Call *step* until it returns ``None`` or :meth:`stop` returns True.

        Args:
            step: does a part of the work and returns the seconds until the next part.

        Raises:
            Exception: one of :attr:`fatal`, or one that is not in :attr:`errors`.
        """
        try:
            self._run(step)
        finally:
            self._part.end()

    def _run(self, step: Callable[[], float | None]) -> None:
        while not self.stop():
            try:
                # On every alias: a receiver of a signal may have lost the connection of another.
                close_old_connections()
                wait = step()
            except self.fatal:
                raise
            except self.errors as exc:
                connections.close_all()
                self._report(exc)
                # Processes that one restart has disconnected do not return at the same moment.
                wait = BACKOFF.delay(self.failures) * random.uniform(0.5, 1)
                self.failures += 1
            else:
                self.recovered()
            if wait is None:
                return
            sleep(wait, self.stop)

    def recovered(self) -> None:
        """Report the end of an error, if there was one; a long step calls it itself."""
        if self.failures:
            self.tell(f"{self.work} has resumed")
        self.failures, self._reported, self._told = 0, "", ""

    def _report(self, exc: Exception) -> None:
        text = error_line(exc)
        if text == self._reported:
            return
        self._reported = text
        cause = exc.__cause__ if isinstance(exc, CommandError) else exc
        if isinstance(cause, Error):
            what = problem_text(cause)
        elif isinstance(cause, BrokerUnavailableError):
            what = "RabbitMQ is unreachable"
        else:
            what = "an error occurred"
            if not isinstance(exc, (AmqpEventsError, ImproperlyConfigured, CommandError)):
                logger.error("%s failed", self.work, exc_info=exc)
        self._told = f"{self.work} is paused: {what} ({text})"
        self.tell(f"{self._told}; nothing is lost, retrying at least every {BACKOFF.last:g} s")
