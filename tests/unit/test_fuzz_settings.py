"""Any value at all for AMQP_EVENTS: parsing never raises, and what is wrong has a name.

Few examples by default; ``AMQP_EVENTS_FUZZ=20000`` and ``--timeout 0`` look for longer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import Any, get_type_hints

from hypothesis import Phase, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from pydantic import TypeAdapter

from django_amqp_events import conf
from django_amqp_events.conf import (
    Settings,
    parse,
)
from django_amqp_events.options import DEFAULT_OPTIONS, EVENT_OPTIONS, HANDLER_OPTIONS, MAX, Problem

EXAMPLES = int(os.environ.get("AMQP_EVENTS_FUZZ", "25"))
fuzz = profile(max_examples=2 * EXAMPLES, phases=set(Phase) - {Phase.explain})


adapter = cache(TypeAdapter)


class Odd:
    """Not equal to anything, not even itself."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "<odd>"


words = st.one_of(
    st.text(max_size=12),
    st.text("abz_-.:#* \0\ud800é", max_size=300),
    st.sampled_from(
        ["billing", "events", "amq.topic", "quorum", "classic", "memory", "http://rabbit:15672"]
    ),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-1, 3),
    st.floats(),
    words,
    st.binary(max_size=5),
    st.timedeltas(),
    st.builds(Odd),
    st.just(print),
)
hashable = st.one_of(words, st.integers(), st.none(), st.tuples(words, st.integers()))
options = st.sampled_from([name.upper() for name in {**HANDLER_OPTIONS, **EVENT_OPTIONS}])
nested: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(hashable, max_size=3),
        st.dictionaries(st.one_of(hashable, options), inner, max_size=4),
    ),
    max_leaves=10,
)
by_name = st.dictionaries(
    st.one_of(words, hashable), st.dictionaries(options, nested, max_size=3), max_size=3
)
known: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(conf.KEYS, nested)
known |= {"EVENTS": st.one_of(nested, by_name), "HANDLERS": st.one_of(nested, by_name)}
known |= {
    key: st.one_of(nested, st.dictionaries(st.sampled_from(names), nested))
    for key, names in {
        "ARCHIVE": ["TTL", "MAX_LENGTH"],
        "RETENTION": ["SUCCEEDED", "DISCARDED", "SNAPSHOTS", "ALERTS"],
        "ALERTS": ["MAIL", "GROWTH", "MIRROR_LAG", "AWAY"],
        "DEFAULTS": [name.upper() for name in DEFAULT_OPTIONS],
    }.items()
}
known["RENAMED_HANDLERS"] = st.one_of(
    nested, st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("abcdef"))
)
settings_dicts = st.builds(
    lambda right, more: {**more, **right},
    st.fixed_dictionaries({}, optional=known),
    st.dictionaries(hashable, nested, max_size=2),
)


def check_types(found: Any) -> None:
    """Check that whatever came, what comes out has the types that the annotations say."""
    for name, hint in get_type_hints(type(found)).items():
        value = getattr(found, name)
        if is_dataclass(value):
            check_types(value)
        else:
            adapter(hint).validate_python(value, strict=True)


def checked(raw: object, *, debug: bool = False) -> tuple[Settings, tuple[Problem, ...]]:
    settings, problems = parse(raw, debug=debug)
    for problem in problems:
        assert problem.code[0] in "EW"
        assert "AMQP_EVENTS" in problem.message
        assert len(problem.message) < 2000
        assert problem.hint
    check_types(settings)
    assert 0 < settings.confirm_timeout < MAX
    assert 0 < settings.max_body < MAX
    for found in (settings.archive, settings.retention, settings.alerts):
        for value in (getattr(found, each.name) for each in fields(found)):
            assert value is None or isinstance(value, bool) or 0 < value < MAX
    for entry in (*settings.events.values(), *settings.handlers.values()):
        assert all(key == key.lower() for key in entry)
    assert all(pair[0] and pair[1] for pair in settings.renamed_handlers.items())
    return settings, problems


@fuzz
@given(nested, st.booleans())
def test_any_value(raw: object, debug: bool) -> None:
    _, problems = checked(raw, debug=debug)
    assert problems
    if raw and not isinstance(raw, Mapping):
        assert [problem.code for problem in problems] == ["E003"]


@fuzz
@given(settings_dicts)
def test_any_dict(raw: dict[Any, Any]) -> None:
    settings, problems = checked(raw)
    unknown = [key for key in raw if key not in conf.KEYS]
    said = [problem for problem in problems if problem.code == "E002"]
    assert len(said) >= len(unknown)
    if not raw:
        return
    if "SERVICE" not in raw:
        assert "E001" in {problem.code for problem in problems}
    if not any(problem.is_error for problem in problems):
        # Settings without an error work: names fit and can be encoded.
        assert settings.service
        (settings.prefix + settings.exchange).encode()


@fuzz
@given(st.sampled_from(sorted(conf.KEYS)), nested)
def test_a_key_is_taken_or_its_problem_is_named(key: str, value: Any) -> None:
    settings, problems = checked({"SERVICE": "billing", key: value})
    name = {"RETENTION": "retention", "RENAMED_HANDLERS": "renamed_handlers"}.get(key, key.lower())
    default = Settings(service="billing")
    taken = getattr(settings, name)
    if not problems and taken == getattr(default, name):
        return
    if problems:
        assert any(key in problem.message for problem in problems), problems
    elif isinstance(value, timedelta):
        assert taken == value.total_seconds()
