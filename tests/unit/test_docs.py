"""README and docs say what is so: examples run, settings parse, names and files exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import django_amqp_events
from django_amqp_events import conf, exceptions, pytest_plugin, signals
from django_amqp_events.broker.topology import Names
from django_amqp_events.declare.declarations import declarations
from django_amqp_events.declare.registry import build
from django_amqp_events.testing import capture_events, override_events
from tests.faults import report

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


@pytest.fixture(autouse=True)
def own_declarations() -> Iterator[None]:
    before = declarations.snapshot()
    yield
    declarations.restore(before)


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


def test_publishing_examples_work(published: Any) -> None:
    names: dict[str, Any] = {"__name__": "docs_example"}
    for line, code in blocks("docs/publishing.md"):
        exec(compile("\n" * line + code, "publishing.md", "exec"), names)  # noqa: S102
    assert published.names.count("shop.order.created") >= 7
    assert published.one("shop.order.cancelled").payload == {"order_id": 1}
    assert any(event.event_id == "order-1-created" for event in published)
    assert any("traceparent" in event.headers for event in published)


def test_the_settings_of_the_readme_are_ten_lines_and_no_more() -> None:
    lines = [code for _, code in blocks("README.md") if "INSTALLED_APPS" in code]
    assert len(lines) == 1
    assert len(lines[0].strip().splitlines()) <= 10


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


def test_the_readme_is_short_and_has_absolute_links() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 900
    assert [link for link in LINK.findall(text) if not link.startswith("https://")] == []
    _, code = next(blocks("README.md"))
    assert len([line for line in code.splitlines() if line.strip() and line[0] != "#"]) <= 8


def test_rates_are_those_of_the_last_benchmarks() -> None:
    text = (ROOT / "README.md").read_text().partition("- Two cores")[2].partition("- With")[0]
    figures = re.findall(r"\b(?:\d+,)?\d{3}\b", text)
    assert len(figures) >= 3
    measured = re.findall(r"\| ([\d,]+) (?=[|(])", (ROOT / "benchmarks" / "RESULTS.md").read_text())
    assert set(figures) <= set(measured)


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


@pytest.mark.parametrize("page", RUN)
def test_imports_of_the_examples_are_public(page: str) -> None:
    for _, code in blocks(page):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module == "django_amqp_events":
                for alias in node.names:
                    assert alias.name in django_amqp_events.__all__, f"{page}: {alias.name}"


def test_every_page_is_in_one_table_of_contents_where_the_index_lists_it() -> None:
    docs = ROOT / "docs"
    pages = contents(docs / "index.md")
    assert sorted(pages) == sorted({page.stem for page in docs.glob("*.md")} - {"index"})
    text = (docs / "index.md").read_text()
    assert pages == re.findall(r"^- \[.*?\]\(([\w-]+)\.md\)", text, re.MULTILINE)
    parts = [part for page in docs.glob("*.md") if page.stem != "index" for part in contents(page)]
    assert sorted(parts) == sorted(f"{p.parent.name}/{p.stem}" for p in docs.glob("*/*.md"))


def contents(page: Path) -> list[str]:
    """Return the pages that a page's tables of contents list."""
    trees = re.findall(
        r"^```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [name for tree in trees for name in tree.split()]


def test_the_fault_table_is_written_from_its_results(tmp_path: Path) -> None:
    docs = ROOT / "docs"
    (tmp_path / "faults").mkdir()
    for path in (docs / "faults").glob("*.json"):
        shutil.copy(path, tmp_path / "faults")
    report.write(tmp_path)
    for path in (docs / "faults.md", *(docs / "faults").glob("*.md")):
        assert (tmp_path / path.relative_to(docs)).read_text() == path.read_text(), path.name


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


def test_every_signal_and_exception_is_described() -> None:
    """Their modules' docstrings are sections of docs/api.md."""
    entries = re.findall(r"^(``.*``)\n((?:    .*\n)+)", signals.__doc__ or "", re.MULTILINE)
    described = {name: text for names, text in entries for name in re.findall(r"\w+", names)}
    declared = {name for name, value in vars(signals).items() if isinstance(value, signals.Signal)}
    assert described.keys() == declared
    for name, argument in sent():
        assert f"``{argument}``" in described[name], f"{name}: {argument}"
    tree = re.findall(r"\w+", exceptions.__doc__ or "")
    for name, value in vars(exceptions).items():
        if isinstance(value, type) and value.__module__ == exceptions.__name__:
            assert name in tree, name
            assert value.__doc__, name


def sent() -> set[tuple[str, str]]:
    """The arguments of signals, where a call of ``send_robust()`` names both."""
    found = set()
    for module in Path(django_amqp_events.__file__).parent.rglob("*.py"):
        text = module.read_text()
        for call in ast.walk(ast.parse(text)) if "send_robust(" in text else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                name = ast.unparse(call.func.value).rpartition(".")[2]
                if call.func.attr == "send_robust" and name in vars(signals):
                    found |= {(name, one.arg) for one in call.keywords if one.arg}
    assert {name for name, _ in found} >= {"event_hanging", "event_replayed", "event_skipped"}
    return found


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


def test_the_fixtures_of_pytest_are_described() -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    module = ast.parse(Path(pytest_plugin.__file__).read_text())
    names = [one.name for one in module.body if isinstance(one, ast.FunctionDef)]
    assert len(names) == 2
    for name in names:
        assert f"({name.removesuffix('_fixture')})" in text, name


def test_the_glossary_has_the_parts_of_a_service() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = set(re.findall(r"^\| ([a-z ]+?) \|", text, re.MULTILINE))
    names = Names("", "billing", "events")
    queues = (names.archive, names.graveyard, names.dead, names.abyss)
    assert terms >= {name.removeprefix("billing:") for name in queues}
    assert terms >= {"mirror", "relay", "reaper", "batch runner", "companion", "worker"}


def test_every_publish_error_has_its_row() -> None:
    text = (ROOT / "docs" / "publishing.md").read_text()
    for name in django_amqp_events.__all__:
        error = getattr(exceptions, name, None)
        if isinstance(error, type) and issubclass(error, exceptions.PublishError):
            if error is exceptions.PublishError:
                continue
            row = next((r for r in text.splitlines() if r.startswith("|") and f"`{name}`" in r), "")
            assert row, name
            assert f"`{error.published}`" in row, f"{name}: published is {error.published}"


def test_every_reason_of_the_archive_is_explained() -> None:
    from django_amqp_events.message import archive_message

    reasons = re.search(
        r"reason: one word:(.*?)\.\n", archive_message.build.__doc__ or "", re.DOTALL
    )
    assert reasons
    text = (ROOT / "docs" / "handling.md").read_text()
    for reason in re.findall(r"``(\w+)``", reasons[1]):
        if reason not in ("poison", "unsupported"):  # the reaper's; a misuse that says so itself
            assert f"`{reason}`" in text, reason


def test_the_picture_shows_names_that_exist() -> None:
    picture = ET.parse(ROOT / "docs" / "images" / "topology.svg")  # noqa: S314 - ours
    space = "{http://www.w3.org/2000/svg}"
    texts = [t.text or "" for t in picture.iter(f"{space}text") if t.get("class") == "name"]
    names = Names("", "billing", "events")
    known = {
        names.events, names.return_, names.archive, names.graveyard, names.dead, names.abyss,
        names.handlers + "invoices.send", "shop.stock.reserve", f"{names.delay(1)} … 4096s",
    }  # fmt: skip
    assert set(texts) == known
    assert picture.find(f"{space}title") is not None, "who cannot see it gets a title"


def test_versions_that_the_readme_names_are_those_of_the_package() -> None:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("no pyproject.toml beside the suite")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"{project['urls']['Repository']}/blob/main" == REPOSITORY
    text = (ROOT / "README.md").read_text()
    assert f"Version {project['version'].removesuffix('.0')}:" in text
    assert f"Python {project['requires-python'].removeprefix('>=')} to" in text
