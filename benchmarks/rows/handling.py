"""Workers that drain a backlog, shared by several benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..ground import Ground, counted, measured_drain
from ..measured import OURS, PLAIN

#: The worker's application, and its publisher.
SERVICES = {
    OURS: ("service_events", "publish_events"),
    PLAIN: ("service_plain", "publish_plain"),
    "celery-amqp-events": ("service_peer", "publish_peer"),
    "dramatiq": ("service_dramatiq", "publish_dramatiq"),
    "FastStream": ("service_faststream", "publish_faststream"),
}
#: Both workers belong to a Django project, with Celery's Django fixup.
PROJECT: Mapping[str, Any] = {"apps": []}


def draining(
    ground: Ground,
    who: str,
    total: int,
    *,
    pool: str = "prefork",
    number: int = 2,
    calls: int = 1,
    warm: float = 0.1,
    after: Callable[[], object] = bool,
    body: int = 500,
    **given: Any,
) -> Callable[[], float]:
    """Return a function that fills a queue, starts a worker and returns its events per second.

    Args:
        who: of :data:`SERVICES`.
        total: events in the backlog.
        number: processes or threads of the pool.
        calls: of a handler, for each event.
        warm: share of the calls that is not measured.
        after: counts what the handlers have left, and takes it away.
        body: bytes of the payload.
    """
    service, publisher = SERVICES[who]
    words = {**(PROJECT if who == PLAIN else {}), **given}
    vhost = ground.vhost(service)
    # A peer's publisher has no handlers.
    publishing = words if who in {OURS, PLAIN} else {**words, "handlers": 0}
    program = ground.program(publisher, vhost, **publishing)
    queues = program.ask("declare")["queues"]
    if len(queues) == 1:
        program.ask("one_by_one", number=1, size=body)
    else:
        program.ask("each")
    templates = [vhost.take(queue) for queue in queues]
    program.kill()

    def run() -> float:
        vhost.fill(templates, total)
        tally = ground.tally()
        worker = ground.worker(
            service, vhost, pool=pool, number=number, tally=str(tally.path), **words
        )
        rate = measured_drain(tally, total * calls, worker, warm=warm) / calls
        counted(tally, total * calls, vhost, worker, *queues)
        after()
        return rate

    return run


def floor(ground: Ground, total: int, *, prefetch: int) -> Callable[[], float]:
    """Return the same for py-amqp alone, in one process that reads and acks."""
    vhost = ground.vhost("floor")
    program = ground.program("publish_floor", vhost)
    (queue,) = program.ask("declare")["queues"]

    def run() -> float:
        program.ask("window", number=total)
        answer = program.ask("consume", number=total, prefetch=prefetch)
        vhost.expect(0, queue)
        return total / float(answer["seconds"])

    return run
