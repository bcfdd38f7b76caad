"""The rows of :mod:`tests.faults.databases`, with few events."""

from __future__ import annotations

import pytest

from tests.conftest import slow

from .conftest import Hold, cases

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    "grounds", ["postgresql", *slow("sqlite", "mariadb")], indirect=True, scope="module"
)
@pytest.mark.parametrize("name", cases("databases"))
def test_row(name: str, hold: Hold) -> None:
    hold(name)
