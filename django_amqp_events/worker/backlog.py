"""The deliveries that wait in a worker for a process, and whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from kombu.utils.limits import TokenBucket

from .delivery import Delivery
from .prefetch import Durations, events_per_second, lowest_rate

#: Bytes of the bodies of several events in a job. A larger one does not fit into a pipe (64 kB); a
#: worker that stops while it writes the rest may wait for the process for ever (Celery 5.7).
JOB_BYTES: Final = 32_768
#: Seconds that a run is expected to take before one has ended.
UNKNOWN_SECONDS: Final = 1.0
#: Most seconds of one job beyond what was expected that count: the queue's next event need not wait
#: until others have had the hours of one that hung.
MOST_LONGER: Final = 10.0


class Backlog:
    """Waiting deliveries by queue. Queues have turns by the time that their events take.

    Args:
        consumer_timeout: RabbitMQ's, in seconds.
        limited: whether rate limits apply.
        on_wait: called with the seconds until a rate limit lets an event begin.
    """

    def __init__(
        self, consumer_timeout: float, *, limited: bool, on_wait: Callable[[float], object]
    ) -> None:
        self.durations = Durations()
        self._queues: dict[str, deque[Delivery]] = {}
        # Seconds that jobs of each queue have taken or will, and those of the last one's queue: the
        # queue with the least is next.
        self._spent: dict[str, float] = {}
        self._floor = 0.0
        self._lowest_rate = lowest_rate(consumer_timeout)
        self._buckets: dict[tuple[str, float], TokenBucket] = {}
        self._limited = limited
        self._on_wait = on_wait

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Delivery]:
        return (delivery for waiting in self._queues.values() for delivery in waiting)

    def first(self, queue: str) -> Delivery | None:
        """Return the delivery of a queue that has waited longest."""
        waiting = self._queues.get(queue)
        return waiting[0] if waiting else None

    def add(self, delivery: Delivery) -> None:
        self._of(delivery).append(delivery)

    def put_back(self, deliveries: Iterable[Delivery]) -> None:
        """Let deliveries of a queue run before all others of it."""
        for delivery in reversed(tuple(deliveries)):
            delivery.job = None
            self._of(delivery).appendleft(delivery)

    def remove(self, before: float | None = None) -> list[Delivery]:
        """Remove and return all deliveries, or those of queues whose first came before a time.

        Args:
            before: monotonic time.
        """
        removed: list[Delivery] = []
        for waiting in self._queues.values():
            if waiting and (before is None or waiting[0].since < before):
                removed += waiting
                waiting.clear()
        return removed

    def take(
        self, size: int, processes: int, is_quick: Callable[[Delivery], bool]
    ) -> tuple[list[Delivery], float]:
        """Remove and return the deliveries of the next job, and the seconds it should take.

        Args:
            size: most deliveries of a job.
            processes: free ones, among which the deliveries of a queue are shared.
            is_quick: returns True if a delivery may share a job.
        """
        for queue in sorted(filter(self._queues.get, self._queues), key=self._spent.__getitem__):
            waiting = self._queues[queue]
            most = min(size, -(-len(waiting) // processes))
            first = self._first_allowed(waiting)
            if first is None:
                continue
            waiting.remove(first)
            taken = [first]
            if is_quick(first):
                room = JOB_BYTES - len(first.item.delivered.body)
                while waiting and len(taken) < most and is_quick(waiting[0]):
                    room -= len(waiting[0].item.delivered.body)
                    if room < 0:
                        break
                    taken.append(waiting.popleft())
            average = self.durations.average
            expected = sum(average.get(delivery.name, UNKNOWN_SECONDS) for delivery in taken)
            self._floor = self._spent[queue]
            self._spent[queue] += expected
            return taken, expected
        return [], 0.0

    def took_longer(self, queue: str, seconds: float) -> None:
        """Correct the time of a queue by that of a job beyond what was expected."""
        self._spent[queue] += min(seconds, MOST_LONGER)

    def rate(self, task: Any) -> float:
        """Return the events per second that the rate limit of a task allows, 0 for all.

        Remote control changes it.
        """
        rate = events_per_second(task.rate_limit) if self._limited else 0.0
        return max(rate, self._lowest_rate) if rate else 0.0

    def not_run(self, delivery: Delivery) -> None:
        """Let the rate limit forget a delivery that was not run, such as one that is not due."""
        bucket = self._buckets.get((delivery.name, self.rate(delivery.task)))
        if bucket is not None and bucket.expected_time():  # it is not full
            bucket.can_consume(-1)

    def _of(self, delivery: Delivery) -> deque[Delivery]:
        queue = delivery.item.delivered.queue
        waiting = self._queues.setdefault(queue, deque())
        if not waiting:
            self._spent[queue] = max(self._spent.get(queue, 0.0), self._floor)
        return waiting

    def _first_allowed(self, waiting: Iterable[Delivery]) -> Delivery | None:
        """Return the first delivery that no rate limit keeps waiting, and count it as begun."""
        limited: set[str] = set()
        for delivery in waiting:
            rate = self.rate(delivery.task)
            if not rate:
                return delivery
            if delivery.name in limited:
                continue
            bucket = self._buckets.setdefault((delivery.name, rate), TokenBucket(rate))
            if bucket.can_consume():
                return delivery
            limited.add(delivery.name)
            self._on_wait(float(bucket.expected_time()))
        return None
