"""Versions of things in payloads, and declarations of ``newest``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_amqp_events import event, handler
from django_amqp_events.declare.newest import LIMIT, read
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.testing import override_events

PATHS = ("order.id", "version")
OFFSETS = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
VERSIONS = st.one_of(
    st.tuples(*[st.integers(1 - LIMIT, LIMIT - 1)] * 2),
    st.tuples(*[st.datetimes(timezones=OFFSETS)] * 2),
)  # fmt: skip


def written(version: Any) -> Any:
    return version.isoformat() if isinstance(version, datetime) else version


@given(VERSIONS)
def test_numbers_have_the_order_of_the_versions(versions: tuple[Any, Any]) -> None:
    first, second = (
        read(PATHS, {"order": {"id": 7}, "version": written(version)}) for version in versions
    )
    assert first.thing == second.thing == "7"
    assert (first.number < second.number) is (versions[0] < versions[1])
    assert (first.number == second.number) is (versions[0] == versions[1])
    assert first.is_time is isinstance(versions[0], datetime)


def test_a_time_without_offset_is_in_utc() -> None:
    aware = datetime(2026, 11, 29, 12, tzinfo=UTC)
    texts = ("2026-11-29T12:00:00", "2026-11-29T12:00:00Z", "2026-11-29T13:00:00+01:00")
    numbers = {read(PATHS, {"order": {"id": "a"}, "version": text}).number for text in texts}
    assert numbers == {int(aware.timestamp()) * 1_000_000}


@pytest.mark.parametrize("thing", [None, True, 1.5, "", [1], {}])
def test_a_thing_is_an_integer_or_a_text(thing: Any) -> None:
    with pytest.raises(ValueError, match=r"'order\.id' is"):
        read(PATHS, {"order": {"id": thing}, "version": 1})


@pytest.mark.parametrize("version", [None, True, 1.5, "", "soon", "17", [1], LIMIT, -LIMIT])
def test_a_version_is_an_integer_or_a_time(version: Any) -> None:
    with pytest.raises(ValueError, match="'version' is"):
        read(PATHS, {"order": {"id": 1}, "version": version})


@pytest.mark.parametrize("payload", [{}, {"order": 1, "version": 2}, {"order": {"id": 1}}])
def test_a_missing_value_is_named(payload: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"the payload has no '(order\.id|version)'"):
        read(PATHS, payload)


@pytest.mark.parametrize(
    "newest",
    [
        "order_id",
        ("order_id",),
        ("order_id", "version", "x"),
        ("order id", "version"),
        ("order_id", 1),
    ],
)
def test_a_wrong_declaration_is_an_error(newest: Any) -> None:
    with override_events(SERVICE="billing", AUTODISCOVER=[]):

        @handler("shop.order.updated", name="books.newest", newest=newest)
        def books(**payload: Any) -> None: ...

        with pytest.raises(ConfigurationError, match="two paths"):
            get_registry()


@pytest.mark.parametrize("kind", [int, datetime, "int", "datetime | None", str, Any])
def test_newest_implies_once(kind: Any) -> None:
    def updated(order_id: int, version: Any) -> None: ...

    updated.__annotations__["version"] = kind
    with override_events(SERVICE="billing", AUTODISCOVER=[]):

        @handler(event("shop.order.updated")(updated), newest=("order_id", "version"), name="b.new")
        def books(**payload: Any) -> None: ...

        declared = get_registry().handlers["b.new"]
        assert declared.once
        assert declared.newest == ("order_id", "version")


@pytest.mark.parametrize("options", [{"once": False}, {}])
def test_once_false_contradicts_newest(options: Any) -> None:
    defaults = {} if options else {"ONCE": False}
    with override_events(SERVICE="billing", AUTODISCOVER=[], DEFAULTS=defaults):

        @handler("shop.order.updated", name="b.new", newest=("order_id", "version"), **options)
        def books(**payload: Any) -> None: ...

        with pytest.raises(ConfigurationError, match="or ONCE from DEFAULTS"):
            get_registry()
