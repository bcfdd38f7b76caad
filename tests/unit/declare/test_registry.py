"""Decorators and settings, put together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from decimal import InvalidOperation
from typing import Any

import pytest
from celery import Task

from django_amqp_events import conf
from django_amqp_events import options as known_options
from django_amqp_events.declare.declarations import (
    EventDeclaration,
    HandlerDeclaration,
    default_name,
)
from django_amqp_events.declare.patterns import (
    pattern_matches,
    pattern_problem,
    patterns_overlap,
)
from django_amqp_events.declare.registry import Handler, Registry, build
from django_amqp_events.decorators import Event, HandlerFunction, Publishable

HERE = __name__


def contract(order_id: int) -> None: ...


def other_contract(order_id: int) -> None: ...


def invoice(order_id: int) -> None: ...


def mail(order_id: int) -> None: ...


@functools.wraps(invoice)  # as by a user's decorator, such as transaction.atomic
def decorated(order_id: int) -> None: ...


class InvoiceTask(Task):
    max_retries = 3
    time_limit = 60
    autoretry_for = (OSError,)

    def run(self, order_id: int) -> None: ...


declared_event = Event("shop.order.created", contract)
urgent_event = declared_event.using(mode="immediate")
event_without_contract = Publishable[...]("shop.order.created")
declared_handler: HandlerFunction[..., Any] = HandlerFunction(
    HandlerDeclaration(target=invoice, name="billing.invoice", options={})
)


def declaration(
    target: Callable[..., Any] = invoice, name: str = "billing.invoice", **options: Any
) -> HandlerDeclaration:
    return HandlerDeclaration(
        target=target, name=name, options={"events": ("shop.order.created",), **options}
    )


def put_together(
    *handlers: HandlerDeclaration,
    events: tuple[EventDeclaration, ...] = (),
    **keys: Any,
) -> Registry:
    settings, problems = conf.parse({"SERVICE": "billing", **keys})
    assert problems == ()
    return build(settings, events, handlers)


def clean(*handlers: HandlerDeclaration, **keys: Any) -> Mapping[str, Handler]:
    """Build a registry that must have no problem, and return its handlers."""
    found = put_together(*handlers, **keys)
    assert found.problems == ()
    return found.handlers


def codes(*handlers: HandlerDeclaration, **keys: Any) -> list[str]:
    found = put_together(*handlers, **keys)
    assert all(problem.hint for problem in found.problems)
    return [problem.code for problem in found.problems]


NO_NAMES = "a:b", "a b", "a\x00", "a..b", ".a", "a.", "a.*", "#", "a.b\ud800", "a,b", "a.[b]", "a?"


# -- handlers -----------------------------------------------------------------------------


def test_type_checkers_know_every_option() -> None:
    words = known_options.HandlerWords.__annotations__.keys()
    assert words == known_options.HANDLER_OPTIONS.keys() - {"events", "handler"}


def test_settings_and_decorators_have_the_same_options() -> None:
    options: dict[str, Any] = {
        "EVENTS": ["shop.order.created"],
        "BIND": True,
        "STRICT": True,
        "QUEUE": "mail",
        "MAX_RETRIES": 5,
        "RETRY_BACKOFF": 30,
        "RETRY_BACKOFF_MAX": 300,
        "RETRY_JITTER": True,
        "DEFAULT_RETRY_DELAY": 9,
        "AUTORETRY_FOR": ["OSError", "decimal.InvalidOperation"],
        "DONT_AUTORETRY_FOR": "ValueError",
        "TIME_LIMIT": 60,
        "SOFT_TIME_LIMIT": 50,
        "RATE_LIMIT": "10/m",
        "IGNORE_RESULT": False,
    }
    by_settings = clean(HANDLERS={"billing.invoice": {**options, "HANDLER": f"{HERE}.invoice"}})
    by_decorator = clean(declaration(**{name.lower(): value for name, value in options.items()}))
    assert by_settings == by_decorator
    handler = by_settings["billing.invoice"]
    assert handler.queue == "billing.mail"
    assert handler.key == "billing.billing.invoice"
    assert handler.policy.autoretry_for == (OSError, InvalidOperation)


def test_settings_may_name_the_decorated_function() -> None:
    for path in (f"{HERE}.invoice", f"{HERE}.declared_handler"):
        handlers = clean(declaration(), HANDLERS={"billing.invoice": {"HANDLER": path}})
        assert handlers["billing.invoice"].target is invoice


def test_defaults_stand_behind_both() -> None:
    defaults = {"MAX_RETRIES": 2, "RETRY_BACKOFF": 7, "STRICT": True}
    handlers = clean(
        declaration(max_retries=5),
        declaration(mail, "billing.mail"),
        DEFAULTS=defaults,
        HANDLERS={"billing.mail": {"RETRY_BACKOFF": 8}},
    )
    assert handlers["billing.invoice"].policy.max_retries == 5
    assert handlers["billing.invoice"].policy.retry_backoff == 7
    assert handlers["billing.mail"].policy.max_retries == 2
    assert handlers["billing.mail"].policy.retry_backoff == 8
    assert handlers["billing.mail"].strict


def test_a_different_callable_under_one_name() -> None:
    assert codes(declaration(), HANDLERS={"billing.invoice": {"HANDLER": f"{HERE}.mail"}}) == [
        "E008"
    ]
    assert codes(declaration(), declaration(mail)) == ["E008"]
    assert codes(declaration(), declaration()) == ["E008"]


def test_enabled_false_silences_a_handler() -> None:
    silent = {"billing.invoice": {"ENABLED": False}}
    assert clean(declaration(), HANDLERS=silent) == {}
    assert clean(HANDLERS=silent) == {}
    assert clean(declaration(enabled=False)) == {}
    assert set(clean(declaration(), HANDLERS={"billing.invoice": {"ENABLED": True}})) == {
        "billing.invoice"
    }


def test_the_default_name_is_app_label_and_function() -> None:
    from django.contrib.auth.models import User

    assert default_name(User) == "auth.User"
    assert default_name(invoice) == "tests.invoice"
    assert set(clean(declaration(name=""))) == {"tests.invoice"}


def test_several_handlers_of_one_event_and_of_one_queue() -> None:
    found = put_together(
        declaration(queue="all"),
        declaration(mail, "billing.mail", queue="all", events=("shop.order.paid", "shop.a.#")),
        declaration(mail, "billing.other"),
    )
    assert found.problems == ()
    queues = found.by_queue()
    assert {queue: [h.name for h in handlers] for queue, handlers in queues.items()} == {
        "billing.all": ["billing.invoice", "billing.mail"],
        "billing.billing.other": ["billing.other"],
    }

    def name_of(queue: str, event: str) -> str | None:
        handler = found.find(queue, event)
        return handler.name if handler else None

    assert name_of("billing.all", "shop.order.created") == "billing.invoice"
    assert name_of("billing.all", "shop.order.paid") == "billing.mail"
    assert name_of("billing.all", "shop.a") == "billing.mail"
    assert name_of("billing.billing.other", "shop.order.created") == "billing.other"
    assert name_of("billing.all", "shop.order.lost") is None
    assert name_of("billing.none", "shop.order.created") is None


def test_an_event_may_be_given_as_the_object() -> None:
    handlers = clean(declaration(events=(declared_event,)))
    assert handlers["billing.invoice"].patterns == ("shop.order.created",)
    handlers = clean(declaration(events=declared_event))
    assert handlers["billing.invoice"].patterns == ("shop.order.created",)
    handlers = clean(declaration(events="shop.#"))
    assert handlers["billing.invoice"].patterns == ("shop.#",)


@pytest.mark.parametrize("name", ["declared_event", "urgent_event"])
def test_an_event_with_options_stands_for_its_contract(name: str) -> None:
    found = put_together(
        events=(EventDeclaration(name="shop.order.created", contract=contract),),
        EVENTS={"shop.order.created": {"CONTRACT": f"{HERE}.{name}"}},
    )
    assert found.problems == ()
    assert found.events["shop.order.created"].contract is contract
    twice = EventDeclaration(name="a.b", contract=contract, options={"contract": contract})
    assert [problem.code for problem in put_together(events=(twice,)).problems] == ["E002"]
    nothing = {"EVENTS": ["a.b"], "HANDLER": f"{HERE}.event_without_contract"}
    assert codes(HANDLERS={"a.b": nothing}) == ["E007"]


def test_a_users_decorator_is_part_of_the_handler() -> None:
    handlers = clean(HANDLERS={"billing.x": {"EVENTS": ["a.b"], "HANDLER": f"{HERE}.decorated"}})
    assert handlers["billing.x"].target is decorated


def test_options_of_a_task_class_stand_behind_the_decorator() -> None:
    handlers = clean(declaration(InvoiceTask, time_limit=30), DEFAULTS={"MAX_RETRIES": 9})
    handler = handlers["billing.invoice"]
    assert handler.policy.max_retries == 3
    assert handler.policy.autoretry_for == (OSError,)
    assert handler.time_limit == 30
    # Celery's own defaults on the base class say nothing.
    assert handler.policy.retry_backoff == 1


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"events": ()}, "E006"),
        ({"events": None}, "E006"),
        ({"events": 5}, "E006"),
        ({"events": ("shop..x",)}, "E006"),
        ({"events": (5,)}, "E006"),
        ({"events": ("shop.ord*",)}, "E006"),
        ({"max_retry": 5}, "E002"),
        ({"queue": "a:b"}, "E004"),
        ({"queue": 5}, "E004"),
        ({"queue": " "}, "E004"),
        ({"queue": "mail.*"}, "E004"),
        ({"queue": ["mail"]}, "E004"),
        ({"queue": "x" * 255}, "E005"),
        ({"queue": "x\x00"}, "E004"),
        *(({"enabled": value}, "E009") for value in ("no", 0, None)),
        *(({"name": name}, "E004") for name in NO_NAMES),
        ({"bind": 1}, "E009"),
        ({"strict": "yes"}, "E009"),
        ({"once": "yes"}, "E009"),
        ({"once": 1}, "E009"),
        ({"using": 7}, "E009"),
        ({"using": None}, "E009"),
        ({"ignore_result": None}, "E009"),
        ({"time_limit": 0}, "E009"),
        ({"time_limit": True}, "E009"),
        ({"time_limit": "5"}, "E009"),
        ({"time_limit": float("nan")}, "E009"),
        ({"soft_time_limit": -1}, "E009"),
        ({"time_limit": 5, "soft_time_limit": 5}, "E009"),
        ({"rate_limit": "often"}, "E009"),
        ({"rate_limit": "10/d"}, "E009"),
        ({"rate_limit": -1}, "E009"),
        ({"rate_limit": ()}, "E009"),
        ({"retry_backoff": 600}, "E009"),
        ({"autoretry_for": 5}, "E009"),
        ({"autoretry_for": iter([ValueError])}, "E009"),
        ({"autoretry_for": "no.such.Error"}, "E007"),
        ({"autoretry_for": "NoSuchError"}, "E007"),
        ({"dont_autoretry_for": ["ValueError", "x.y"]}, "E007"),
    ],
)
def test_wrong_options(options: dict[str, Any], code: str) -> None:
    assert codes(declaration(**options)) == [code]


@pytest.mark.parametrize("rate", [None, 5, 0.5, "10", "10/s", "100/m", "0.5/h"])
def test_rate_limits_that_celery_reads(rate: Any) -> None:
    from celery.utils.time import rate as celery_rate

    assert clean(declaration(rate_limit=rate))["billing.invoice"].rate_limit == rate
    celery_rate(rate)


@pytest.mark.parametrize("path", ["no.such.module", f"{HERE}.nothing", f"{HERE}.HERE", 5, ""])
def test_paths_of_nothing(path: object) -> None:
    assert codes(HANDLERS={"a.b": {"EVENTS": ["a.b"], "HANDLER": path}}) == ["E007"]
    assert codes(EVENTS={"a.b": {"CONTRACT": path}}) == ["E007"]


def test_a_module_that_fails_is_named() -> None:
    assert codes(HANDLERS={"a.b": {"EVENTS": ["a.b"]}}) == ["E007"]
    found = put_together(HANDLERS={"a.b": {"EVENTS": ["a.b"], "HANDLER": "tests.unit.broken.x"}})
    assert [problem.code for problem in found.problems] == ["E007"]
    assert "RuntimeError: broken on purpose" in found.problems[0].message


# -- events -------------------------------------------------------------------------------


def test_events_by_decorator_and_by_settings() -> None:
    found = put_together(
        events=(EventDeclaration(name="a.b", contract=contract),),
        EVENTS={"a.b": {}, "a.c": {"CONTRACT": f"{HERE}.contract"}, "a.d": {}},
    )
    assert found.problems == ()
    assert {name: event.contract for name, event in found.events.items()} == {
        "a.b": contract,
        "a.c": contract,
        "a.d": None,
    }


def test_one_event_with_two_contracts() -> None:
    two = (
        EventDeclaration(name="a.b", contract=contract),
        EventDeclaration(name="a.b", contract=other_contract),
    )
    assert codes(events=two) == ["E008"]
    assert codes(events=(two[0], two[0])) == []
    by_settings = {"a.b": {"CONTRACT": f"{HERE}.other_contract"}}
    assert codes(events=two[:1], EVENTS=by_settings) == ["E008"]


@pytest.mark.parametrize("name", ["a.*", "#", "", "a..b", "a b", "x" * 256])
def test_forbidden_event_names(name: str) -> None:
    assert codes(EVENTS={name: {}}) == ["E006"]
    assert codes(events=(EventDeclaration(name=name, contract=contract),)) == ["E006"]


# -- patterns --------------------------------------------------------------------------------------


PATTERNS = [
    words for count in (1, 2, 3) for words in itertools.product(("a", "b", "*", "#"), repeat=count)
]
# Long enough: whatever two patterns of three words share, they share a name of six words.
NAMES = [words for count in range(1, 7) for words in itertools.product("abc", repeat=count)]


def matches(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    """Say whether a pattern matches, by trying every share of words for each ``#``."""
    if not pattern:
        return not name
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(matches(rest, name[count:]) for count in range(len(name) + 1))
    return bool(name) and head in ("*", name[0]) and matches(rest, name[1:])


