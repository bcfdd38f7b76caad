"""The rows of :mod:`tests.faults.topologies`, with few events."""

from __future__ import annotations

import pytest

from .conftest import Hold, cases

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("name", cases("topologies"))
def test_row(name: str, hold: Hold) -> None:
    hold(name)
