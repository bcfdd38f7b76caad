"""The result backend of handlers, whose errors are logged: no result decides what becomes of an
event, or which signals and hooks are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from billiard.exceptions import SoftTimeLimitExceeded

from ..logs import event_fields, get_logger

logger = get_logger(__name__)

#: The methods with which Celery and a handler write to a backend.
WRITES: Final = frozenset(
    {
        "mark_as_done",
        "mark_as_failure",
        "mark_as_retry",
        "mark_as_started",
        "process_cleanup",
        "store_result",
    }
)


class ResultStore:
    """A result backend whose writes never fail."""

    def __init__(self, task: Any, backend: Any) -> None:
        self._task = task
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        if name not in WRITES:
            return attribute
        # Kept, since Celery reads it for each run.
        guarded = self.__dict__[name] = self._guarded(name, attribute)
        return guarded

    def _guarded(self, name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(write)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            except SoftTimeLimitExceeded:
                raise  # of the run, which a signal handler has interrupted
            except Exception as exc:  # noqa: BLE001 - a backend may raise anything
                logger.error(  # noqa: TRY400 - its traceback ends in a client library
                    "the result store failed (%s of %s): %r. The event is not affected",
                    name,
                    self._task.name,
                    exc,
                    extra=event_fields(
                        getattr(self._task.request, "amqp_event", None), self._task.name
                    ),
                )
            return None

        return guarded
