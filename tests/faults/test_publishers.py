"""The rows of :mod:`tests.faults.publishers`, with few events."""

from __future__ import annotations

import pytest

from .conftest import Hold, cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", cases("publishers"))
def test_row(name: str, hold: Hold) -> None:
    hold(name)
