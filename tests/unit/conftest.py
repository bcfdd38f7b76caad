"""What all unit tests have: declarations of their own, and no limit on Hypothesis's time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from django_amqp_events.declare.declarations import declarations
from django_amqp_events.publish import publisher
from tests.doubles.broker import Broker

settings.register_profile(
    "unit",
    max_examples=50,
    deadline=None,
    database=None,
    # A fixture that only patches is the same for every example.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def own_declarations() -> Iterator[None]:
    """Begin without the events and handlers of other modules, and forget those of the test."""
    before = declarations.snapshot()
    declarations.restore(((), ()))
    yield
    declarations.restore(before)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    """What is published goes to a double, whatever the settings name."""
    made = Broker()
    monkeypatch.setattr(publisher, "backend", lambda settings: made)
    return made
