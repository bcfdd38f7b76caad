"""Workers that consume many queues."""

from __future__ import annotations

import pytest

from ..harness import Eyes, Service, until

pytestmark = pytest.mark.timeout(300)


def test_short_events_do_not_wait_for_a_backlog_of_long_ones(
    core: Service, fresh_eyes: Eyes
) -> None:
    """Queues have their turns, so a short one waits for one long run, not for all."""
    for _ in range(12):
        fresh_eyes.event("core.act", {"plan": ["sleep:2"]})
    short = [fresh_eyes.event("core.act.once", {"plan": ["ok"]}) for _ in range(20)]
    core.worker("prefork", 2)
    until(lambda: all(core.runs(event, "end") for event in short), 60, "the short ones have run")
    assert len(core.ledger(name="core.act", what="start")) <= 6
