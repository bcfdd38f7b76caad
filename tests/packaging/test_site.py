"""docs/ as a site: `make docs`, with the installed package, read without a network."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import django_amqp_events
from machine import run
from tests.environments import environment

ROOT = Path(__file__).resolve().parents[2]
#: What a page loads, as against what it links to.
LOADED = re.compile(
    r'<(?:script|img|link rel="(?:stylesheet|preload|icon)")[^>]*?(?:src|href)="([^"]+)'
)

pytestmark = pytest.mark.timeout(600)  # the environment is installed


def test_a_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """The site is built with the options of `make docs`, so that any warning is an error."""
    (command,) = re.findall(r"-m sphinx (.*)", (ROOT / "Makefile").read_text())
    # The wheel without the packages beside it, which are those of another environment.
    path = tmp_path / "path"
    path.mkdir()
    (path / "django_amqp_events").symlink_to(Path(django_amqp_events.__file__).parent)
    options = command.replace(".run/docs", str(tmp_path)).split()
    python = environment("docs") / "bin" / "python"
    run(python, "-m", "sphinx", *options, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(path)})
    pages = list((tmp_path / "html").rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        for source in LOADED.findall(page.read_text()):
            assert not source.startswith(("http:", "https:", "//")), f"{page.name}: {source}"
            assert (page.parent / source.partition("?")[0]).exists(), f"{page.name}: {source}"
