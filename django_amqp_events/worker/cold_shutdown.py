"""Cold shutdown: not in the middle of what the worker's main thread is at.

Celery stops the pool within the signal handler, which waits for what the signal has interrupted,
and so for ever. In prefork it may find the event loop handing an event to a pool process, which has
half of it and waits for the rest (one in 25 cold shutdowns under load, and each one while a large
body is handed over); in threads it may find the lock taken of the executor that it shuts down. Seen
with Celery 5.7: prefork on Python 3.11, threads on 3.11 and 3.13.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from inspect import GEN_SUSPENDED, getgeneratorstate
from types import FrameType
from typing import Any, ClassVar, Final

from celery.concurrency import prefork, thread
from celery.signals import worker_ready
from kombu.asynchronous.hub import Hub
from kombu.utils import eventio

Handler = Callable[[int, FrameType | None], Any]

#: The signal that does not wait for what the first one waits for.
IMPATIENCE: Final = 3
STDERR: Final = 2
#: Not by a logger, whose lock may be held by whom the signal interrupts.
UNDER_WAY: Final = b"The cold shutdown is under way; a third signal waits for nothing.\n"


def connect() -> None:
    """Connect the signal of this worker."""
    worker_ready.connect(_install, dispatch_uid="django_amqp_events.stopping", weak=False)


def _install(sender: Any, **_: Any) -> None:
    """Take over the signals whose handler shuts down cold."""
    consumer = sender
    if consumer.hub is None or not isinstance(consumer.pool, (prefork.TaskPool, thread.TaskPool)):
        return  # solo: nobody is waited for
    for number in (signal.SIGQUIT, signal.SIGTERM):
        handler = signal.getsignal(number)
        cold = number == signal.SIGQUIT or os.environ.get("REMAP_SIGTERM") == "SIGQUIT"
        # Sent again after each lost connection.
        if cold and callable(handler) and not isinstance(handler, ColdShutdown):
            signal.signal(number, ColdShutdown(consumer, handler))


class ColdShutdown:
    """Celery's handler of a signal, called between two turns of the event loop.

    Where there is no loop, as while a connection is made: at once. A second signal that comes
    before the first one has had its turn changes nothing, a third one calls the handler at once;
    from then on Celery's own handlers are in force.
    """

    #: How many cold signals came, and what is put off.
    _signals: ClassVar[int] = 0
    _put_off: ClassVar[set[ColdShutdown]] = set()

    def __init__(self, consumer: Any, handler: Handler) -> None:
        self._consumer = consumer
        self._handler = handler
        self._asked: tuple[int, FrameType | None] = (0, None)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        ColdShutdown._signals += 1
        self._asked = (number, frame)
        if ColdShutdown._signals >= IMPATIENCE:
            self._put_off.clear()
            self._handler(number, frame)
        elif ColdShutdown._signals > 1:
            # Celery's sys.stderr is a logger; and where nobody reads it, nothing may be raised.
            with suppress(OSError):
                os.write(STDERR, UNDER_WAY)
        elif _is_at_work(frame):
            self._put_off.add(self)
            # Not call_soon: its lock may be held by whom the signal interrupts.
            self._consumer.hub.on_tick.add(self.go_on)
        else:
            self._shut_down()

    @classmethod
    def go_on(cls) -> None:
        """Do what was put off: at the loop's next turn, or when it is left."""
        while cls._put_off:
            cls._put_off.pop()._shut_down()  # noqa: SLF001 - its own

    def _shut_down(self) -> None:
        if isinstance(self._consumer.pool, prefork.TaskPool):
            finish_writes(self._consumer.pool._pool)  # noqa: SLF001 - it has no other name
        self._handler(*self._asked)


def _is_at_work(frame: FrameType | None) -> bool:
    """Say whether the event loop runs a callback, and does not wait for the next one."""
    while frame is not None:
        if frame.f_globals.get("__name__") == eventio.__name__:
            return False
        if frame.f_code is Hub.create_loop.__code__:
            return True
        frame = frame.f_back
    return False


def finish_writes(pool: Any) -> None:
    """Write the rest of what pool processes have a part of; what is not begun may be left."""
    for job in tuple(pool._cache.values()):  # noqa: SLF001
        writer = getattr(job, "_writer", None)
        write = writer() if writer is not None else None
        if write is not None and getgeneratorstate(write) == GEN_SUSPENDED:
            pool._flush_writer(job._write_to, write)  # noqa: SLF001
