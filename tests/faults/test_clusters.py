"""The rows of :mod:`tests.faults.clusters`, with few events."""

from __future__ import annotations

import pytest

from .conftest import Hold, cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", cases("clusters"))
def test_row(name: str, hold: Hold) -> None:
    hold(name)
