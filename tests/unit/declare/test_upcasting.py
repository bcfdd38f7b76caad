"""Versions of an event: which handlers receive an older one, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded

from django_amqp_events import ConfigurationError, conf, event
from django_amqp_events.declare.declarations import declarations
from django_amqp_events.declare.registry import Handler, Registry, build
from django_amqp_events.decorators import Event
from django_amqp_events.worker.binding import upcast
from django_amqp_events.worker.verdict import ContractViolated

V1, V2, V3 = (f"shop.order.created{suffix}" for suffix in ("", ".v2", ".v3"))


def handle(**payload: Any) -> None: ...


def versions() -> tuple[Event[...], Event[...], Event[...]]:
    """Declare three versions with the upcasters between them."""

    def contract(**payload: Any) -> None: ...

    one, two, three = (event(name)(contract) for name in (V1, V2, V3))

    @two.upcast_from(one)
    def with_currency(payload: dict[str, Any]) -> dict[str, Any]:
        payload["steps"] = [*payload.get("steps", ()), "currency"]
        payload.setdefault("nested", {})["changed"] = True
        return payload

    @three.upcast_from(V2)
    def with_country(payload: dict[str, Any]) -> dict[str, Any]:
        return {**payload, "steps": [*payload.get("steps", ()), "country"]}

    assert callable(with_currency)  # it stays a function
    assert with_country({}) == {"steps": ["country"]}
    return one, two, three


def registry(*patterns: str, **options: Any) -> Registry:
    handlers = {"m.h": {"handler": handle, "events": list(patterns), **options}}
    settings = conf.Settings(service="billing", handlers=handlers if patterns else {})
    return build(settings, *declarations.snapshot())


def handler_of(*patterns: str) -> Handler:
    found = registry(*patterns)
    assert found.problems == ()
    return found.handlers["m.h"]


def steps(handler: Handler, name: str) -> list[str]:
    return upcast(handler, name, (), {}).get("steps", [])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("patterns", "bindings", "expected"),
    [
        ([V2], (V2, V1), {V1: ["currency"], V2: []}),
        ([V3], (V3, V1, V2), {V1: ["currency", "country"], V2: ["country"], V3: []}),
        # The nearest version that it takes.
        ([V2, V3], (V2, V3, V1), {V1: ["currency"], V2: [], V3: []}),
        # What its patterns match, it receives as it is.
        ([V1, V2], (V1, V2), {V1: [], V2: []}),
        (["shop.order.#"], ("shop.order.#",), {V1: [], V2: [], V3: []}),
        (["*.order.created.v2"], ("*.order.created.v2", V1), {V1: ["currency"], V2: []}),
        ([V1], (V1,), {V1: []}),
    ],
)
def test_a_handler_receives_older_versions(
    patterns: list[str], bindings: tuple[str, ...], expected: dict[str, list[str]]
) -> None:
    versions()
    handler = handler_of(*patterns)
    assert handler.bindings == bindings
    assert {name: steps(handler, name) for name in expected} == expected


def test_handlers_of_one_queue_that_would_both_receive_an_older_version() -> None:
    versions()
    both = {
        "m.old": {"handler": handle, "events": [V1], "queue": "all"},
        "m.new": {"handler": handle, "events": [V2], "queue": "all"},
    }
    settings = conf.Settings(service="billing", handlers=both)
    found = build(settings, *declarations.snapshot())
    assert [problem.code for problem in found.problems] == ["E010"]


def test_the_payload_as_it_came_is_not_changed() -> None:
    versions()
    came = {"nested": {"kept": 1}}
    assert upcast(handler_of(V2), V1, (), came)["nested"] == {"kept": 1, "changed": True}
    assert came == {"nested": {"kept": 1}}


def test_declared_by_name_in_settings() -> None:
    two = event(V2)(handle)
    two.upcast_from(V1)(lambda payload: {"steps": ["x"]})
    handlers = {"m.h": {"handler": handle, "events": [V2]}}
    settings = conf.Settings(service="billing", handlers=handlers, events={V1: {}})
    found = build(settings, *declarations.snapshot())
    assert found.problems == ()
    assert steps(found.handlers["m.h"], V1) == ["x"]
    assert found.events[V2].contract is handle


def problem(*patterns: str) -> tuple[str, str]:
    (found,) = registry(*patterns).problems
    assert found.hint
    return found.code, found.message


def test_an_event_that_is_not_declared() -> None:
    two = event(V2)(handle)
    two.upcast_from("shop.order.creatd")(dict)
    code, message = problem(V2)
    assert code == "E081"
    assert "'shop.order.creatd', which is not declared" in message


@pytest.mark.parametrize("newer", [1, 2])
def test_two_upcasters_of_the_same_event(newer: int) -> None:
    declared = versions()
    declared[newer].upcast_from(declared[0])(dict)
    code, message = problem(V2)
    assert code == "E008"
    assert "with_currency" in message
    assert "builtins.dict" in message


def test_a_cycle_ends_at_the_nearest_version() -> None:
    one, _, three = versions()
    one.upcast_from(three)(dict)
    for handled, other in ((V1, V2), (V2, V3), (V3, V1)):
        upcast_of = handler_of(handled).upcast_of(other)
        assert upcast_of is not None
        assert upcast_of.target == handled


def test_wrong_decorators() -> None:
    _, two, _ = versions()
    with pytest.raises(ConfigurationError, match="Write @order_created_v2"):
        two.upcast_from(handle)  # type: ignore[arg-type]

    async def asynchronous(payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    with pytest.raises(ConfigurationError, match="takes a dict and returns a dict"):
        two.upcast_from(V1)(asynchronous)  # type: ignore[type-var]


def raising(error: BaseException) -> Handler:
    one, two, _ = (event(name)(handle) for name in (V1, V2, V3))

    @two.upcast_from(one)
    def wrong(payload: dict[str, Any]) -> dict[str, Any]:
        raise error

    return handler_of(V2)


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [KeyError("total"), SilentError()])
def test_an_upcaster_that_raises(error: Exception) -> None:
    with pytest.raises(ContractViolated, match=r"wrong failed from .*: .*Error") as raised:
        upcast(raising(error), V1, (), {"order_id": 1})
    assert raised.value.__cause__ is error
    assert f"from '{V1}' to '{V2}'" in str(raised.value)


def test_a_time_limit_is_not_the_upcasters_fault() -> None:
    with pytest.raises(SoftTimeLimitExceeded):
        upcast(raising(SoftTimeLimitExceeded()), V1, (), {})


@pytest.mark.parametrize("result", [None, [("a", 1)], {1: 2}])
def test_an_upcaster_that_returns_no_payload(result: Any) -> None:
    one, two = (event(name)(handle) for name in (V1, V2))
    two.upcast_from(one)(lambda payload: result)
    with pytest.raises(ContractViolated, match="Return a dict with the arguments by name"):
        upcast(handler_of(V2), V1, (), {})


def test_arguments_without_a_name_cannot_be_upcast() -> None:
    versions()
    with pytest.raises(ContractViolated, match="2 arguments without a name"):
        upcast(handler_of(V2), V1, (1, 2), {})
