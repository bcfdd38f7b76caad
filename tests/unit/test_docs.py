"""README and docs say what is so: examples run, settings parse, names and files exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import django_amqp_events
from django_amqp_events import conf, exceptions
from django_amqp_events.declare.declarations import declarations
from django_amqp_events.declare.registry import build
from django_amqp_events.testing import capture_events, override_events

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
)
#: Where README links to, since the package index shows it too.
REPOSITORY = "https://github.com/django-amqp-events/django-amqp-events/blob/main"
#: Pages whose examples are run here; docs/testing.md has its own test module.
RUN = (
    "README.md",
    "docs/publishing.md",
    "docs/handling.md",
    "docs/retries.md",
    "docs/editing.md",
    "docs/guarantees.md",
    "docs/settings.md",
    "docs/contracts.md",
)


def blocks(page: str) -> Iterator[tuple[int, str]]:
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        indent, code = found.groups()
        line = text[: found.start(2)].count("\n")
        yield line, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)


@pytest.fixture
def published(db: None) -> Iterator[Any]:
    """The events that the examples publish."""
    with override_events(SERVICE="docs"), capture_events() as events:
        yield events


@pytest.mark.parametrize("page", RUN)
def test_the_examples_of_a_page_run_one_after_the_other(page: str, published: Any) -> None:
    names: dict[str, Any] = {"INSTALLED_APPS": [], "__name__": "docs_example"}
    count = 0
    for line, code in blocks(page):
        if "events.handlers" in code and "def " not in code:
            continue
        program = compile("\n" * line + code, str(ROOT / page), "exec", dont_inherit=True)
        exec(program, names)  # noqa: S102
        count += 1
        if "AMQP_EVENTS" in names:
            _, problems = conf.parse(names["AMQP_EVENTS"])
            assert [p for p in problems if p.is_error] == [], f"{page}:{line}"
    assert count or page not in ("README.md", "docs/handling.md")
    declared = build(conf.Settings(service="docs"), *declarations.snapshot())
    assert [p for p in declared.problems if p.is_error] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in LINK.findall(text):
        place = (ROOT / page).parent
        if target.startswith(f"{REPOSITORY}/"):
            place, target = ROOT, target.removeprefix(f"{REPOSITORY}/")  # noqa: PLW2901
        elif target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = place / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            slugs = {slug(title) for title in HEADING.findall(file.read_text())}
            assert anchor in slugs, f"{page}: {target}"


def test_each_page_is_in_one_menu_of_the_site() -> None:
    docs = ROOT / "docs"
    listed = ["index"]
    for page in docs.rglob("*.md"):
        for menu in re.findall(
            r"^```{toctree}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            listed += (line for line in menu.split() if not line.startswith(":"))
    pages = sorted(str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md"))
    assert sorted(name for name in listed if (docs / f"{name}.md").exists()) == pages


def slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(
        r"`((?:docs|scripts|tests|example_project|django_amqp_events)/[\w./-]*)`", text
    )
    for name in named:
        # The suite runs on the wheel, without the package's folder.
        if name.startswith("django_amqp_events/"):
            package = Path(django_amqp_events.__file__).parent
            assert (package.parent / name).exists(), f"{page}: {name}"
        else:
            assert (ROOT / name).exists(), f"{page}: {name}"


def test_what_users_import_is_on_the_page_of_the_public_api() -> None:
    """All that the package exports, and all that an example of any page imports."""
    text = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"auto(?:class|function):: (?:django_amqp_events\.)?([\w.]+)", text)
    whole = set(re.findall(r"automodule:: ([\w.]+)\n", text))
    imported = [
        f"{node.module}.{alias.name}".removeprefix("django_amqp_events.")
        for page in PAGES
        for _, code in blocks(page)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.partition(".")[0] == "django_amqp_events" and node.module not in whole
        for alias in node.names
    ]
    for name in {*django_amqp_events.__all__, *imported} - vars(exceptions).keys():
        assert any(f"{one}.".startswith(f"{name}.") for one in listed), name


def test_dotted_names_in_the_text_of_a_page_exist() -> None:
    for page in PAGES:
        text = BLOCK.sub("", (ROOT / page).read_text())
        for name in re.findall(r"`(django_amqp_events(?:\.[A-Za-z]\w*)+)(?:\(.*?\))?`", text):
            if page == "CHANGELOG.md" or re.search(r"\.[EWI]\d{3}$", name):
                continue  # names of older releases; the ids of checks
            assert find(name), f"{page}: {name}"


def find(name: str) -> bool:
    """Import what a dotted name names."""
    module, _, attribute = name.rpartition(".")
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, attribute) or (is_package and bool(importlib.util.find_spec(name)))
