"""What a run's ledgers must say, whatever came: rules that know nothing of the package's code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Unit = tuple[str, str]
Line = Mapping[str, Any]


class Replayed(NamedTuple):
    """A replay that was claimed, of an archived row.

    Attributes:
        row, version: which row, and in which version the claim found it.
        edit: the token of the edit that it publishes; ``""`` for the event's own payload.
    """

    id: str
    event: str
    handler: str
    state: str
    row: str = ""
    version: int = 0
    edit: str = ""

    @property
    def unit(self) -> Unit:
        return self.event, self.handler


class Failed(NamedTuple):
    """The end of a run with its retries, as the archive has it; *replay* is None for the first."""

    event: str
    handler: str
    replay: str | None
    reason: str

    @property
    def unit(self) -> Unit:
        return self.event, self.handler


class Discarded(NamedTuple):
    """An archived row that counts as settled, though no handler has handled its event."""

    row: str
    event: str
    handler: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What was found when everything had come to its end.

    Attributes:
        archived: units (event id, handler) that are archived now, as a row or a message.
        waiting: units in other queues, or in the outbox.
        effects: event ids in the table that the handler with ``once`` writes to, as often as they
            are there.
        failures: all that were archived.
        sent_malformed: ids of messages that no handler can read.
        troubled: groups that have open events.
        alerts: that are open, without those of growth: kind and key.
        figures: what ``events_status`` says and what the tables have, by name.
        replays: all that were claimed.
        discarded: rows.
        actions: of operators, as the archive's history has them: user, token, row.
        recorded: ids of the replays that the archive's history has, of users and of batches.
        messages: left in queues, by queue, without those of the archive.
        failed: publishers and steps of the soak that failed, and what did not end in time.
        left: connections, channels and processes that are there when all have been stopped.
    """

    archived: frozenset[Unit]
    waiting: frozenset[Unit]
    effects: Sequence[str]
    failures: Sequence[Failed] = ()
    sent_malformed: frozenset[str] = frozenset()
    troubled: frozenset[str] = frozenset()
    alerts: frozenset[tuple[str, str]] = frozenset()
    figures: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    replays: Sequence[Replayed] = ()
    discarded: Sequence[Discarded] = ()
    actions: Sequence[tuple[str, str, str]] = ()
    recorded: frozenset[str] = frozenset()
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
        reasons: why an event that handlers can read may be archived.
        repeats: runs of one attempt that may come to their end. RabbitMQ gives a message to the
            reaper after fewer deliveries; copies of it are rare.
        doubles: share of the attempts that may come to their end more than once.
        limited: handlers with a time limit.
        limit: seconds from a run's first line after which it may have ended; the time limit begins
            before the handler, perhaps long before on a machine that is busy.
    """

    handlers: frozenset[str]
    once: str
    attempts: int
    delay: float
    reasons: frozenset[str] = frozenset({"exhausted", "poison"})
    repeats: int = 20
    doubles: float = 0.1
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
        pairs: of an accepted event and a handler; the next four say what became of them.
        doubled: events with more than one effect.
        stuck: pairs, or messages, that are still on their way at the end.
        left: what is left behind.
        repeated: runs of an attempt that ran before.
        decisions: of operators, that were done.
    """

    pairs: int
    handled: int
    archived: int
    discarded: int
    lost: int
    doubled: int
    early: int
    stuck: int
    left: int
    runs: int
    repeated: int
    replays: int
    decisions: int


