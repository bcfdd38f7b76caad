"""A soak finds a planted fault of the package, and nothing else."""

from __future__ import annotations

import pytest

from tests.faults.conftest import _grounds, grounds  # noqa: F401 - fixtures
from tests.faults.world import Grounds, world

from . import soaking


@pytest.mark.slow
@pytest.mark.parametrize("grounds", ["sqlite"], indirect=True)
def test_a_fault_of_the_package_is_found(
    grounds: Grounds,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soaking, "EVENTS", 50)
    # These would end in the graveyard, or take as long as their time limit.
    monkeypatch.setattr(soaking, "DEADLY", 0.0)
    monkeypatch.setattr(soaking, "HANGING", 0.0)
    with world(grounds, name="soak", events=0, seed="planted") as here:
        here.service.handlers = "planted"
        result = soaking.soak(here, [grounds.node], 1, (), 1)
        lines = here.service.ledger()
    failed = {(line["event"], line["handler"]) for line in lines if line["what"] == "raised"}
    assert failed
    assert [each.rule for each in result.wrong] == ["lost"] * len(failed)
    assert result.figures.lost == len(failed)
    assert any("raised" in line for line in result.story)
    assert result.figures.pairs > len(failed)
