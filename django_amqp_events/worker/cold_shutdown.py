"""Begin a cold shutdown only when the event loop is between two callbacks.

Celery stops the pool in the signal handler, which waits for whatever the signal has interrupted,
and so for ever. In prefork, the event loop may be writing a job to a pool process that waits for
the rest of it (one in 25 cold shutdowns under load, and every one during the write of a large
body). In threads, the interrupted callback may hold the lock of the executor that is shut down.
Observed with Celery 5.7: prefork on Python 3.11, threads on 3.11 and 3.13.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar, Final

from celery.concurrency import prefork, thread
from celery.signals import worker_ready

from .billiard_internals import finish_writes
from .celery_internals import event_loop_is_busy

Handler = Callable[[int, FrameType | None], Any]

#: The number of the signal that shuts down at once.
FORCING_SIGNAL: Final = 3
STDERR: Final = 2
#: Written without a logger, whose lock the interrupted code may hold.
IN_PROGRESS: Final = b"The cold shutdown is in progress; a third signal forces it.\n"


def connect() -> None:
    """Connect Celery's signal that this worker is ready."""
    worker_ready.connect(_install, dispatch_uid="django_amqp_events.stopping", weak=False)


def _install(sender: Any, **_: Any) -> None:
    """Replace the handlers of the signals that request a cold shutdown."""
    consumer = sender
    if consumer.hub is None or not isinstance(consumer.pool, (prefork.TaskPool, thread.TaskPool)):
        return  # solo has no pool to wait for
    for number in (signal.SIGQUIT, signal.SIGTERM):
        handler = signal.getsignal(number)
        cold = number == signal.SIGQUIT or os.environ.get("REMAP_SIGTERM") == "SIGQUIT"
        # worker_ready is sent again after each lost connection.
        if cold and callable(handler) and not isinstance(handler, ColdShutdown):
            signal.signal(number, ColdShutdown(consumer, handler))


class ColdShutdown:
    """A signal handler that calls Celery's own between two callbacks of the event loop.

    While the loop does not run, as during a connection attempt, it is called at once. A second
    signal that arrives before that changes nothing. A third one calls it at once, and after that
    Celery's own handlers are in force.
    """

    #: Number of signals, and the handlers that wait for the loop's next turn.
    _signals: ClassVar[int] = 0
    _waiting: ClassVar[set[ColdShutdown]] = set()

    def __init__(self, consumer: Any, handler: Handler) -> None:
        self._consumer = consumer
        self._handler = handler
        self._arguments: tuple[int, FrameType | None] = (0, None)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        ColdShutdown._signals += 1
        self._arguments = (number, frame)
        if ColdShutdown._signals >= FORCING_SIGNAL:
            self._waiting.clear()
            self._handler(number, frame)
        elif ColdShutdown._signals > 1:
            # Celery replaces sys.stderr by a logger; and a closed one must not raise here.
            with suppress(OSError):
                os.write(STDERR, IN_PROGRESS)
        elif event_loop_is_busy(frame):
            self._waiting.add(self)
            # Not call_soon, whose lock the interrupted code may hold.
            self._consumer.hub.on_tick.add(self.begin_waiting)
        else:
            self._shut_down()

    @classmethod
    def begin_waiting(cls) -> None:
        """Begin the shutdown that waits, at the loop's next turn or when the loop has ended."""
        while cls._waiting:
            cls._waiting.pop()._shut_down()  # noqa: SLF001 - its own

    def _shut_down(self) -> None:
        if isinstance(self._consumer.pool, prefork.TaskPool):
            finish_writes(self._consumer.pool)
        self._handler(*self._arguments)
