"""Format archived events: text, bytes, tracebacks, timelines. Pure.

Everything here takes what somebody else wrote: a publisher, a handler's exception, anybody who may
publish to the archive's exchange. Whatever it is, something is returned, bounded, and without
characters that a page cannot show or that make it lie (controls, bidirectional overrides, lone
surrogates). Escaping for HTML is the templates' business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext_lazy

from ..archive.replay import RESOLVED as RESOLVED_WORDS
from ..message.archive_message import INSTALLED
from ..message.text import parse_moment
from ..models import (
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    State,
    visible,
)
from ..reasons import translated

#: Bytes of a body that a page shows; the rest is in the download.
SHOWN: Final = 256 * 1024
#: Bytes of a body that is no text, shown as a table of hexadecimal numbers.
HEX: Final = 4 * 1024
#: Characters of a word in a list, and of a text in a table.
WORD: Final = 160
TEXT: Final = 2_000
#: Headers, frames, attempts and deaths that a page shows of one document.
ROWS: Final = 200
#: Units of time, the largest first, and their seconds.
UNITS: Final[tuple[tuple[Any, int], ...]] = (
    (pgettext_lazy("days", "d"), 86_400),
    (pgettext_lazy("hours", "h"), 3_600),
    (pgettext_lazy("minutes", "min"), 60),
    (pgettext_lazy("seconds", "s"), 1),
)

_FILE: Final = re.compile(r'^[\s|+]*File "([^"\n]*)"')
_INDENTED: Final = re.compile(r"^[\s|+]*\s{4}")

#: What a state means, and what can be done.
STATES: Final[Mapping[str, tuple[Any, Any]]] = {
    State.ARCHIVED: (
        gettext_lazy("The handler failed."),
        gettext_lazy("Fix the cause and replay the event, or discard it."),
    ),
    State.QUEUED: (
        gettext_lazy("A replay was requested and is being published."),
        gettext_lazy("If its process has died, events_mirror publishes it."),
    ),
    State.REPLAYING: (
        gettext_lazy("Published to its handler, which has not reported an outcome yet."),
        gettext_lazy(
            "The worker reports the outcome to the archive queue, and events_mirror records it."
        ),
    ),
    State.SUCCEEDED: (
        gettext_lazy("A replay succeeded."),
        gettext_lazy("Nothing is left to do."),
    ),
    State.DISCARDED: (
        gettext_lazy("Discarded without being handled."),
        gettext_lazy("Restore it to return it to the archive."),
    ),
}


#: The same of one that was marked as resolved.
RESOLVED: Final = (
    gettext_lazy("Marked as resolved without an outcome. A copy that is still queued will run."),
    gettext_lazy("Restore it to return it to the archive."),
)


def text(value: object, limit: int | None = None) -> str:
    """Return text with all characters visible; reasons are translated."""
    return visible(translated(value) if value is not None else "", limit)


def number(value: int) -> str:
    """Write a number with the separators of the language: ``2,000``."""
    return number_format(value, force_grouping=True)


class _Count(int):
    """A number that a text shows with the separators of the language."""

    def __str__(self) -> str:
        return number(int(self))


def counted(text: Any, count: int, **values: object) -> str:
    """Return a lazy ``ngettext`` for a number of things."""
    return str(text % {"count": _Count(count), **values})


def line(value: object, limit: int = WORD) -> str:
    """Return text on one line; reasons are translated."""
    return text(value, limit).replace("\n", " ").replace("\t", " ").strip()


def facts(*found: Sequence[Any]) -> list[tuple[str, str, str]]:
    """Return label, value and URL of the facts that have a value; the URL is optional."""
    return [
        (name, visible(str(value), TEXT), url[0] if url else "")
        for name, value, *url in found
        if value
    ]


def age(then: datetime, now: datetime) -> str:
    """Write how long ago that was, in one unit: ``3 min``."""
    seconds = max(0.0, (now - then).total_seconds())
    unit, size = next((each for each in UNITS if seconds >= each[1]), UNITS[-1])
    return f"{int(seconds // size)} {unit}"


def moment(value: object) -> datetime | None:
    """Read a time of a document; ``None`` where a page could not show it."""
    found = parse_moment(value)
    return found if found is not None and 1970 <= found.year < 3000 else None


# -- body and headers -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body as a page shows it.

    Attributes:
        text: as text, or as a table of hexadecimal numbers.
        binary: whether it is that table.
        shown, size: bytes of it in *text*, and in all.
    """

    text: str
    binary: bool
    shown: int
    size: int

    @property
    def cut(self) -> bool:
        return self.shown < self.size


