"""How many messages and consumers a queue has, from a passive declare."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

#: Seconds for which RabbitMQ waits for the leader of a quorum queue. Then it answers that the queue
#: has no messages and no consumers (rabbit_quorum_queue.erl, ``stat``).
#: tests/integration/broker/test_batch_reader.py pins this.
LEADER_TIMEOUT: Final = 0.25
#: Number of times that such an answer is asked for.
TRIES: Final = 4


@dataclass(frozen=True, slots=True)
class Depth:
    """Numbers of ready messages and of consumers."""

    ready: int
    consumers: int


def queue_depth(channel: Any, queue: str) -> Depth:
    """Return the depth of a queue; ask again where its leader may have been too busy to answer.

    Raises:
        amqp.exceptions.NotFound: there is no such queue.
    """
    depth = Depth(ready=0, consumers=0)
    for _ in range(TRIES):
        asked = time.monotonic()
        answer = channel.queue_declare(queue, passive=True)
        depth = Depth(ready=answer.message_count, consumers=answer.consumer_count)
        if depth.ready or depth.consumers or time.monotonic() < asked + LEADER_TIMEOUT:
            break
    return depth
