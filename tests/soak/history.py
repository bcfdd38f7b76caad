"""What a run's ledgers must say, whatever came: rules that know nothing of the package's code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

Unit = tuple[str, str]
Line = Mapping[str, Any]
#: A failure group, what it counts and what its events are: open, open again, in progress.
GroupCounts = tuple[str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What was found when everything had come to its end.

    Attributes:
        archived: units (event id, handler) that are archived now, as a row or a message.
        waiting: units in other queues, or in the outbox.
        effects: event ids in the table that the handler with ``once`` writes to, as often as they
            are there.
        exhausted: units of which some row says that all attempts failed.
        sent_malformed: ids of messages that no handler can read.
        archived_malformed: units of which some row says that no handler can read them.
        groups: of all failure groups, whenever nothing was on its way.
        replays: id, event id, handler and state of each replay.
        messages: left in queues, by queue, without those of the archive.
        failed: publishers and steps of the soak that failed, and what did not end in time.
        left: connections, channels and processes that are there when all have been stopped.
    """

    archived: frozenset[Unit]
    waiting: frozenset[Unit]
    effects: Sequence[str]
    exhausted: frozenset[Unit] = frozenset()
    sent_malformed: frozenset[str] = frozenset()
    archived_malformed: frozenset[Unit] = frozenset()
    groups: Sequence[GroupCounts] = ()
    replays: Sequence[tuple[str, str, str, str]] = ()
    messages: Mapping[str, int] = field(default_factory=dict)
    failed: Sequence[str] = ()
    left: Sequence[str] = ()