def body(head: bytes, size: int) -> Body:
    """Show the first bytes of a body of *size* bytes."""
    head = head[:SHOWN]
    try:
        text = head.decode()
    except UnicodeDecodeError as exc:
        # Cut within its last character?
        if len(head) < size and exc.start >= len(head) - 3 and exc.reason.startswith("unexpected"):
            text = head[: exc.start].decode()
        else:
            head = head[:HEX]
            return Body(text=hexadecimal(head), binary=True, shown=len(head), size=size)
    return Body(text=visible(text), binary=False, shown=len(head), size=size)


def hexadecimal(data: bytes) -> str:
    """Write bytes as 16 numbers a line, with what is ASCII beside."""
    rows = []
    for start in range(0, len(data), 16):
        part = data[start : start + 16]
        ascii_ = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        rows.append(f"{start:08x}  {part.hex(' '):<47}  {ascii_}")
    return "\n".join(rows)


def pretty(value: Any, limit: int = 2 * SHOWN) -> tuple[str, bool]:
    """Write JSON with indentation, up to *limit* characters; says whether it was cut."""
    pieces: list[str] = []
    length = 0
    try:
        for piece in json.JSONEncoder(
            indent=2, ensure_ascii=False, default=_plain, skipkeys=True
        ).iterencode(value):
            pieces.append(piece)
            length += len(piece)
            if length > limit:
                break
    except (ValueError, RecursionError, TypeError) as exc:
        found = _("it cannot be written as JSON: %(error)s") % {"error": type(exc).__name__}
        return found, True
    return visible("".join(pieces)[:limit]), length > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header, with its type unless it is text."""

    name: str
    value: str
    kind: str


def headers(event: ArchivedEvent) -> tuple[list[Header], str]:
    """Show the publisher's headers, and what is left out or wrong with them."""
    try:
        found = dict(event.headers)
    except Exception as exc:  # noqa: BLE001 - bytes that anything may have written
        return [], _("they cannot be read: %(error)s") % {
            "error": f"{type(exc).__name__}: {line(exc)}"
        }
    more = len(found) - ROWS
    rest = (
        ngettext("%(count)s more not shown", "%(count)s more not shown", more)
        % {"count": number(more)}
        if more > 0
        else ""
    )
    return table(found), rest


def table(found: Mapping[Any, Any]) -> list[Header]:
    """Show headers or properties, as many as a page shows."""
    return [
        Header(
            name=line(name),
            value=header(found[name]),
            kind="" if isinstance(found[name], str) else type(found[name]).__name__,
        )
        for name in sorted(found, key=str)[:ROWS]
    ]


def header(value: Any) -> str:
    """Show one value of a header."""
    if isinstance(value, str):
        return visible(value, TEXT)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hexadecimal(bytes(value)[:256])
    if isinstance(value, (dict, list, tuple)):
        return pretty(value, TEXT)[0]
    return visible(_plain(value), TEXT)


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)[:256].hex(" ")
    try:
        return str(value)[:TEXT]
    except Exception as exc:  # noqa: BLE001 - an object's own __str__
        return f"({type(exc).__name__})"


