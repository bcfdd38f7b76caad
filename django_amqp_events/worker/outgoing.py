"""Build the message that a verdict publishes, and announce the verdict.

The worker and the in-memory broker share this module. Pure except for the log and signals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from .. import signals
from ..broker.topology import Names
from ..conf import Settings
from ..declare.retry_policy import hop
from ..logs import get_logger
from ..message import archive_message, encoding, text
from ..message.types import Message, Progress
from .reading import Reading
from .verdict import Verdict

logger = get_logger(__name__)


def needs_message(reading: Reading, verdict: Verdict) -> bool:
    """Return True if a message is to be published for a verdict, before the ack."""
    if verdict.kind == "handled":
        return reading.event is not None and bool(reading.event.replay_id)
    return verdict.kind != "requeue"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessages:
    """Builds the message that a verdict publishes. Pure; the time is an argument.

    Attributes:
        worker: name of the worker, for history and archive.
        delays: the declared delays in seconds.
    """

    settings: Settings
    names: Names
    delays: tuple[int, ...]
    worker: str

    def build(self, reading: Reading, verdict: Verdict, now: datetime) -> Message:
        """Return the message of a verdict that needs one."""
        event, handler, progress = reading.event, reading.handler, reading.progress
        if verdict.failure is not None and handler is not None:
            history = encoding.add_to_history(progress, verdict.failure, at=now, worker=self.worker)
            progress = replace(progress, history=history)
        if verdict.kind == "retry":
            progress = replace(progress, attempt=progress.attempt + 1, due_at=verdict.due_at)
            return self._delayed(reading, progress, now)
        if verdict.kind == "postpone":
            return self._delayed(reading, progress, now)
        if verdict.kind == "archive":
            return archive_message.build(
                reading.received,
                exchange=self.names.archive,
                reason=verdict.reason,
                detail=verdict.detail,
                at=now,
                worker=self.worker,
                service=self.settings.service,
                event=event,
                progress=progress,
                handler=handler.name if handler else progress.handler,
                failure=verdict.failure,
            )
        event, handler = reading.known
        return archive_message.build_outcome(
            event,
            exchange=self.names.archive,
            handler=handler.name,
            service=self.settings.service,
            outcome=verdict.reason or "succeeded",
            at=now,
            worker=self.worker,
        )

    def _delayed(self, reading: Reading, progress: Progress, now: datetime) -> Message:
        """Return the message that delays an event until the due time of *progress*."""
        event, handler = reading.known
        due_at = progress.due_at or now
        seconds = hop((due_at - now).total_seconds(), self.delays)
        return encoding.retry_message(
            reading.received,
            event,
            exchange=self.names.delay(seconds),
            routing_key=reading.home or handler.key,
            service=self.settings.service,
            handler=handler.name,
            attempt=progress.attempt,
            due_at=due_at,
            replay_id=event.replay_id,
            history=progress.history,
        )


#: Kinds of verdicts with a signal.
ANNOUNCED: Final = frozenset({"retry", "archive"})


def announce(service: str, reading: Reading, verdict: Verdict) -> None:
    """Log an archived event with its traceback; send the signal of a retry or archived event.

    Args:
        verdict: one of :data:`ANNOUNCED`.
    """
    exception = verdict.failure.first_line if verdict.failure else verdict.detail
    handler = reading.handler.name if reading.handler else None
    extra: dict[str, Any]
    if verdict.kind == "retry":
        signal, extra = signals.event_retried, {"due_at": verdict.due_at}
    else:
        signal, extra = signals.event_archived, {"reason": verdict.reason}
        cause = exception or verdict.detail
        if verdict.failure is not None and verdict.failure.traceback:
            cause = f"{cause}\n{verdict.failure.traceback.rstrip()}"
        # Escaped line by line: an exception's text may contain a publisher's data.
        cause = "\n".join(map(text.printable, cause.split("\n")))
        about = {
            **reading.log_fields,
            "archive_reason": verdict.reason,
            "archive_exception": verdict.failure.exception if verdict.failure else None,
        }
        logger.error("archived %s (%s): %s", reading.title, verdict.reason, cause, extra=about)
    signal.send_robust(service, handler=handler, event=reading.event, exception=exception, **extra)
