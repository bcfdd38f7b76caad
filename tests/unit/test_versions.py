"""The supported versions of libraries: one table, and what refuses others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from django.apps import apps

from django_amqp_events import versions
from django_amqp_events.broker import amqp_internals
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]


def test_pip_and_the_documentation_know_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {each for each in project["dependencies"] if not each.startswith("asgiref")}
    assert required == {f"{name}{found.specifier}" for name, found in SUPPORTED.items()}
    page = (ROOT / "docs" / "upgrades.md").read_text()
    for name, found in SUPPORTED.items():
        end = f", before {found.end}" if found.end else " and newer"
        assert f"| {name} | {found.first}{end} |" in page


@pytest.mark.parametrize(
    ("library", "good", "bad"),
    [
        (
            "celery",
            ("5.5.3", "5.6.0", "5.7.0rc1", "5.10.1"),
            ("5.5.2", "5.4.0", "4.4.7", "6.0.0b1"),
        ),
        ("kombu", ("5.5.4", "5.7.0"), ("5.5.3", "6")),
        ("billiard", ("4.2.1", "4.3.2"), ("4.2.0", "3.6.4.0", "5.0.0.dev1")),
        ("amqp", ("5.4.0", "5.4.2"), ("5.3.1", "6.0.0")),
        ("django", ("5.2", "5.2.19", "6.1.3", "7.0a1"), ("4.2.30", "5.1.15")),
    ],
)
def test_which_versions_are_supported(
    library: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    assert [each for each in good if each not in SUPPORTED[library]] == []
    assert [each for each in bad if each in SUPPORTED[library]] == []


def test_no_connection_is_opened_with_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(versions.unsupported()) == []
    monkeypatch.setattr(versions, "version", lambda name: "5.4.0")
    versions.check.cache_clear()
    amqp_internals.check.cache_clear()
    with pytest.raises(ConfigurationError, match=r"billiard 5\.4\.0 is not .*; run `pip"):
        amqp_internals.check()
    versions.check.cache_clear()


def test_no_process_starts_with_another_django(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "4.2.30")
    with pytest.raises(SystemExit, match=r'django 4\.2\.30 is not .*; run `pip install "django>=5'):
        apps.get_app_config("django_amqp_events").import_models()