class Wrong(NamedTuple):
    """A rule that does not hold, for what, and the event of which :func:`story` tells more."""

    rule: str
    what: str
    event: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the handlers declare; one of them has ``once``.

    Attributes:
        delay: seconds between two attempts.
        limited: handlers with a time limit.
        limit: seconds from a run's first line after which it may have ended; the time limit begins
            before the handler, perhaps long before on a machine that is busy.
    """

    handlers: frozenset[str]
    once: str
    attempts: int
    delay: float
    limited: frozenset[str] = frozenset()
    limit: float = 0.0

    def failures(self, handler: str, run: Mapping[str, Sequence[float]]) -> list[float]:
        """Return when an attempt failed at the earliest: once it raised, or hung for too long."""
        hung = handler in self.limited and len(run["start"]) > len(run["done"]) + len(run["raised"])
        return [*run["raised"], *(at + self.limit for at in run["start"] if hung)]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a run.

    Attributes:
        pairs: of an accepted event and a handler; the next three say what became of them.
        doubled: events with more than one effect.
        stuck: pairs, or messages, that are still on their way at the end.
        left: what is left behind.
        repeated: runs of an attempt that ran before.
    """

    pairs: int
    handled: int
    archived: int
    lost: int
    doubled: int
    early: int
    stuck: int
    left: int
    runs: int
    repeated: int
    replays: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def check(lines: Iterable[Line], ended: Ended, policy: Policy) -> tuple[list[Wrong], Figures]:
    """Return what is wrong, the worst first, and the figures.

    Args:
        lines: of all ledgers. Each has ``at`` (seconds) and ``what``; of publishers: ``intent``,
            ``accepted`` with ``events``; of handlers: ``start``, ``raised``, ``done``, and
            ``failed`` if the database did, with ``event``, ``handler``, ``attempt`` and ``replay``.
    """
    wrong: list[Wrong] = []
    intended: set[str] = set()
    accepted: set[str] = set()
    runs: dict[tuple[str, str, str | None, int], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line in lines:
        if line["what"] == "intent":
            intended.update(line["events"])
        elif line["what"] == "accepted":
            accepted.update(line["events"])
        elif line["what"] in ("start", "raised", "failed", "done"):
            key = (line["event"], line["handler"], line["replay"], line["attempt"])
            what = "raised" if line["what"] == "failed" else line["what"]
            runs[key][what].append(line["at"])
    units = {(event, handler) for event in accepted for handler in policy.handlers}
    handled = {(event, handler) for (event, handler, *_), run in runs.items() if run["done"]}
    handled -= {(event, policy.once) for event in accepted}
    handled |= {(event, policy.once) for event in ended.effects}

    lost = units - handled - ended.archived - ended.waiting
    wrong += [Wrong("lost", f"{event} of {handler}", event) for event, handler in sorted(lost)]
    effects = Counter(ended.effects)
    wrong += [
        Wrong("doubled", f"{number} effects of {event}", event)
        for event, number in effects.items()
        if number > 1
    ]
    wrong += [
        Wrong("unpublished", f"an effect of {event}", event) for event in set(effects) - intended
    ]

    early = 0
    for event, handler in sorted({(event, handler) for event, handler, *_ in runs}):
        if event not in intended:
            wrong.append(Wrong("unpublished", f"{handler} ran for {event}", event))
    replays = {replay: (event, handler, state) for replay, event, handler, state in ended.replays}
    for (event, handler, replay, attempt), run in runs.items():
        what = f"attempt {attempt} of {handler} for {event}" + (
            f" (replay {replay})" * bool(replay)
        )
        if not 1 <= attempt <= policy.attempts:
            wrong.append(Wrong("attempt", f"{what}: {policy.attempts} are declared", event))
        if attempt > 1 and run["start"]:
            before = runs.get((event, handler, replay, attempt - 1))
            failed = min(policy.failures(handler, before), default=None) if before else None
            if failed is None:
                wrong.append(Wrong("attempt", f"{what}: the one before it did not fail", event))
            elif min(run["start"]) < failed + policy.delay:
                by = failed + policy.delay - min(run["start"])
                wrong.append(Wrong("early", f"{what}, by {by:.3f} s", event))
                early += 1
        if replay and (event, handler) != replays.get(replay, (event, handler, ""))[:2]:
            wrong.append(Wrong("replay", f"{what}: the replay is of another event", event))
        if replay and replay not in replays:
            wrong.append(Wrong("replay", f"{what}: no such replay", event))
    for replay, (event, handler, state) in replays.items():
        ran = any(
            run["done"] for (*unit, of, _), run in runs.items()
            if of == replay and unit == [event, handler]
        )  # fmt: skip
        # A replay of what was handled before it was archived is skipped.
        skipped = handler == policy.once and event in effects
        if state == "succeeded" and not ran and not skipped:
            about = f"{replay} of {event} for {handler} succeeded, and nothing ran"
            wrong.append(Wrong("replay", about, event))

    wrong += [
        Wrong(
            "exhausted", f"{event} of {handler}, and attempt {policy.attempts} did not fail", event
        )
        for event, handler in sorted(ended.exhausted)
        if not any(
            policy.failures(handler, runs[event, handler, replay, policy.attempts])
            for replay in (None, *(id_ for id_, *of, _ in ended.replays if of == [event, handler]))
        )
    ]
    for event in sorted(ended.sent_malformed):
        for handler in sorted(policy.handlers):
            if (event, handler) not in ended.archived_malformed:
                wrong.append(Wrong("malformed", f"{event} is not archived for {handler}"))
    wrong += [
        Wrong("group", f"{group} counts {counted}, it has {actual} (open, again, in progress)")
        for group, counted, actual in ended.groups
        if counted != actual
    ]
    wrong += [
        Wrong("waiting", f"{event} of {handler}", event) for event, handler in sorted(ended.waiting)
    ]
    left = {queue: number for queue, number in ended.messages.items() if number}
    wrong += [Wrong("messages", f"{number} are left in {queue}") for queue, number in left.items()]
    wrong += [Wrong("failed", what) for what in ended.failed]
    wrong += [Wrong("left behind", what) for what in ended.left]
    figures = Figures(
        pairs=len(units),
        handled=len(units & handled),
        archived=len((units - handled) & ended.archived),
        lost=len(lost),
        doubled=sum(number > 1 for number in effects.values()),
        early=early,
        stuck=max(len(ended.waiting), sum(left.values())),
        left=len(ended.left),
        runs=sum(len(run["start"]) for run in runs.values()),
        repeated=sum(len(run["start"]) - 1 for run in runs.values() if run["start"]),
        replays=len(replays),
    )
    return wrong, figures


def story(lines: Iterable[Line], event: str, began: float) -> list[str]:
    """Return what the ledgers say of an event.

    Args:
        began: when the first fault could come (seconds); the lines' times are relative to it.
    """
    told = []
    for line in lines:
        if event in line.get("events", (line.get("event"),)):
            about = f"{line['at'] - began:7.1f} s  {line['what']}"
            if "handler" in line:
                about += f" {line['handler']}, attempt {line['attempt']}"
            if line.get("replay"):
                about += f" of replay {line['replay']}"
            told.append(f"{about}, process {line['pid']}")
    return told
