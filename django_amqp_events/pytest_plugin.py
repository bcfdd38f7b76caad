"""The pytest fixtures ``captured_events`` and ``memory_events``; see docs/testing.md.

pytest loads this module wherever django_amqp_events is installed, so the fixtures import the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .testing import CapturedEvents, MemoryBackend


@pytest.fixture
def captured_events() -> Iterator[CapturedEvents]:
    """The events that the test publishes, which reach no broker."""
    from .testing import capture_events

    with capture_events() as events:
        yield events


@pytest.fixture(name="memory_events")
def memory_events_fixture() -> Iterator[MemoryBackend]:
    """An in-memory broker for the test's events, with a worker that runs on demand."""
    from .testing import memory_events

    with memory_events() as broker:
        yield broker
