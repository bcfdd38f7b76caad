"""The fields that log records about an event have: ``event_id``, ``event_name``, ``handler``,
``attempt`` and ``correlation_id``; ``None`` where unknown."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, ClassVar, Final

from billiard.exceptions import SoftTimeLimitExceeded
from celery import current_task
from django.db import close_old_connections

from .context import ReceivedEvent
from .message.headers import EVENT_ATTEMPT, EVENT_CORRELATION_ID, EVENT_HANDLER
from .message.types import Message

#: Longest time in seconds to wait for log handlers when a worker stops.
STOPPING_SECONDS: Final = 5.0
#: Longest time in seconds that a fork waits until a record is written. A handler that takes longer
#: uses the network, not a file.
FORK_SECONDS: Final = 0.2


def event_fields(event: ReceivedEvent | None, handler: str | None = None) -> dict[str, Any]:
    """Return the fields of an event, and of a handler that receives it."""
    return {
        "event_id": event.id if event else None,
        "event_name": event.name if event else None,
        "handler": handler,
        "attempt": event.attempt if event and handler else None,
        "correlation_id": event.correlation_id if event else None,
    }


def message_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message that is published."""
    return {
        "event_id": message.event_id,
        "event_name": message.name,
        "handler": message.headers.get(EVENT_HANDLER),
        "attempt": message.headers.get(EVENT_ATTEMPT),
        "correlation_id": message.headers.get(EVENT_CORRELATION_ID),
    }


class LoopRecords:
    """Handle the records of a process with an event loop in a thread.

    The loop must not wait for a log handler. The process is not forked while a record is written to
    a file: its child would wait forever for the file's lock.
    """

    #: Of the loops in this process, of which the first handles the records of all threads.
    running: ClassVar[list[LoopRecords]] = []
    _held: ClassVar[dict[int, list[LoopRecords]]] = {}

    def __init__(self) -> None:
        self._records: SimpleQueue[logging.LogRecord | None] = SimpleQueue()
        self._handling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="amqp-events-log", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.running.append(self)

    def stop(self) -> None:
        """Wait until the records are handled, for some seconds at most."""
        with suppress(ValueError):  # in a forked process
            self.running.remove(self)
        self._records.put(None)
        self._thread.join(STOPPING_SECONDS)

    def put(self, record: logging.LogRecord) -> None:
        self._records.put(record)

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                with self._handling:
                    logging.getLogger(record.name).handle(record)
            except Exception:  # noqa: BLE001 - a handler or filter of the project may raise anything
                _print_error()
            with suppress(Exception):  # a log handler may use a database
                close_old_connections()

    @classmethod
    def before_fork(cls) -> None:
        held = [loop for loop in cls.running if loop._handling.acquire(timeout=FORK_SECONDS)]  # noqa: SLF001
        cls._held[threading.get_ident()] = held

    @classmethod
    def after_fork(cls) -> None:
        for loop in cls._held.pop(threading.get_ident(), ()):
            loop._handling.release()  # noqa: SLF001


os.register_at_fork(
    before=LoopRecords.before_fork,
    after_in_parent=LoopRecords.after_fork,
    # A pool process has no such thread.
    after_in_child=LoopRecords.running.clear,
)


class _RecordLogger(logging.Logger):
    """Hands records to the logger of the same name, here or in the thread of a loop."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._named = logging.getLogger(name)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - its name in logging
        return self._named.isEnabledFor(level)

    def makeRecord(self, *args: Any, **options: Any) -> logging.LogRecord:  # noqa: N802
        return self._named.makeRecord(*args, **options)

    def handle(self, record: logging.LogRecord) -> None:
        loop = next(iter(LoopRecords.running), None)
        if loop is None or threading.current_thread() is loop._thread:  # noqa: SLF001
            self._named.handle(record)
        else:
            loop.put(record)


class _Logger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        options["stacklevel"] = options.get("stacklevel", 1) + 1  # that of the caller
        try:
            super().log(level, msg, *args, **options)
        except SoftTimeLimitExceeded:
            raise  # of the run, which a signal handler has interrupted
        except Exception:  # noqa: BLE001 - a handler or filter of the project may raise anything
            _print_error()


def _print_error() -> None:
    # A worker's stderr is a logger.
    with suppress(Exception):
        traceback.print_exc()


def get_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger that raises no error: no record decides what becomes of an event."""
    return _Logger(_RecordLogger(name))


class EventFilter(logging.Filter):
    """Give every record the fields of the running handler's event, including Celery's own records.

    For handlers of logging, not for loggers::

        "filters": {"event": {"()": "django_amqp_events.logs.EventFilter"}},
        "handlers": {"console": {"class": "logging.StreamHandler", "filters": ["event"]}},
    """

    def filter(self, record: logging.LogRecord) -> bool:
        # Not by the task's attribute, which a class of the project may have for itself.
        event = getattr(getattr(current_task, "request", None), "amqp_event", None)
        handler = current_task.name if event else None
        for name, value in event_fields(event, handler).items():
            record.__dict__.setdefault(name, value)
        return True
