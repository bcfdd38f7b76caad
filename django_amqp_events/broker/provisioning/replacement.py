"""Delete and recreate queues that are empty, without losing a message.

RabbitMQ answers 540 to ``if_empty`` and ``if_unused`` deletes of quorum queues, and a dead letter
that is stuck is neither ready nor unacked: only the management API's *total* shows it. So a queue
is first unbound, then watched until statistics **from after that** show that it is empty.

The age of statistics: a quorum queue reports on a tick (5 s by default) together with its process's
number of reductions, which each tick raises; the management plugin collects on an interval of its
own. When the reductions of a queue have changed twice since it was unbound, the second change is a
tick from after it. This does not depend on the intervals.

A queue of the infrastructure can be recreated: workers keep what they publish to it meanwhile, and
try again. A handler's queue would miss events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from amqp import exceptions as amqp_errors

from ...message.text import counted
from ..topology import Binding, Queue, Topology
from .amqp_api import Amqp, to_bind, to_declare, to_unbind
from .inspection import some
from .management_api import ManagementApi

QUEUE_CHECK_SECONDS: Final = 0.5
STATISTICS_TIMEOUT: Final = 60.0


@dataclass(slots=True)
class _Watched:
    """A queue that was unbound, and the changes of its statistics since."""

    name: str
    bindings: list[Binding]
    reductions: Any = None
    changes: int = -1

    def is_fresh(self, statistics: Mapping[str, Any]) -> bool:
        """Return True if these statistics are from after the unbinding."""
        if "messages" not in statistics:
            return False
        if statistics.get("reductions") != self.reductions:
            self.reductions = statistics.get("reductions")
            self.changes += 1
        # Idle classic queues do not tick, but RabbitMQ checks that they are empty on deletion.
        return self.changes >= 2 or statistics.get("type") == "classic"


@dataclass(slots=True, kw_only=True)
class Replacement:
    """Deletes and recreates queues of one topology.

    Args:
        progress: called often, with a sentence about what it waits for.
    """

    topology: Topology
    session: Amqp
    api: ManagementApi
    progress: Callable[[str], object]

    def delete(self, queues: Mapping[str, Queue | None]) -> dict[str, str]:
        """Delete queues that are empty and unused, and declare them again.

        Args:
            queues: by name; ``None`` for one that is not declared again.

        Returns:
            the reason for each queue that was kept, by its name; its bindings are restored.
        """
        watched: list[_Watched] = []
        refused: dict[str, str] = {}
        bindings = self.api.bindings()
        for name in queues:
            if reason := self._occupied(name, {}):
                refused[name] = reason
            else:
                watched.append(_Watched(name, [one for one in bindings if one.queue == name]))
        kept = list(watched)
        try:
            for queue in watched:
                self.session.carry_out(*map(to_unbind, queue.bindings))
            for queue, occupied in self._vacated(watched):
                declared = queues[queue.name]
                if reason := occupied or self._drop(queue.name):
                    refused[queue.name] = reason
                    continue
                kept.remove(queue)
                if declared is not None:
                    own = [one for one in self.topology.bindings if one.queue == declared.name]
                    self.session.carry_out(to_declare(declared), *map(to_bind, own))
        finally:
            # Also after an error or a signal, which may have come after the deletion of one.
            for queue in kept:
                with suppress(amqp_errors.ChannelError):
                    self.session.carry_out(*map(to_bind, queue.bindings))
        return refused

    def _vacated(self, watched: Sequence[_Watched]) -> list[tuple[_Watched, str]]:
        """Wait for statistics from after unbinding; return each queue and why it is in use."""
        done: list[tuple[_Watched, str]] = []
        waiting = list(watched)
        started = time.monotonic()
        while waiting:
            names = some([queue.name for queue in waiting])
            self.progress(f"waiting for fresh statistics of {names}")
            elapsed = time.monotonic() - started
            for queue in list(waiting):
                reason = self._verdict(queue, elapsed)
                if reason is not None:
                    waiting.remove(queue)
                    done.append((queue, reason))
            if waiting:
                time.sleep(QUEUE_CHECK_SECONDS)
        return done

    def _verdict(self, queue: _Watched, elapsed: float) -> str | None:
        """Return why a queue is in use, ``""`` if it is not, ``None`` if that is not known yet."""
        statistics = self.api.queue(queue.name)
        if statistics is None:
            return ""
        if queue.is_fresh(statistics):
            return self._occupied(queue.name, statistics)
        if occupied := self._occupied(queue.name, {}):
            return occupied
        if elapsed > STATISTICS_TIMEOUT:
            return "the management API shows no fresh statistics of it"
        return None

    def _occupied(self, name: str, statistics: Mapping[str, Any]) -> str:
        """Return why a queue cannot be deleted, ``""`` if it is empty and unused."""
        depth = self.session.depth(name)
        if depth is not None and depth.consumers:
            return f"{counted(depth.consumers, 'consumer')}: stop its workers first"
        messages = max(depth.ready if depth else 0, statistics.get("messages") or 0)
        if messages:
            return (
                f"it holds {counted(messages, 'message')}; wait until they are handled, or run "
                f"`manage.py events_recover {name}`"
            )
        return ""

    def _drop(self, name: str) -> str:
        """Delete an empty queue; return why it was kept, ``""`` if it was not."""
        statistics = self.api.queue(name) or {}
        if occupied := self._occupied(name, {}):
            return occupied
        # Quorum queues answer 540 to these flags, which closes the connection.
        careful = statistics.get("type") == "classic"
        try:
            self.session.call(
                lambda channel: channel.queue_delete(name, if_unused=careful, if_empty=careful)
            )
        except amqp_errors.PreconditionFailed as exc:
            return f"RabbitMQ refused: {exc.reply_text}"
        return ""
