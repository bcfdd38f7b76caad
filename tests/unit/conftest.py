"""How Hypothesis runs here: no verdict depends on how fast the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit",
    deadline=None,
    database=None,
    # A fixture that only patches is the same for every example.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("unit")
