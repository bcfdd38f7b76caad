"""Past events on the broker in memory."""

from __future__ import annotations

from typing import Any

import pytest

from django_amqp_events import current_event, handler, publish_event
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.testing import memory_events, override_events

KEY = "shop.order.created"


@pytest.fixture(autouse=True)
def settings() -> Any:
    with override_events(HISTORY={"MAX_AGE": "14d"}, PUBLISH="immediate", handlers=[], events=[]):
        yield


def test_a_new_handler_gets_what_its_queue_missed_and_again_everything() -> None:
    seen: list[int] = []
    with memory_events() as broker:
        publish_event(KEY, {"number": 1})
        publish_event("shop.stock.low", {"number": 9})

        @handler(KEY, name="shop.late")
        def late(number: int) -> None:
            event = current_event()
            assert event is not None
            seen.append(number if event.replay_id else -number)

        publish_event(KEY, {"number": 2})
        assert sum(broker.depths.values()) == 1
        assert broker.backfill("shop.late") == 1
        broker.run()
        assert sorted(seen) == [-2, 1]
        assert broker.backfill("shop.late") == 0
        assert broker.backfill("shop.late", again=True) == 2
        assert broker.backfill("shop.late", "shop.stock.*", again=True) == 0
        broker.run()
        assert sorted(seen) == [-2, 1, 1, 2]


def test_what_is_missing_is_named() -> None:
    with memory_events() as broker:
        with pytest.raises(ConfigurationError, match="there is no handler 'nobody'"):
            broker.backfill("nobody")
        with (
            override_events(HISTORY=None),
            pytest.raises(ConfigurationError, match="set AMQP_EVENTS"),
        ):
            broker.backfill("nobody")