def check(lines: Iterable[Line], ended: Ended, policy: Policy) -> tuple[list[Wrong], Figures]:
    """Return what is wrong, the worst first, and the figures.

    Args:
        lines: of all ledgers. Each has ``at`` (seconds) and ``what``; of publishers: ``intent``
            with ``events`` and their ``contents``, ``accepted`` with ``events``; of handlers:
            ``start``, ``raised``, ``done``, and ``failed`` if the database did, with ``event``,
            ``handler``, ``attempt`` and ``replay``, and at the start the payload's ``content`` and
            the token of its ``edit``; of operators: ``decides`` and then ``decided`` with its
            ``result``, see :func:`check_decisions`.
    """
    lines = list(lines)
    decisions = [line for line in lines if line["what"] in ("decides", "decided")]
    wrong: list[Wrong] = []
    intended: dict[str, str] = {}
    accepted: set[str] = set()
    runs: dict[tuple[str, str, str | None, int], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line in lines:
        if line["what"] == "intent":
            intended |= zip(line["events"], line["contents"], strict=True)
        elif line["what"] == "accepted":
            accepted.update(line["events"])
        elif line["what"] in ("start", "raised", "failed", "done"):
            key = (line["event"], line["handler"], line["replay"], line["attempt"])
            what = "raised" if line["what"] == "failed" else line["what"]
            runs[key][what].append(line["at"])
    units = {(event, handler) for event in accepted for handler in policy.handlers}
    done = {(event, handler) for (event, handler, *_), run in runs.items() if run["done"]}
    handled = done - {(event, policy.once) for event in accepted}
    handled |= {(event, policy.once) for event in ended.effects}
    by_operator = _discards(decisions)
    discarded = {(event, handler) for row, event, handler in ended.discarded if row in by_operator}

    lost = units - handled - ended.archived - ended.waiting - discarded
    wrong += [Wrong("lost", f"{event} of {handler}", event) for event, handler in sorted(lost)]
    effects = Counter(ended.effects)
    wrong += [
        Wrong("doubled", f"{number} effects of {event}", event)
        for event, number in effects.items()
        if number > 1
    ]
    # "done" is on disk before the transaction with the effect commits.
    wrong += [
        Wrong("effect", f"{event} has one, and no run came to its end", event)
        for event in effects
        if (event, policy.once) not in done
    ]
    if not units:
        wrong.append(Wrong("failed", "nothing was published"))

    early = 0
    replays = {replay.id: replay for replay in ended.replays}
    # A person may make a malformed message one that handlers can read, in a replay.
    edited = {replay.id for replay in ended.replays if replay.edit}
    for event, handler, replay in sorted({key[:3] for key in runs}, key=str):
        if event not in intended and replay not in edited:
            wrong.append(Wrong("unpublished", f"{handler} ran for {event}", event))
    for (event, handler, replay, attempt), run in runs.items():
        what = f"attempt {attempt} of {handler} for {event}" + (
            f" (replay {replay})" * bool(replay)
        )
        if not 1 <= attempt <= policy.attempts:
            wrong.append(Wrong("attempt", f"{what}: {policy.attempts} are declared", event))
        if len(run["done"]) + len(run["raised"]) > policy.repeats:
            wrong.append(Wrong("repeated", f"{what}: more than {policy.repeats} times", event))
        # The database may fail an attempt before its handler starts.
        first = min((at for times in run.values() for at in times), default=None)
        if attempt > 1 and first is not None:
            before = runs.get((event, handler, replay, attempt - 1))
            failed = min(policy.failures(handler, before), default=None) if before else None
            if failed is None:
                wrong.append(Wrong("attempt", f"{what}: the one before it did not fail", event))
            elif first < failed + policy.delay:
                by = failed + policy.delay - first
                wrong.append(Wrong("early", f"{what}, by {by:.3f} s", event))
                early += 1
        if replay and replay not in replays:
            wrong.append(Wrong("replay", f"{what}: no such replay", event))
        elif replay and (event, handler) != replays[replay].unit:
            wrong.append(Wrong("replay", f"{what}: the replay is of another event", event))
    for recorded in ended.replays:
        ran = any(
            run["done"] for (*unit, of, _), run in runs.items()
            if of == recorded.id and tuple(unit) == recorded.unit
        )  # fmt: skip
        # A replay of what was handled before it was archived is skipped.
        skipped = recorded.handler == policy.once and recorded.event in effects
        if recorded.state == "succeeded" and not ran and not skipped:
            unit = f"{recorded.event} for {recorded.handler}"
            about = f"{recorded.id} of {unit} succeeded, and nothing ran"
            wrong.append(Wrong("replay", about, recorded.event))
    ends = [number for run in runs.values() if (number := len(run["done"]) + len(run["raised"]))]
    doubles = sum(number > 1 for number in ends)
    if doubles > policy.doubles * len(ends):
        wrong.append(Wrong("repeated", f"{doubles} of {len(ends)} attempts ended more than once"))
    wrong += check_payloads(lines, intended)
    wrong += check_edits(lines, ended)
    wrong += check_decisions(decisions, ended)

    for event, handler, replay, reason in ended.failures:
        what = f"{event} of {handler}" + f" (replay {replay})" * bool(replay)
        last = runs.get((event, handler, replay, policy.attempts))
        if event in intended and reason not in policy.reasons:
            wrong.append(Wrong("reason", f"{what} is archived as {reason}", event))
        elif reason == "exhausted" and not (last and policy.failures(handler, last)):
            about = f"{what}, and attempt {policy.attempts} did not fail"
            wrong.append(Wrong("exhausted", about, event))
    malformed = {failed.unit for failed in ended.failures if failed.reason == "malformed"}
    for event in sorted(ended.sent_malformed):
        for handler in sorted(policy.handlers):
            if (event, handler) not in malformed:
                wrong.append(Wrong("malformed", f"{event} is not archived for {handler}"))
    wrong += check_monitoring(ended)
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
        discarded=len((units - handled - ended.archived) & discarded),
        lost=len(lost),
        doubled=sum(number > 1 for number in effects.values()),
        early=early,
        stuck=max(len(ended.waiting), sum(left.values())),
        left=len(ended.left),
        runs=sum(len(run["start"]) for run in runs.values()),
        repeated=sum(len(run["start"]) - 1 for run in runs.values() if run["start"]),
        replays=len(replays),
        decisions=sum(line.get("result") == "done" for line in decisions),
    )
    return wrong, figures


