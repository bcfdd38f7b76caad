"""Send Celery's task events for events, while a worker has them on (``-E``)."""

from __future__ import annotations

from typing import Any

from .delivery import Delivery
from .verdict import Verdict


class TaskEvents:
    """Sends the task events of deliveries.

    Args:
        c: Celery's consumer, whose event dispatcher a connection renews.
    """

    def __init__(self, c: Any) -> None:
        self._c = c

    @property
    def on(self) -> bool:
        """Whether task events are sent; remote control changes it."""
        dispatcher = self._c.event_dispatcher
        if dispatcher is None or not dispatcher.enabled:
            return False
        return not dispatcher.groups or "task" in dispatcher.groups  # others: heartbeats only

    def received(self, delivery: Delivery) -> None:
        if not self.on or not (headers := delivery.headers()):
            return
        self._send(
            "task-received",
            delivery,
            headers,
            name=delivery.name,
            args=headers["argsrepr"],
            kwargs=headers["kwargsrepr"],
            root_id=headers["root_id"],
            parent_id=headers["parent_id"],
            retries=headers["retries"],
            eta=None,
            expires=None,
        )

    def ended(self, delivery: Delivery, verdict: Verdict) -> None:
        """Report a run by its verdict."""
        if verdict.kind == "handled" and verdict.runtime is not None:
            self.send("task-succeeded", delivery, result=verdict.result, runtime=verdict.runtime)
        elif verdict.kind in ("retry", "archive") and verdict.failure is not None:
            self.send(
                "task-retried" if verdict.kind == "retry" else "task-failed",
                delivery,
                exception=verdict.failure.representation,
                traceback=verdict.failure.traceback,
            )

    def send(self, kind: str, delivery: Delivery, **fields: Any) -> None:
        """Send an event of a delivery, unless it cannot be handled and has no task."""
        if self.on and (headers := delivery.headers()):
            self._send(kind, delivery, headers, **fields)

    def _send(self, kind: str, delivery: Delivery, headers: dict[str, Any], **fields: Any) -> None:
        if delivery.task.send_events:
            self._c.event_dispatcher.send(kind, uuid=headers["id"], **fields)
