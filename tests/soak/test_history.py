"""The checker complains about each planted fault, and about nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .history import Ended, Policy, check
from .schedule import FAULTS, Step, schedule, shrink

POLICY = Policy(handlers=frozenset({"call", "effect"}), once="effect", attempts=3, delay=1.0)


def run(
    at: float, what: str, event: str, handler: str, attempt: int = 1, replay: str | None = None
) -> dict[str, Any]:
    return {
        "at": at, "what": what, "event": event, "handler": handler, "attempt": attempt,
        "replay": replay,
    }  # fmt: skip


def good() -> tuple[list[dict[str, Any]], Ended]:
    """Return a history: the database fails A's first attempt of ``effect``.

    B fails in its first attempt of ``call``; C is archived by ``call`` and replayed.
    """
    lines: list[dict[str, Any]] = [
        {"at": 0.0, "what": "intent", "events": ["a", "b", "c"]},
        {"at": 0.1, "what": "accepted", "events": ["a", "b", "c"]},
    ]
    lines.append(run(1.0, "failed", "a", "effect"))
    for event, attempt in ("a", 2), ("b", 1), ("c", 1):
        lines.append(run(2.0, "start", event, "effect", attempt))
        lines.append(run(2.1, "done", event, "effect", attempt))
    lines += [run(1.0, "start", "a", "call"), run(1.1, "done", "a", "call")]
    lines += [run(1.0, "start", "b", "call"), run(1.1, "raised", "b", "call")]
    lines += [run(2.2, "start", "b", "call", 2), run(2.3, "done", "b", "call", 2)]
    for attempt in (1, 2, 3):
        at = 1.0 + 1.5 * attempt
        lines += [
            run(at, "start", "c", "call", attempt),
            run(at + 0.1, "raised", "c", "call", attempt),
        ]
    lines += [run(9.0, "start", "c", "call", 1, "r"), run(9.1, "done", "c", "call", 1, "r")]
    return lines, Ended(
        archived=frozenset({("m", "call"), ("m", "effect")}),
        waiting=frozenset(),
        effects=["a", "b", "c"],
        exhausted=frozenset({("c", "call")}),
        sent_malformed=frozenset({"m"}),
        archived_malformed=frozenset({("m", "call"), ("m", "effect")}),
        groups=[("g", (1, 0, 0), (1, 0, 0))],
        replays=[("r", "c", "call", "succeeded")],
        messages={"shop.call": 0},
    )


def test_nothing_is_wrong_with_a_good_history() -> None:
    wrong, figures = check(*good(), POLICY)
    assert wrong == []
    assert (figures.pairs, figures.handled, figures.archived) == (6, 6, 0)
    assert (figures.runs, figures.repeated, figures.replays) == (10, 0, 1)


def test_a_run_that_hangs_fails_when_its_time_is_over() -> None:
    lines, ended = lines_without(("done", "a", "call"))(*good())
    limited = replace(POLICY, limited=frozenset({"call"}), limit=15.0)
    later = [run(17.1, "start", "a", "call", 2), run(17.2, "done", "a", "call", 2)]
    assert check([*lines, *later], ended, limited)[0] == []
    early = run(16.9, "start", "a", "call", 2)
    for policy, rule in (limited, "early"), (POLICY, "attempt"):
        wrong, _ = check([*lines, *later, early], ended, policy)
        assert [each.rule for each in wrong] == [rule]


def lines_without(*keys: tuple[str, str, str]) -> Callable[..., Any]:
    def plant(lines: list[dict[str, Any]], ended: Ended) -> Any:
        return [
            line
            for line in lines
            if (line["what"], line.get("event"), line.get("handler")) not in keys
        ], ended

    return plant


def lines_with(*more: dict[str, Any]) -> Callable[..., Any]:
    return lambda lines, ended: ([*lines, *more], ended)


def ending(**changes: Any) -> Callable[..., Any]:
    return lambda lines, ended: (lines, replace(ended, **changes))


PLANTED: dict[str, tuple[Callable[..., Any], str]] = {
    "an ack before the publish": (
        lines_without(("start", "a", "call"), ("done", "a", "call")), "lost: a of call"),
    "a doubled effect": (ending(effects=["a", "b", "b", "c"]), "doubled: 2 effects of b"),
    "a lost effect": (ending(effects=["a", "c"]), "lost: b of effect"),
    "an event out of nothing": (lines_with(run(3, "start", "x", "call")), "unpublished: call"),
    "an early retry": (lines_with(run(2.0, "start", "b", "call", 2)), "b, by 0.100 s"),
    "a skipped attempt": (lines_with(run(9.0, "start", "a", "call", 2)), "did not fail"),
    "an attempt too many": (lines_with(run(9.9, "start", "c", "call", 4)), "3 are declared"),
    "a doubled claim": (lines_with(run(9.9, "start", "a", "call", 1, "r")), "another event"),
    "an unknown replay": (lines_with(run(9.9, "start", "a", "call", 1, "s")), "no such replay"),
    "a replay that did not run": (
        ending(replays=[("r", "c", "call", "succeeded"), ("s", "a", "call", "succeeded")]),
        "nothing ran"),
    "a count off by one": (ending(groups=[("g", (2, 0, 0), (1, 0, 0))]), "group: g counts"),
    "an unread malformed message": (ending(sent_malformed=frozenset("mn")), "malformed: n"),
    "a message left behind": (ending(messages={"shop.call": 1}), "messages: 1 are left"),
    "an event left behind": (ending(waiting=frozenset({("a", "call")})), "waiting: a of call"),
    "an event archived too soon": (ending(exhausted=frozenset({("b", "call")})), "exhausted: b"),
    "a batch that does not end": (ending(failed=["1 of batches"]), "failed: 1 of batches"),
    "a process left behind": (ending(left=["process 1"]), "left behind: process 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, expected = PLANTED[name]
    lines, ended = plant(*good())
    wrong, _ = check(lines, ended, POLICY)
    assert wrong
    assert all(expected in str(each) for each in wrong) or expected in str(wrong[0]), wrong


@given(st.integers(), st.floats(10, 600), st.floats(10, 600))
def test_a_schedule_is_of_its_seed(seed: int, one: float, other: float) -> None:
    short, long = sorted([schedule(seed, one), schedule(seed, other)], key=len)
    assert list(long[: len(short)]) == list(short)
    assert all(step.seconds <= FAULTS[step.fault][1] for step in long)
    assert [step.at for step in long] == sorted(step.at for step in long)


@given(st.integers(), st.data())
def test_a_schedule_shrinks_to_what_fails(seed: int, data: st.DataObject) -> None:
    steps = schedule(seed, 60)
    needed = data.draw(st.sets(st.sampled_from(steps))) if steps else set()
    runs = 0

    def fails(rest: Sequence[Step]) -> bool:
        nonlocal runs
        runs += 1
        return needed <= set(rest)

    assert set(shrink(steps, fails)) == needed
    if len(needed) == 1:
        assert runs < 20
