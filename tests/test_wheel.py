"""Users install what is tested: the wheel."""

from __future__ import annotations

import os
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import django_amqp_events

ON_WHEEL = os.environ.get("AMQP_EVENTS_SUITE_ON_WHEEL") == "1"


@pytest.mark.skipif(
    not ON_WHEEL, reason="`make test` runs on the wheel, this run is in the source folder"
)
def test_the_suite_runs_on_the_installed_wheel() -> None:
    package = Path(django_amqp_events.__file__).resolve()
    assert package.is_relative_to(Path(sysconfig.get_path("purelib")).resolve())
    assert not Path("django_amqp_events").exists()


@pytest.mark.skipif(not ON_WHEEL, reason="the metadata belong to the wheel")
def test_metadata_is_complete() -> None:
    found = metadata.metadata("django-amqp-events")
    assert found["Name"] == "django-amqp-events"
    assert found["License-Expression"] == "BSD-3-Clause"
    assert found["License-File"] == "LICENSE"
    assert found["Requires-Python"] == ">=3.11"
    assert "Framework :: Django :: 5.2" in found.get_all("Classifier", [])
    required = {
        line.partition(">")[0].partition("<")[0].strip()
        for line in metadata.requires("django-amqp-events") or []
        if "extra ==" not in line
    }
    assert required == {"amqp", "asgiref", "billiard", "celery", "django", "kombu"}


@pytest.mark.skipif(not ON_WHEEL, reason="the file list belongs to the wheel")
def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    files = [str(path) for path in metadata.files("django-amqp-events") or []]
    assert "django_amqp_events/py.typed" in files
    for language in ("de", "ru"):
        for suffix in ("po", "mo"):
            assert f"django_amqp_events/locale/{language}/LC_MESSAGES/django.{suffix}" in files
    strangers = [
        name
        for name in files
        if not name.startswith(("django_amqp_events/", "django_amqp_events-"))
        and not name.startswith("..")
    ]
    assert strangers == []
    assert not [name for name in files if "/tests/" in name]


@pytest.mark.skipif(not ON_WHEEL, reason="entry points belong to the wheel")
def test_pytest_plugin_is_registered() -> None:
    declared = {point.value for point in metadata.entry_points(group="pytest11")}
    there = (Path(django_amqp_events.__file__).parent / "pytest_plugin.py").exists()
    assert ("django_amqp_events.pytest_plugin" in declared) == there
