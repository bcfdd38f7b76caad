"""Take only as many events from the queues as can begin in time."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from ..declare.registry import Registry
from ..message.text import counted
from ..message.types import Received
from .celery_internals import state
from .dispatch import Delivery
from .prefetch import LONG_SECONDS, WAITING, Load, Window, longest_wait, run_limit, window
from .request import EventRequest

if TYPE_CHECKING:
    from .queue_step import QueueStep

logger = logging.getLogger(__name__)

#: Celery's default prefetch count for each process.
DEFAULT_MULTIPLIER: Final = 4
#: Weight of the last run in a handler's average.
WEIGHT: Final = 0.1
#: Seconds after the last run of a short handler for which long ones leave a process free.
SHORT_SECONDS: Final = 10.0
#: Earlier deliveries of an event that let a worker hold few events, and for how long (seconds): if
#: it dies once more, fewer are delivered again.
OFTEN, CALM_SECONDS = 2, 60.0
#: Seconds after a turn in which a handler's first run alone causes no other turn.
PAUSE: Final = 0.05
#: Longest time in seconds between two turns, and its part of the time that an event may wait.
TURN, TURN_PART = 1.0, 1 / 4


class Intake:
    """The prefetch counts of a worker's queues, adapted to how long its handlers run.

    A count applies to new consumers. A queue with a count of 0 has no consumer, so its events wait
    on the broker, for other workers too.

    Args:
        step: consumes the queues.
        timeout: RabbitMQ's consumer timeout in seconds.
        turn_soon: schedules a call of :meth:`turn` in the main thread.
    """

    def __init__(
        self, step: QueueStep, registry: Registry, timeout: float, turn_soon: Callable[[], object]
    ) -> None:
        self._step = step
        self._turn_soon = turn_soon
        self._c = step.c
        self._handlers = {
            queue: [handler.name for handler in handlers]
            for queue, handlers in registry.by_queue().items()
        }
        self._queues = {name: queue for queue, names in self._handlers.items() for name in names}
        self._timeout = timeout
        self.wait = timeout * WAITING
        self.interval = min(TURN, self.wait * TURN_PART)
        # Average seconds of a run, by handler.
        self._seconds: dict[str, float] = {}
        # Average bytes of a body, by queue.
        self._sizes: dict[str, float] = {}
        # When an event came that had been delivered several times.
        self._often_delivered: float | None = None
        # When a run of a short handler ended last.
        self._short_ended: float | None = None
        self._soon = False
        self._turned = 0.0
        # When an event came or a run ended last.
        self._active = monotonic()
        # Handlers whose queues are not consumed until a process is free.
        self._awaited: set[str] = set()
        # No process has become free in time, so nothing is consumed until one is.
        self._stuck = False
        # Tasks and events that the pool had accepted then.
        self._accepted = 0
        #: Of the current consumers.
        self.windows: dict[str, Window] = {}
        # Queues whose events are decided on one by one.
        self._slow: set[str] = set()
        self._received: Counter[str] = Counter()
        # When a queue was last consumed anew, for a fair order.
        self._since: dict[str, float] = {}

    def begin(self) -> None:
        """Start on a new connection, whose deliveries are all new."""
        self._stuck = self._soon = False
        self._awaited.clear()
        self.windows.clear()
        self._slow.clear()
        self._received.clear()

    # -- from the step --------------------------------------------------------------------

    def count(self, queue: str) -> int:
        """Return the prefetch count of a queue that is about to be consumed."""
        decided = self._window(queue, self._load())
        self.windows[queue] = decided
        (self._slow.add if decided.why == "slow" else self._slow.discard)(queue)
        self._received[queue] = 0
        self._since[queue] = monotonic()
        return decided.count

    def received(self, received: Received) -> None:
        self._active = monotonic()
        queue, size = received.queue, len(received.body)
        self._received[queue] += 1
        average = self._sizes.get(queue, size)
        self._sizes[queue] = average + WEIGHT * (size - average)
        if received.delivery_count >= OFTEN:
            self._often_delivered = monotonic()

    def handed_over(self, delivery: Delivery, seconds: float) -> None:
        """Stop consuming if the next event would wait too long.

        Args:
            seconds: how long the event loop was occupied; the run in a solo worker. What RabbitMQ
                has delivered meanwhile waits to be read.
        """
        queue = delivery.received.queue
        if seconds > self.wait:
            self._stuck, self._accepted = True, 0
            self._adapt()
        elif self._step.consumes(queue) and (
            self._is_used_up(queue) or (self._is_paced(queue) and not self._may_begin(queue))
        ):
            self._step.pause(queue)

    def ended(self, handler: str, seconds: float) -> None:
        """Record the duration of a run; in any thread."""
        self._active = monotonic()
        known = self._seconds.get(handler)
        if known is None or seconds > self.wait:
            average = seconds  # more of them may follow
        else:
            average = known + WEIGHT * (seconds - known)
        self._seconds[handler] = average
        if average <= LONG_SECONDS:
            self._short_ended = monotonic()
        urgent = seconds > self.interval or handler in self._awaited
        if not self._soon and (urgent or (known is None and monotonic() - self._turned > PAUSE)):
            self._soon = True
            self._turn_soon()

    def turn(self) -> None:
        """Adapt the counts, and requeue events that have waited too long."""
        self._soon, self._turned = False, monotonic()
        if self._is_idle():
            return
        if self._release():
            self._stuck, self._accepted = True, state.all_total_count[0]
        elif self._stuck and self._has_free_process():
            self._stuck = False
        self._adapt()

    def _is_idle(self) -> bool:
        """Return True if there is nothing to release, and time alone changes no count any more."""
        return (
            self._turned - self._active > CALM_SECONDS
            and not (self._step.paused or state.reserved_requests)
            and not any(self._c.task_buckets.values())
        )

    def _has_free_process(self) -> bool:
        """Return True if a process has become free; ordinary tasks may occupy them too."""
        processes = self._processes
        return len(_reserved_events()) < processes and (
            len(state.active_requests) < processes or state.all_total_count[0] != self._accepted
        )

    # -- decisions ------------------------------------------------------------------------

    @property
    def _processes(self) -> int:
        worker = self._c.controller
        most = getattr(worker, "max_concurrency", 0) or 0
        return max(1, int(self._c.pool.num_processes), int(most))

    def _load(self) -> Load:
        """Return what the worker can do now, in one pass over its events and the known averages."""
        processes, reserved = self._processes, _reserved_events()
        multiplier = getattr(self._c.controller, "prefetch_multiplier", DEFAULT_MULTIPLIER)
        seconds = self._run_seconds(reserved)
        return Load(
            budget=int(self._c.initial_prefetch_count or DEFAULT_MULTIPLIER * processes),
            configured=multiplier not in (0, DEFAULT_MULTIPLIER),
            processes=processes,
            free=self._free(processes, reserved),
            spare=self._spare(processes, reserved, seconds),
            queues=len(self._step.queues),
            wait=self.wait,
            calm=self._often_delivered is None
            or monotonic() - self._often_delivered > CALM_SECONDS,
            seconds=seconds,
        )

    def _run_seconds(self, reserved: list[EventRequest]) -> dict[str, float]:
        """Return the average run by handler; of a long first run, what it has taken so far."""
        # A copy: threads of the pool add to it.
        known, now = dict(self._seconds), monotonic()
        averages = dict(known)
        for request in reserved:
            name, began = request.name, request.began
            if name not in known and began is not None and now - began > LONG_SECONDS:
                averages[name] = max(averages.get(name, 0.0), now - began)
        return averages

    def _spare(
        self, processes: int, reserved: list[EventRequest], seconds: dict[str, float]
    ) -> int:
        """Return how many processes further long runs may take; not the last if others arrive."""
        now = monotonic()
        slow = {self._queues[name] for name, average in seconds.items() if average > LONG_SECONDS}
        slow.intersection_update(self._step.queues)
        short = self._short_ended is not None and now - self._short_ended < SHORT_SECONDS
        long = sum(map(self._expected, self._slow))
        for request in reserved:
            began = request.began
            runs_long = began is not None and now - began > LONG_SECONDS
            if runs_long or request.delivery.received.queue in slow:
                long += 1
            elif began is None:
                short = True
        return processes - long - 1 if short and slow and processes > 1 else processes

    def _free(self, processes: int, reserved: list[EventRequest]) -> int:
        """Return how many processes no event occupies; a short run soon leaves its own."""
        occupied, now = 0.0, monotonic()
        for request in reserved:
            seconds = self._seconds.get(request.name, self.wait)
            if request.began is not None:
                seconds = max(seconds, now - request.began)
            occupied += min(1.0, 2 * seconds / self.wait)
            if occupied >= processes:
                return 0
        return processes - round(occupied)

    def _buckets(self, queue: str) -> list[Any]:
        """Return Celery's token buckets of the handlers with a rate limit."""
        if self._c.disable_rate_limits:
            return []
        buckets = (self._c.task_buckets.get(name) for name in self._handlers.get(queue, ()))
        return [bucket for bucket in buckets if bucket]

    def _is_paced(self, queue: str) -> bool:
        """Return True if a rate limit may delay an event for longer than it may wait here."""
        return any(bucket.fill_rate * self.wait < 1 for bucket in self._buckets(queue))

    def _may_begin(self, queue: str) -> bool:
        """Return True if no rate limit keeps the next event of a queue waiting."""
        return not any(b.contents or b.expected_time(1) for b in self._buckets(queue))

    def _window(self, queue: str, load: Load) -> Window:
        if self._stuck:
            return Window(0, "slow")
        rates = [bucket.fill_rate for bucket in self._buckets(queue)]
        names = self._handlers.get(queue, ())
        decided = window(
            load,
            # Of the slowest handler.
            seconds=max(
                (load.seconds[name] for name in names if name in load.seconds), default=None
            ),
            rate=min(rates, default=None),
            size=self._sizes.get(queue, 0.0),
        )
        if decided == Window(0, "rate") and load.free > 0 and self._may_begin(queue):
            return Window(1, "rate")
        return decided

    def _adapt(self) -> None:
        """Consume the queues with their current counts, the longest not consumed first."""
        step, load = self._step, self._load()
        left, spare = load.free, load.spare
        self._awaited.clear()
        for queue in sorted(step.queues, key=lambda queue: self._since.get(queue, 0.0)):
            decided = self._window(queue, load)
            slow = decided.why == "slow"
            if self._expected(queue):
                continue
            if step.consumes(queue) and (
                not decided.count or (slow and self.windows[queue].why != "slow")
            ):
                step.pause(queue)
            if queue in step.paused:
                needed = decided.count if slow else 1
                if decided.count and left >= needed and (spare >= needed or not slow):
                    step.resume(queue)
                    left -= needed
                    spare -= needed * slow
                elif slow:
                    self._awaited.update(self._handlers.get(queue, ()))
            elif not step.consumes(queue):
                continue  # it is missing
            elif self._differs(queue, decided) or (load.free > 0 and self._is_full(queue, decided)):
                step.renew(queue)

    def _expected(self, queue: str) -> int:
        """Return how many of the events that were decided on may still be on their way."""
        decided = self.windows.get(queue)
        if decided is None or decided.why != "slow" or not self._step.consumes(queue):
            return 0
        if monotonic() - self._since[queue] > self.interval:
            return 0  # the queue is empty
        return decided.count - self._received[queue]

    def _is_used_up(self, queue: str) -> bool:
        """Return True if each further event needs a decision, and all decided ones are here."""
        decided = self.windows[queue]
        if decided.why != "slow" or self._received[queue] < decided.count:
            return False
        self._awaited.update(self._handlers.get(queue, ()))
        return True

    def _differs(self, queue: str, decided: Window) -> bool:
        """Return True if the count has changed by so much that a new consumer is worth it."""
        before = self.windows[queue]
        if decided.why == "slow":
            return False  # it follows the free processes
        return decided.count * 2 <= before.count or before.count * 2 <= decided.count

    def _is_full(self, queue: str, decided: Window) -> bool:
        """Return True if running events may use up a small count, although none waits."""
        if decided.why != "rate" or any(b.contents for b in self._buckets(queue)):
            return False
        return self._received[queue] >= self.windows[queue].count

    def _release(self) -> int:
        """Requeue the events that have waited too long, and return their number."""
        reserved = _reserved()
        mixed = not all(isinstance(request, EventRequest) for request in reserved)
        held = [bucket for queue in self._step.queues for bucket in self._buckets(queue)]
        limited = [request for bucket in held for request, _ in bucket.contents]
        now, released, worker = monotonic(), 0, self._c.controller
        for request in (*reserved, *limited):
            if isinstance(request, EventRequest):
                patient = mixed or bool(self._c.task_buckets.get(request.name))
                limit = run_limit(request.task, worker.time_limit, worker.soft_time_limit)
                wait = longest_wait(self._timeout, limit, patient=patient)
                released += now - request.delivery.since > wait and request.release()
        for bucket in held:
            if any(request.delivery.begun for request, _ in bucket.contents):
                left = [item for item in bucket.contents if not item[0].delivery.begun]
                bucket.contents = deque(left)
        if released:
            several = counted(released, "event")
            logger.warning(
                "requeued %s that had waited too long for a free process or a rate limit; the "
                "worker consumes again when a process is free. If this repeats, run long handlers "
                "and tasks in a worker of their own",
                several,
            )
        return released


def _reserved() -> tuple[Any, ...]:
    """Return the tasks and events that the pool has, or that wait for it."""
    while True:
        try:
            return tuple(state.reserved_requests)
        except RuntimeError:  # a thread of the pool has changed the set
            continue


def _reserved_events() -> list[EventRequest]:
    return [request for request in _reserved() if isinstance(request, EventRequest)]