def check_payloads(lines: Iterable[Line], intended: Mapping[str, str]) -> list[Wrong]:
    """Return runs with another payload than their event's; edits are checked as such."""
    wrong = []
    for line in lines:
        if line["what"] == "start" and line["event"] in intended and not line["edit"]:
            content = intended[line["event"]]
            if line["content"] != content:
                what = f"{line['handler']} for {line['event']}: {line['content']}, not {content}"
                wrong.append(Wrong("payload", what, line["event"]))
    return wrong


def check_monitoring(ended: Ended) -> list[Wrong]:
    """Return alerts that are missing or left, and figures that are not those of the tables."""
    of_groups = {key for kind, key in ended.alerts if kind.startswith("group_")}
    wrong = [Wrong("alert", f"none of group {group}") for group in ended.troubled - of_groups]
    wrong += [
        Wrong("alert", " ".join(filter(None, (kind, key, "is open"))))
        for kind, key in sorted(ended.alerts)
        if key not in ended.troubled
    ]
    wrong += [
        Wrong("figure", f"events_status says {told} {name}, and there are {actual}")
        for name, (told, actual) in ended.figures.items()
        if told != actual
    ]
    return wrong


def check_edits(lines: Iterable[Line], ended: Ended) -> list[Wrong]:
    """Return runs with another payload than the replay's, and edits without a user or a replay."""
    published = {replay.id: replay.edit for replay in ended.replays}
    made = {line["token"]: line for line in lines if line.get("decision") == "edit"}
    wrong = []
    for line in lines:
        token = line.get("edit", "")
        if line["what"] == "start" and token != published.get(line["replay"], ""):
            what = f"{line['handler']} for {line['event']} ran with edit {token or 'none'}"
            wrong.append(Wrong("edit", f"{what} in replay {line['replay']}", line["event"]))
    for replay in ended.replays:
        edit = made.get(replay.edit)
        if replay.edit and (edit is None or edit["row"] != replay.row):
            what = f"replay {replay.id} publishes edit {replay.edit}, which nobody made of it"
            wrong.append(Wrong("edit", what, replay.event))
    recorded = {token for _, token, _ in ended.actions}
    for token, edit in made.items():
        published_as = [
            replay.id
            for replay in ended.replays
            if (replay.edit, replay.row, replay.version) == (token, edit["row"], edit["version"])
        ]
        if token in recorded and len(published_as) != 1:
            what = f"{edit['by']}'s edit {token} has {len(published_as)} replays"
            wrong.append(Wrong("edit", what, edit["event"]))
    return wrong


