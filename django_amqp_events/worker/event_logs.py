"""Keep Celery's tracer from logging the failure of an event.

An event that will be archived is logged with its traceback when RabbitMQ has confirmed the archive
message; a retry is no error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


@contextmanager
def running() -> Iterator[None]:
    """Mark this thread as running a handler."""
    _thread.runs = True
    try:
        yield
    finally:
        _thread.runs = False


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or not getattr(_thread, "runs", False)


logging.getLogger("celery.app.trace").addFilter(_is_wanted)
