"""Private names of libraries are checked for existence and parameters."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from django_amqp_events.broker.private_names import PrivateName, require
from django_amqp_events.exceptions import ConfigurationError


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
