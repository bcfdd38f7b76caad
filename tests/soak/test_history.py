"""The checker complains about each planted fault, a soak about one of the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.conftest import _grounds, grounds  # noqa: F401 - fixtures
from tests.faults.world import Grounds, world

from . import soaking
from .history import Discarded, Ended, Failed, Policy, Replayed, check

POLICY = Policy(handlers=frozenset({"call", "effect"}), once="effect", attempts=3, delay=1.0)


C = Replayed("r", "c", "call", "succeeded", "C", 0)
E = Replayed("q", "e", "call", "succeeded", "E", 0, "t2")
FAILURES = [
    *(Failed(event, "call", None, "exhausted") for event in "cde"),
    *(Failed("m", handler, None, "malformed") for handler in ("call", "effect")),
]


def run(
    at: float, what: str, event: str, handler: str, attempt: int = 1, replay: str | None = None,
    edit: str = "",
) -> dict[str, Any]:  # fmt: skip
    return {
        "at": at, "what": what, "event": event, "handler": handler, "attempt": attempt,
        "replay": replay, "edit": edit, "content": f"of {event}",
    }  # fmt: skip


def decided(
    decision: str, token: str, row: str, version: int, by: str = "ann", result: str = "done"
) -> dict[str, Any]:
    """The row of an event has its name in capitals."""
    return {
        "at": 8.0, "what": "decided", "decision": decision, "token": token, "row": row,
        "version": version, "by": by, "event": row.lower(), "handler": "call", "result": result,
    }  # fmt: skip


def good() -> tuple[list[dict[str, Any]], Ended]:
    """Return a history: the database fails A's first attempt of ``effect``.

    B fails in its first attempt of ``call``; C is archived by ``call`` and replayed. D is archived
    too, and ann discards it; she edits E, which bob tries to replay at the same time.
    """
    everything = ["a", "b", "c", "d", "e"]
    lines: list[dict[str, Any]] = [
        {
            "at": 0.0,
            "what": "intent",
            "events": everything,
            "contents": [f"of {event}" for event in everything],
        },
        {"at": 0.1, "what": "accepted", "events": everything},
    ]
    lines.append(run(1.0, "failed", "a", "effect"))
    for event, attempt in ("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 1):
        lines.append(run(2.0, "start", event, "effect", attempt))
        lines.append(run(2.1, "done", event, "effect", attempt))
    lines += [run(1.0, "start", "a", "call"), run(1.1, "done", "a", "call")]
    lines += [run(1.0, "start", "b", "call"), run(1.1, "raised", "b", "call")]
    lines += [run(2.2, "start", "b", "call", 2), run(2.3, "done", "b", "call", 2)]
    for attempt in (1, 2, 3):
        at = 1.0 + 1.5 * attempt
        for event in "c", "d", "e":
            lines.append(run(at, "start", event, "call", attempt))
            lines.append(run(at + 0.1, "raised", event, "call", attempt))
    lines += [run(9.0, "start", "c", "call", 1, "r"), run(9.1, "done", "c", "call", 1, "r")]
    lines += [decided("discard", "t1", "D", 0), decided("edit", "t2", "E", 0)]
    lines.append(decided("replay", "t3", "E", 0, "bob", "refused"))
    edited = run(9.0, "start", "e", "call", 1, "q", "t2")
    lines += [edited, run(9.1, "done", "e", "call", 1, "q")]
    return lines, Ended(
        archived=frozenset({("m", "call"), ("m", "effect")}),
        waiting=frozenset(),
        effects=everything,
        failures=FAILURES,
        sent_malformed=frozenset({"m"}),
        replays=[C, E],
        discarded=[Discarded("D", "d", "call")],
        actions=[("ann", "t1", "D"), ("ann", "t2", "E")],
        recorded=frozenset({"r", "q", "s", "p"}),
        messages={"shop.call": 0},
        troubled=frozenset({"g"}),
        alerts=frozenset({("group_back", "g")}),
        figures={"archived": (2, 2)},
    )


def test_nothing_is_wrong_with_a_good_history() -> None:
    wrong, figures = check(*good(), POLICY)
    assert wrong == []
    assert (figures.pairs, figures.handled, figures.archived) == (10, 9, 0)
    assert (figures.discarded, figures.decisions) == (1, 2)
    assert (figures.runs, figures.repeated, figures.replays) == (19, 0, 2)


def test_an_empty_history_is_wrong() -> None:
    ended = Ended(archived=frozenset(), waiting=frozenset(), effects=[])
    assert [str(each) for each in check([], ended, POLICY)[0]] == ["failed: nothing was published"]


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
    "a doubled effect": (ending(effects=[*"abbcde"]), "doubled: 2 effects of b"),
    "an event out of nothing": (lines_with(run(3, "start", "x", "call")), "unpublished: call"),
    "an early retry": (lines_with(run(2.0, "start", "b", "call", 2)), "b, by 0.100 s"),
    "a skipped attempt": (lines_with(run(9.0, "start", "a", "call", 2)), "did not fail"),
    "an attempt too many": (lines_with(run(9.9, "start", "c", "call", 4)), "3 are declared"),
    "a doubled claim": (lines_with(run(9.9, "start", "a", "call", 1, "r")), "another event"),
    "an unknown replay": (lines_with(run(9.9, "start", "a", "call", 1, "s")), "no such replay"),
    "a replay that did not run": (
        ending(replays=[C, E, Replayed("s", "a", "call", "succeeded")]), "nothing ran"),
    "an event that is discarded by itself": (
        ending(discarded=[Discarded("D", "d", "call"), Discarded("C", "c", "call")]),
        "discarded: c of call, by no operator"),
    "a discarded event that is gone": (ending(discarded=[]), "lost: d of call"),
    "an edit that runs before it is published": (
        lines_with(run(5, "start", "e", "call", 1, None, "t2")), "edit: call for e ran with edit"),
    "an edited replay with the event's own payload": (
        lines_with(run(9.2, "start", "e", "call", 1, "q")), "ran with edit none"),
    "an edit of nobody": (ending(replays=[C, E._replace(edit="t9")]), "edit"),
    "a claim of two users": (
        lines_with(decided("replay", "t3", "E", 0, "bob")), "2 users decided version 0 of E"),
    "a claim of a user and of a batch": (
        ending(replays=[C, E, E._replace(id="p", state="failed", edit="")]),
        "claim: version 0 of E has 2 decisions"),
    "an action that is not recorded": (
        ending(actions=[("ann", "t1", "D")]), "action: edit of E by ann is not recorded"),
    "an action in another user's name": (
        ending(actions=[("bob", "t1", "D"), ("ann", "t2", "E")]), "action"),
    "a group without an alert": (ending(alerts=frozenset()), "alert: none of group g"),
    "an alert of a group that has recovered": (
        ending(troubled=frozenset()), "alert: group_back g is open"),
    "a figure off by one": (
        ending(figures={"archived": (1, 2)}), "says 1 archived, and there are 2"),
    "an unread malformed message": (ending(sent_malformed=frozenset("mn")), "malformed: n"),
    "a message left behind": (ending(messages={"shop.call": 1}), "messages: 1 are left"),
    "an event left behind": (ending(waiting=frozenset({("a", "call")})), "waiting: a of call"),
    "an event archived too soon": (
        ending(failures=[*FAILURES, Failed("b", "call", None, "exhausted")]), "exhausted: b"),
    "an effect of a failed attempt": (
        lines_without(("done", "b", "effect")), "effect: b has one"),
    "an attempt that is not counted": (
        lines_with(*[run(2 + n, "raised", "b", "call") for n in range(20)]), "repeated: attempt 1"),
    "many attempts twice": (
        lambda lines, ended: (
            [*lines, *(line for line in lines if line["what"] in ("start", "done"))], ended),
        "repeated: 9 of 20 attempts ended more than once"),
    "another event's payload": (
        lines_with(run(1, "start", "b", "call") | {"content": "of c"}),
        "payload: call for b: of c, not of b"),
    "a discard without its action": (
        lambda lines, ended: (
            [*lines, decided("discard", "t1", "D", 0, result="unknown")],
            replace(ended, actions=[("ann", "t2", "E")])),
        "discarded: d of call, by no operator"),
    "a replay that is not recorded": (
        ending(recorded=frozenset({"q"})), "action: replay r of c is not recorded"),
    "an edit that is published as it was": (
        lambda lines, ended: (
            [{**line, "edit": ""} if line.get("edit") else line for line in lines],
            replace(ended, replays=[C, E._replace(edit="")])),
        "edit: ann's edit t2 has 0 replays"),
    "a process left behind": (ending(left=["process 1"]), "left behind: process 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, expected = PLANTED[name]
    lines, ended = plant(*good())
    wrong, _ = check(lines, ended, POLICY)
    assert wrong
    assert all(expected in str(each) for each in wrong) or expected in str(wrong[0]), wrong


# -- a soak ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("grounds", ["sqlite"], indirect=True)
def test_a_fault_of_the_package_is_found(
    grounds: Grounds,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soaking, "EVENTS", 50)
    # These would end in the graveyard, or take as long as their time limit.
    monkeypatch.setattr(soaking, "DEADLY", 0.0)
    monkeypatch.setattr(soaking, "HANGING", 0.0)
    with world(grounds, name="soak", events=0, seed="planted") as here:
        here.service.handlers = "planted"
        result = soaking.soak(here, [grounds.node], 1, (), 1)
        lines = here.service.ledger()
    failed = {(line["event"], line["handler"]) for line in lines if line["what"] == "raised"}
    assert failed
    assert [each.rule for each in result.wrong] == ["lost"] * len(failed)
    assert result.figures.lost == len(failed)
    assert any("raised" in line for line in result.story)
    assert result.figures.pairs > len(failed)
