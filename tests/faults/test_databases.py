"""The rows of :mod:`tests.faults.databases`, with few events."""

from __future__ import annotations

import pytest

from tests.conftest import SERVERS

from . import rows_of
from .conftest import Hold

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("grounds", ["sqlite", *SERVERS], indirect=True, scope="module")
@pytest.mark.parametrize("name", rows_of("databases"))
def test_row(name: str, hold: Hold) -> None:
    hold(name)
