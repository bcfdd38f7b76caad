"""An event that waits counts for the handler that it waits for, wherever it is."""

from __future__ import annotations

import pytest

from tests.waiting import until

from .counts import HANDLERS
from .world import NAME, QUEUES, Grounds, world

DEAD = tuple(f"{NAME}:{queue}" for queue in ("graveyard", "dead", "abyss"))


@pytest.mark.slow
@pytest.mark.parametrize("grounds", ["sqlite"], indirect=True)
def test_dead_letters_wait_for_the_handler_of_their_queue(grounds: Grounds) -> None:
    with world(grounds, name="waiting", events=0, seed="") as here:
        here.declare()
        expected = set()
        for far in 3, 2, 1, 0:  # one event in each of DEAD, and one in the handlers' queues
            event = here.eyes.event("faults.happened", {})
            expected |= {(event, handler) for handler in HANDLERS}
            sources = QUEUES
            for target in DEAD[:far]:
                channel = here.eyes.channel()
                for source in sources:
                    channel.basic_reject(channel.basic_get(source).delivery_tag, requeue=False)
                until(lambda: here.eyes.ready(target) == len(HANDLERS), target, 30)  # noqa: B023
                sources = (target, target)
        assert here.waiting() == expected
