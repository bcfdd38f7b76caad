"""docs/ as a site: `make docs`, with the installed package, read without a network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_amqp_events
from chromium import Chromium
from machine import run
from tests.environments import environment

ROOT = Path(__file__).resolve().parents[2]
#: What a page loads, as against what it links to.
LOADED = re.compile(
    r'<(?:script|img|link rel="(?:stylesheet|preload|icon)")[^>]*?(?:src|href)="([^"]+)'
)

pytestmark = pytest.mark.timeout(600)  # the environment is installed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with the options of `make docs`, so that any warning is an error."""
    (command,) = re.findall(r"-m sphinx (.*)", (ROOT / "Makefile").read_text())
    folder = tmp_path_factory.mktemp("site")
    # The wheel without the packages beside it, which are those of another environment.
    path = folder / "path"
    path.mkdir()
    (path / "django_amqp_events").symlink_to(Path(django_amqp_events.__file__).parent)
    options = command.replace(".run/docs", str(folder)).split()
    python = environment("docs") / "bin" / "python"
    run(python, "-m", "sphinx", *options, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(path)})
    return folder / "html"


@pytest.fixture
def browser(site: Path) -> Iterator[Chromium]:
    with Chromium() as window:
        yield window


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        for source in LOADED.findall(page.read_text()):
            assert not source.startswith(("http:", "https:", "//")), f"{page.name}: {source}"
            assert (page.parent / source.partition("?")[0]).exists(), f"{page.name}: {source}"


def test_search_works_from_a_folder(site: Path, browser: Chromium) -> None:
    browser.open(f"{(site / 'search.html').as_uri()}?q=graveyard")
    browser.until(lambda: browser.all("#search-results li a"), "results")
    found = {link.get_attribute("href") or "" for link in browser.all("#search-results li a")}
    assert {Path(link.partition("?")[0].partition("#")[0]).name for link in found} >= {
        "glossary.html", "topology.html",
    }  # fmt: skip


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_window(site: Path, browser: Chromium, width: int) -> None:
    browser.look("light", width)
    for page in sorted(site.rglob("*.html")):
        browser.open(page.as_uri())
        assert browser.run("return document.documentElement.scrollWidth") <= width, page.name
