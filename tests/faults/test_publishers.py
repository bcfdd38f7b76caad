"""The rows of :mod:`tests.faults.publishers`, with few events."""

from __future__ import annotations

import pytest

from . import rows_of
from .conftest import Hold

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("name", rows_of("publishers"))
def test_row(name: str, hold: Hold) -> None:
    hold(name)