def test_matches_as_trying_everything_does() -> None:
    for pattern in PATTERNS:
        for name in NAMES[:120]:
            assert pattern_matches(".".join(pattern), ".".join(name)) is matches(pattern, name), (
                pattern,
                name,
            )


def test_overlaps_where_some_name_is_matched_by_both() -> None:
    reached = {
        pattern: {index for index, name in enumerate(NAMES) if matches(pattern, name)}
        for pattern in PATTERNS
    }
    for first, second in itertools.combinations_with_replacement(PATTERNS, 2):
        expected = not reached[first].isdisjoint(reached[second])
        left, right = ".".join(first), ".".join(second)
        assert patterns_overlap(left, right) is expected, (left, right)
        assert patterns_overlap(right, left) is expected, (right, left)


def test_a_name_is_taken_literally() -> None:
    # RabbitMQ compares routing keys with patterns; a * in a routing key is a word like others.
    assert not pattern_matches("shop.created", "shop.*")
    assert not pattern_matches("shop.created", "#")
    assert pattern_matches("shop.*", "shop.*")


@pytest.mark.parametrize("words", [120, 128])
def test_many_hashes_end_in_time(words: int) -> None:
    hostile = ".".join(["#", "a"] * (words // 2))
    assert not pattern_matches(hostile, ".".join(["a"] * (words - 1) + ["b"]))
    assert patterns_overlap(hostile, hostile)


@pytest.mark.parametrize(
    "pattern",
    ["shop.order.created", "shop.*", "#", "*", "#.created", "a-b_c.ÄÖ", "x" * 255, "ä" * 127],
)
def test_good_patterns(pattern: str) -> None:
    assert pattern_problem(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (None, "not a string"),
        (5, "not a string"),
        ("", "empty"),
        ("x" * 256, "255 bytes"),
        ("ä" * 128, "255 bytes"),
        ("shop..created", "empty word"),
        (".shop", "empty word"),
        ("shop.", "empty word"),
        ("shop.order*", "whole words"),
        ("shop.##", "whole words"),
        ("shop.new order", "space"),
        ("shop\n", "space"),
        ("shop.\x00", "control"),
        ("shop.\ud800", "surrogate"),
        ("shop,order", "comma"),
        ("shop.[order]", "bracket"),
        ("shop.order?", "question mark"),
    ],
)
def test_bad_patterns(pattern: object, reason: str) -> None:
    problem = pattern_problem(pattern)
    assert problem is not None
    assert reason in problem
