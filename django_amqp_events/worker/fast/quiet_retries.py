"""Skip the traceback of a retry that no result, signal or hook receives.

Celery's tracer copies and formats it, which takes as long as the rest of a run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from celery import Task, signals

from ..billiard_internals import ExceptionWithTraceback
from ..celery_internals import EventTraceInfo, log_retry

#: Celery's own; some monitoring agents replace it.
_ON_RETRY: Final = Task.on_retry


class QuietRetries(EventTraceInfo):
    """Celery's handling of a failed run, without the traceback of a retry."""

    def handle_retry(self, task: Any, req: Any, **kwargs: Any) -> Any:
        if not is_unread(task):
            return super().handle_retry(task, req, **kwargs)
        log_retry(task, req, str(self.retval))
        return SimpleNamespace(exception=ExceptionWithTraceback(self.retval, ""))


def is_unread(task: Any) -> bool:
    """Return True if no result, signal or hook of *task* receives what is known of a retry."""
    return (
        task.handler.ignore_result
        and not signals.task_retry.receivers
        and type(task).on_retry is _ON_RETRY
    )