def check_decisions(decisions: Iterable[Line], ended: Ended) -> list[Wrong]:
    """Return the rows that were claimed or discarded twice, or by nobody.

    Args:
        decisions: ``decides`` and ``decided`` lines, with the ``token`` of the decision, who it is
            ``by``, the ``row`` and its ``version``, and at the end a ``result``: ``done``,
            ``refused`` or ``unknown``.
    """
    wrong = []
    made = {line["token"]: line for line in decisions}
    claims = Counter((replay.row, replay.version) for replay in ended.replays if replay.row)
    claims += Counter(
        (made[token]["row"], made[token]["version"])
        for _, token, _ in set(ended.actions)
        if token in made and made[token]["decision"] == "discard"
    )
    events = {replay.row: replay.event for replay in ended.replays}
    events |= {line["row"]: line["event"] for line in made.values()}
    wrong += [
        Wrong("claim", f"version {version} of {row} has {number} decisions", events[row])
        for (row, version), number in claims.items()
        if number > 1
    ]
    won = Counter(
        (line["row"], line["version"]) for line in made.values() if line.get("result") == "done"
    )
    wrong += [
        Wrong("claim", f"{number} users decided version {version} of {row}", events[row])
        for (row, version), number in won.items()
        if number > 1
    ]
    wrong += [
        Wrong("action", f"replay {replay.id} of {replay.event} is not recorded", replay.event)
        for replay in ended.replays
        if replay.id not in ended.recorded
    ]
    actions = Counter(ended.actions)
    for (by, token, row), number in actions.items():
        line = made.get(token)
        if line is None or (line["by"], line["row"]) != (by, row) or number > 1:
            about = f"{number} actions on {row} by {by} with token {token}"
            wrong.append(Wrong("action", f"{about}: {'too many' if line else 'not theirs'}"))
    wrong += [
        Wrong("action", f"{line['decision']} of {line['row']} by {line['by']} is not recorded",
              line["event"])
        for token, line in made.items()
        if line.get("result") == "done" and (line["by"], token, line["row"]) not in actions
    ]  # fmt: skip
    by_operator = _discards(made.values())
    recorded = {
        row for by, token, row in actions if made.get(token, {}).get("decision") == "discard"
    }
    wrong += [
        Wrong("discarded", f"{event} of {handler}, by no operator", event)
        for row, event, handler in ended.discarded
        if row not in by_operator & recorded
    ]
    return wrong


def _discards(decisions: Iterable[Line]) -> set[str]:
    """Return the rows that an operator discarded, or may have discarded."""
    last = {line["token"]: line for line in decisions if line["decision"] == "discard"}
    return {line["row"] for line in last.values() if line.get("result") != "refused"}


def story(lines: Iterable[Line], event: str, began: float) -> list[str]:
    """Return what the ledgers say of an event.

    Args:
        began: when the first fault could come (seconds); the lines' times are relative to it.
    """
    told = []
    for line in lines:
        if event in line.get("events", (line.get("event"),)):
            about = f"{line['at'] - began:7.1f} s  {line['what']}"
            if "decision" in line:
                about += f" {line['decision']} for {line['handler']}, version {line['version']}"
                about += f", {line['by']}, {line.get('result', '')}, token {line['token']}"
            elif "handler" in line:
                about += f" {line['handler']}, attempt {line['attempt']}"
            if line.get("replay"):
                about += f" of replay {line['replay']}"
            told.append(f"{about}, process {line['pid']}")
    return told
