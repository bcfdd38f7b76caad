"""The versions of libraries in the documentation are those that pip installs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pip_and_the_documentation_know_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "upgrades.md").read_text()
    for required in project["dependencies"]:
        [(name, first, end)] = re.findall(r"^(\w+)>=([\d.]+)(?:,<([\d.]+))?$", required)
        versions = f"{first}, before {end}" if end else f"{first} and newer"
        assert name == "asgiref" or f"| {name} | {versions} |" in page
