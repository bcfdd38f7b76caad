"""Publishing.

*One by one*: a call returns when RabbitMQ has confirmed the event. The project's event has a
contract, which is checked, and is published `mandatory`, in the mode `immediate`. *Many*:
`publish_many` of 10,000, compared with Celery's `apply_async` in a loop (Celery offers nothing
else), 100 concurrent publishes with asyncio, and py-amqp with a sliding window of 1,000 unconfirmed
messages. All publish persistent messages with confirms, each into its own quorum queue.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ground import Ground, Vhost
from ..measured import OURS, PLAIN, Measured, Size, Table, Target, in_turn
from ..processes import Program
from . import Tell

FLOOR, WINDOW = "py-amqp, one by one", "py-amqp, sliding window"
PEERS = {
    "celery-amqp-events": "publish_peer",
    "dramatiq": "publish_dramatiq",
    "FastStream": "publish_faststream",
}


class Publisher:
    """A participant with its own queue."""

    def __init__(self, ground: Ground, module: str, **given: object) -> None:
        self.vhost: Vhost = ground.vhost(module)
        self.program: Program = ground.program(module, self.vhost, **given)
        (self.queue,) = self.program.ask("declare")["queues"]

    def rate(self, do: str, number: int, **arguments: object) -> Callable[[], float]:
        """Return a function that publishes, counts, and returns events per second."""
        # Open the connections, and warm up.
        self.program.ask(do, number=100, **arguments)
        self.vhost.expect(100, self.queue)
        self.vhost.purge(self.queue)

        def run() -> float:
            answer = self.program.ask(do, number=number, **arguments)
            self.vhost.expect(number, self.queue)
            self.vhost.purge(self.queue)
            return number / float(answer["seconds"])

        return run


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    publishers = {
        OURS: Publisher(ground, "publish_events"),
        PLAIN: Publisher(ground, "publish_plain"),
        FLOOR: Publisher(ground, "publish_floor"),
    }
    if not size.short:
        for name, module in PEERS.items():
            # A publisher has no handlers.
            publishers[name] = Publisher(ground, module, handlers=0)
    number = size.number(1000, 200)
    many = size.number(10_000, 2000)
    one = in_turn(
        {name: each.rate("one_by_one", number) for name, each in publishers.items()},
        size.turns(9),
        tell,
    )
    runs = {
        OURS: publishers[OURS].rate("many", many),
        PLAIN: publishers[PLAIN].rate("one_by_one", number),
        WINDOW: publishers[FLOOR].rate("window", many),
    }
    if not size.short:
        runs["FastStream, 100 at once"] = publishers["FastStream"].rate("many", many)
    counted = "after each turn, the queue has exactly the published events"
    return [
        Table(
            what="Event call, confirmed, one by one",
            unit="events/s",
            better="more",
            values=one,
            targets=(
                Target(level="reach", factor=1.6, against=PLAIN),
                Target(level="stretch", factor=0.95, against=FLOOR),
            ),
            counted=counted,
        ),
        Table(
            what=f"publish_many of {many:,}",
            unit="events/s",
            better="more",
            values=in_turn(runs, size.turns(7), tell),
            targets=(
                Target(level="reach", factor=12, against=PLAIN),
                Target(level="stretch", factor=0.7, against=WINDOW),
            ),
            counted=counted,
        ),
    ]
