"""Private names of libraries: probes of them, and what their uses rely on."""

from __future__ import annotations

import dataclasses
import re
import signal
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from billiard import common

import django_amqp_events
from django_amqp_events.broker import amqp_internals
from django_amqp_events.broker.private_names import PrivateName, require
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.worker import celery_internals


class Library:
    attribute = 1

    def __init__(self) -> None:
        self.set_by_init = 1

    def method(self, one: int, two: int = 2) -> None: ...

    def open_ended(self, one: int, *args: Any, **kwargs: Any) -> None: ...


def name(attribute: str, *parameters: str, overridden: bool = False) -> PrivateName:
    path = f"{__name__}:Library.{attribute}"
    return PrivateName(path, "test it", parameters or None, overridden)


@pytest.mark.parametrize(
    "found",
    [
        name("attribute"),
        name("set_by_init"),
        name("method", "self", "one"),
        name("method", "self", "one", "two", overridden=True),
        name("open_ended", "self", "one"),
    ],
)
def test_a_name_that_is_as_expected(found: PrivateName) -> None:
    assert found.problem() == ""


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (PrivateName("no.such.module:name", ""), "no.such.module:name does not exist"),
        (name("renamed"), "Library.renamed does not exist"),
        (name("attribute", "self"), "Library.attribute cannot be called"),
        (name("method", "self"), "Library.method takes (self, one, two), not (self)"),
        (name("method", "self", "two"), "takes (self, one, two), not (self, two)"),
        (name("method", "self", "one", "two", "three"), "not (self, one, two, three)"),
        (name("method", "self", "one", overridden=True), "not (self, one)"),
    ],
)
def test_a_name_that_has_changed(found: PrivateName, says: str) -> None:
    assert says in found.problem()


def test_missing_name_reports_library_version_and_remedy() -> None:
    require("celery", [name("attribute")])
    with pytest.raises(ConfigurationError) as raised:
        require("celery", [name("renamed")])
    text = str(raised.value)
    assert f"celery {version('celery')} is not supported" in text
    assert "Library.renamed does not exist, which is needed to test it" in text
    assert "Install another version of celery or upgrade django_amqp_events" in text


# -- of py-amqp, Celery, kombu and billiard --------------------------------------------------------


MODULES = (amqp_internals, celery_internals)
REQUIRED = [name for module in MODULES for name in module.REQUIRED]
#: Of Celery, kombu and billiard.
MOST_NAMES = 25


def owner_of(name: PrivateName) -> tuple[Any, str]:
    module, _, attribute = name.path.partition(":")
    owner, _, last = attribute.rpartition(".")
    found = import_module(module)
    return (attrgetter(owner)(found) if owner else found), last


def test_the_installed_libraries_have_all_names() -> None:
    assert not [problem for name in REQUIRED if (problem := name.problem())]
    for module in MODULES:
        module.check()


def test_there_are_few() -> None:
    assert len(celery_internals.REQUIRED) <= MOST_NAMES


def test_a_wrapper_that_passes_everything_on_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentry wraps ``build_tracer``, and a worker must still start."""
    (name,) = (name for name in REQUIRED if name.path.endswith(":build_tracer"))
    owner, last = owner_of(name)
    monkeypatch.setattr(owner, last, lambda name, task, *args, **kwargs: None)
    assert name.problem() == ""
    monkeypatch.setattr(owner, last, lambda task, name, *args, **kwargs: None)
    assert "build_tracer takes (task, name, args, kwargs)" in name.problem()
    own = dataclasses.replace(name, overridden=True)
    monkeypatch.setattr(owner, last, lambda name, task, *args, **kwargs: None)
    assert "takes (name, task, args, kwargs)" in own.problem()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_worker_does_not_start_without_a_name_that_it_needs(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module.REQUIRED[0]
    renamed = dataclasses.replace(name, path=f"{name.path}_renamed")
    monkeypatch.setattr(module, "REQUIRED", (renamed,))
    amqp_internals.check.cache_clear()
    with pytest.raises(ConfigurationError, match="does not exist, which is needed to"):
        module.check()


def test_a_signal_that_ends_a_pool_process_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "maybe_setsignal", lambda *_: None)
    monkeypatch.setattr(common, "_should_have_exited", [False])
    with pytest.raises(SystemExit) as ended:
        common._shutdown_cleanup(signal.SIGTERM, None)
    assert celery_internals.terminated_by_signal(ended.value)
    assert not celery_internals.terminated_by_signal(SystemExit(1))
    assert not celery_internals.terminated_by_signal(SystemExit(-1))


def test_no_other_module_imports_what_is_private() -> None:
    private = re.compile(
        r"^(from|import) (celery\.(app\.trace|worker)\b|celery\.app import trace"
        r"|celery import worker|billiard\b(?!\.exceptions))",
        re.MULTILINE,
    )
    package = Path(django_amqp_events.__file__).parent
    found = [
        path.name
        for path in package.rglob("*.py")
        if not path.name.endswith("_internals.py") and private.search(path.read_text())
    ]
    assert found == []
