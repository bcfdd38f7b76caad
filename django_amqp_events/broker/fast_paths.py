"""Which of the optional fast paths this process uses, and why not.

``FAST_PATHS`` switches each of them off. A fast path also needs private names of a library, and
without one of them it is switched off with one log line.
"""

from __future__ import annotations

from typing import Final

from django.db import connections

from ..conf import Settings
from .private_names import PrivateName, unavailable

_READ: Final = "read in large pieces"

#: The library and its names that a fast path needs.
NEEDS: Final[dict[str, tuple[str, tuple[PrivateName, ...]]]] = {
    "reads": ("amqp", (
        PrivateName("amqp.connection:Connection._transport", _READ),
        PrivateName("amqp.transport:_AbstractTransport._read_buffer", _READ),
        PrivateName("amqp.transport:_AbstractTransport.having_timeout", _READ, ("self", "timeout")),
    )),
    "acks": ("amqp", (PrivateName("amqp.connection:Connection.bytes_sent", "ack in batches"),)),
    "deletes": ("", ()),
    "chunks": ("kombu", (
        PrivateName("kombu.asynchronous.semaphore:LaxBoundedSemaphore._waiting", "share processes"),
    )),
    "retries": ("celery", (
        PrivateName("celery.app.trace:TraceInfo.handle_retry", "skip the traceback of a retry",
                    ("self", "task", "req", "store_errors", "kwargs"), overridden=True),
        PrivateName("celery.app.trace:get_task_name", "log a retry", ("request", "default")),
        PrivateName("celery.app.trace:info", "log a retry", ("fmt", "context")),
        PrivateName("celery.app.trace:LOG_RETRY", "log a retry"),
    )),
}  # fmt: skip


def why_unused(path: str, settings: Settings, *, alias: str = "") -> str:
    """Return why this process does not use a fast path, ``""`` if it does.

    Args:
        alias: the database of an outbox, by default that of ``DATABASE``.
    """
    if path not in settings.fast_paths:
        return "FAST_PATHS does not name it"
    if path == "deletes" and connections[alias or settings.database].vendor != "postgresql":
        return "the outbox is not in PostgreSQL"
    library, names = NEEDS[path]
    return unavailable(library, f"the fast path {path!r}", names)
