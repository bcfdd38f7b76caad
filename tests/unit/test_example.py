"""The example project checks itself, in processes with its own settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import run_example


@pytest.mark.parametrize("settings", ["shop", "billing"])
def test_a_deployment_has_nothing_to_complain_about(settings: str, tmp_path: Path) -> None:
    command = ("-W", "error", "manage.py", "check", "--deploy", "--fail-level", "WARNING")
    run_example(*command, settings=settings, EXAMPLE_DATA=str(tmp_path))
