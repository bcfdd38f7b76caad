"""Reapers, and workers that are restarted when they die."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .harness import (
    Eyes,
    Worker,
)


def fewer_deliveries(eyes: Eyes, pattern: str, deliveries: int) -> None:
    """Let queues move a message to the graveyard sooner: the lower of argument and policy counts.

    For tests in which each delivery takes a worker's whole life; that there are six without it is
    proven elsewhere.
    """
    eyes.http(
        "PUT",
        "/api/policies/{vhost}/fewer-deliveries",
        {
            "pattern": pattern,
            "apply-to": "queues",
            "definition": {"delivery-limit": deliveries - 1},
        },
    )


class Supervisor:
    """Starts a worker again when it has died, as systemd or Kubernetes would."""

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self.workers = [start()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            if not self.workers[-1].alive:
                self.workers[-1].kill()  # what is left of its group
                self.workers.append(self._start())

    @property
    def deaths(self) -> int:
        return len(self.workers) - 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def kill(self) -> None:
        """End it and its worker, which nothing is left for."""
        self.end()
        self.workers[-1].kill()