# -- failures -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Lines of a traceback; those of installed packages are folded.

    Attributes:
        frames: how many there are in it.
    """

    text: str
    installed: bool
    frames: int


def fold_traceback(traceback: object) -> list[Piece]:
    """Cut a traceback into what is the project's own and what is of installed packages."""
    pieces: list[tuple[bool, list[str], int]] = []
    installed = False
    for text in visible(traceback if isinstance(traceback, str) else "").splitlines():
        if found := _FILE.match(text):
            installed = bool(INSTALLED.search(found[1]))
        elif not _INDENTED.match(text):
            installed = False
        if not pieces or pieces[-1][0] != installed:
            pieces.append((installed, [], 0))
        kind, lines, frames = pieces[-1]
        lines.append(text)
        pieces[-1] = (kind, lines, frames + bool(found))
    return [
        Piece(text="\n".join(lines), installed=kind, frames=frames)
        for kind, lines, frames in pieces
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of a traceback: its location, and whether it is in an installed package."""

    place: str
    file: str
    installed: bool


def frames(document: Mapping[str, Any]) -> list[Frame]:
    """Show the frames of a document, innermost last."""
    return [
        Frame(
            place=line(f"{each.get('module')}:{each.get('line')} in {each.get('function')}"),
            file=line(each.get("file") or "", TEXT),
            installed=bool(INSTALLED.search(str(each.get("file")))),
        )
        for each in mappings(document.get("frames"))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A failed attempt."""

    number: str
    at: datetime | None
    worker: str
    what: str


def attempts(failure: ArchivedFailure) -> list[Attempt]:
    """Show the attempts that a failure's document remembers, oldest first."""
    return [
        Attempt(
            number=line(each.get("attempt") if each.get("attempt") is not None else "?", 12),
            at=moment(each.get("at")),
            worker=line(each.get("worker") or ""),
            what=exception_line(each.get("exception"), each.get("message")),
        )
        for each in mappings(failure.about.get("history"))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """An entry of the broker's death history."""

    queue: str
    reason: str
    at: datetime | None
    count: str


def deaths(document: Mapping[str, Any]) -> list[Death]:
    """Show the broker's death history."""
    return [
        Death(
            queue=line(each.get("queue") or ""),
            reason=line(each.get("reason") or ""),
            at=moment(each.get("at")),
            count=line("" if each.get("count") is None else each.get("count"), 12),
        )
        for each in mappings(document.get("deaths"))
    ]


def exception(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return class name and whole message of a document's exception."""
    found = document.get("exception")
    if not isinstance(found, dict):
        return "", ""
    return line(found.get("type") or "", TEXT), visible(found.get("message") or "", 8_000)


def exception_line(kind: object, message: object = "") -> str:
    """Write an exception and the first line of its message."""
    name, words = line(kind or "", TEXT), visible(message or "", TEXT).strip().partition("\n")[0]
    return f"{name}: {words}" if name and words else name or words


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings of a document's list, as many as a page shows."""
    found = value if isinstance(value, list) else []
    return [item for item in found[:ROWS] if isinstance(item, dict)]


# -- what happened, in order ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the timeline.

    Attributes:
        kind: ``good``, ``bad``, ``""``: how it is marked.
    """

    at: datetime
    what: str
    who: str = ""
    note: str = ""
    kind: str = ""


def timeline(
    event: ArchivedEvent,
    failures: Iterable[ArchivedFailure],
    replays: Sequence[Replay],
    actions: Iterable[ArchiveAction],
) -> list[Step]:
    """Put everything that is known about an event into the order of time."""
    steps: list[Step] = []
    numbers = {replay.pk: replay.number for replay in replays}
    if event.published_at is not None:
        steps.append(Step(at=event.published_at, what=_("published"), who=who(event.source)))
    for failure in failures:
        number = numbers.get(failure.replay_id) if failure.replay_id is not None else None
        for attempt in attempts(failure):
            steps.append(
                Step(
                    at=attempt.at or failure.failed_at,
                    what=_("attempt %(attempt)s failed") % {"attempt": attempt.number}
                    if number is None
                    else _("attempt %(attempt)s of replay %(replay)s failed")
                    % {"attempt": attempt.number, "replay": number},
                    who=_("on %(worker)s") % {"worker": attempt.worker} if attempt.worker else "",
                    note=attempt.what,
                    kind="bad",
                )
            )
        steps.append(
            Step(
                at=failure.failed_at,
                what=_archived(failure, number),
                note="" if failure.about.get("history") else exception_line(
                    failure.exception, failure.message
                ),
                kind="bad",
            )
        )  # fmt: skip
    steps.append(Step(at=event.mirrored_at, what=_("mirrored into this database")))
    for replay in replays:
        steps += _replayed(replay)
    for action in actions:
        # The replay itself says so.
        edited = action.action == ArchiveAction.Action.EDIT
        if edited or (action.action == ArchiveAction.Action.REPLAY and action.batch_id is None):
            continue  # the replay itself says so
        what, note = action.get_action_display(), action.reason
        if resolved(action):
            what, note = (
                _("marked as resolved"),
                note.removeprefix(RESOLVED_WORDS).removeprefix(": "),
            )
        steps.append(
            Step(
                at=action.at,
                what=what,
                who=" ".join(
                    [
                        *([who(action.by)] if action.by else []),
                        *(
                            [_("in batch %(id)s") % {"id": str(action.batch_id)[:8]}]
                            if action.batch_id
                            else []
                        ),
                    ]
                ),
                note=visible(note, TEXT),
            )
        )
    # Sorted stably: what happened at one moment stays in the order that it is told in.
    return sorted(steps, key=lambda step: step.at)


def who(name: str) -> str:
    """Return the name of the user who acted, ``""`` if unknown."""
    return _("by %(who)s") % {"who": line(name)} if name else ""


def _archived(failure: ArchivedFailure, number: int | None) -> str:
    values = {"reason": line(failure.reason), "replay": number}
    if number is None:
        if failure.late:
            return _("archived: %(reason)s (late, no effect)") % values
        return _("archived: %(reason)s") % values
    if failure.late:
        return _("archived after replay %(replay)s: %(reason)s (late, no effect)") % values
    return _("archived after replay %(replay)s: %(reason)s") % values


def resolved(action: ArchiveAction) -> bool:
    """Return True if a discard marked the event as resolved."""
    discarded = action.action == ArchiveAction.Action.DISCARD
    return discarded and action.reason.startswith(RESOLVED_WORDS)


def _replayed(replay: Replay) -> list[Step]:
    number = {"number": replay.number}
    steps = [
        Step(
            at=replay.requested_at,
            what=_("replay %(number)s of revision %(revision)s requested")
            % {**number, "revision": replay.revision.number}
            if replay.revision
            else _("replay %(number)s requested") % number,
            who=who(replay.requested_by),
            note=visible(replay.reason, TEXT),
        )
    ]
    if replay.published_at is not None:
        steps.append(
            Step(
                at=replay.published_at,
                what=_("replay %(number)s published to %(handler)s")
                % {**number, "handler": line(replay.handler)},
            )
        )
    elif replay.error:
        # The replay has no time of its own for it.
        steps.append(
            Step(
                at=replay.requested_at,
                what=_outcome(replay),
                note=visible(replay.error, TEXT),
                kind="bad",
            )
        )
    if replay.finished_at is not None:
        good = replay.outcome == Replay.Outcome.SUCCEEDED
        steps.append(
            Step(
                at=replay.finished_at,
                what=_outcome(replay),
                kind="good" if good else "bad",
            )
        )
    return steps


def _outcome(replay: Replay) -> str:
    return _("replay %(number)s: %(outcome)s") % {
        "number": replay.number,
        "outcome": replay.get_outcome_display(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A replay as a table row; ``revision`` is 0 for the original body."""

    id: str
    number: int
    revision: int
    at: datetime
    by: str
    reason: str
    handler: str
    outcome: str
    words: str
    error: str
    published_at: datetime | None
    publishes: int
    finished_at: datetime | None


def replayed(replay: Replay) -> Replayed:
    """Show a replay."""
    known = replay.outcome in Replay.Outcome.values
    return Replayed(
        id=str(replay.pk),
        number=replay.number,
        revision=replay.revision.number if replay.revision else 0,
        at=replay.requested_at,
        by=line(replay.requested_by),
        reason=visible(replay.reason, TEXT),
        handler=line(replay.handler, TEXT),
        outcome=replay.outcome if known else "",
        words=line(replay.get_outcome_display()),
        error=visible(replay.error, TEXT),
        published_at=replay.published_at,
        publishes=replay.publishes,
        finished_at=replay.finished_at,
    )
