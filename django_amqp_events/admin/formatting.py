"""Format archived events: text, bytes, tracebacks, timelines. Pure.

The values come from publishers, exceptions and anyone who may publish to the archive's exchange.
Every function returns something for any value: bounded, and without characters that a page cannot
show or that mislead (controls, bidirectional overrides, lone surrogates). Templates escape it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext_lazy

from ..models import ArchiveAction, ArchivedEvent, ArchivedFailure, Replay, visible
from ..reasons import Count, translated
from ..templatetags.amqp_events import TEXT, exception_line, line, moment

#: Bytes of a body that a page shows; the rest is in the download.
SHOWN: Final = 256 * 1024
#: Headers, frames, attempts and deaths that a page shows of one document.
ROWS: Final = 200

MORE: Final = ngettext_lazy("%(count)s more not shown", "%(count)s more not shown", "count")
_TIMES: Final = ngettext_lazy("published %(times)s time", "published %(times)s times", "times")


def number(value: int) -> str:
    """Write a number with the separators of the language: ``2,000``."""
    return str(Count(value))


def labelled(label: object, value: object) -> SafeString:
    """Show a value of a list with the label that it has on a phone, where there is no header."""
    return format_html('<span class="ae-label">{}</span> {}', label, value)


def counted(text: Any, count: int, **values: object) -> str:
    """Return a lazy ``ngettext`` for a number of things."""
    return str(text % {"count": Count(count), **values})


# -- body and headers -----------------------------------------------------------------------


def body(head: bytes, size: int) -> dict[str, Any]:
    """Show the first bytes of a body of *size* bytes, as escapes where they are not text."""
    head = head[:SHOWN]
    text, shown = visible(head.decode(errors="backslashreplace")), len(head)
    return {"text": text, "shown": shown, "size": size, "cut": shown < size}


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
        problem = _("it cannot be written as JSON: %(error)s") % {"error": type(exc).__name__}
        return problem, True
    return visible("".join(pieces)[:limit]), length > limit


def headers(event: ArchivedEvent) -> tuple[list[tuple[str, str, str]], str]:
    """Show the publisher's headers, and what is left out or wrong with them."""
    try:
        received = dict(event.headers)
    except Exception as exc:  # noqa: BLE001 - bytes that anything may have written
        return [], _("they cannot be read: %(error)s") % {
            "error": f"{type(exc).__name__}: {line(exc)}"
        }
    more = len(received) - ROWS
    return table(received), counted(MORE, more) if more > 0 else ""


def table(values: Mapping[Any, Any]) -> list[tuple[str, str, str]]:
    """Show headers or properties, as many as a page shows: name, value, and type unless text."""
    return [
        (
            line(name),
            header(values[name]),
            "" if isinstance(values[name], str) else type(values[name]).__name__,
        )
        for name in sorted(values, key=str)[:ROWS]
    ]


def header(value: Any) -> str:
    """Show one value of a header."""
    if isinstance(value, str):
        return visible(value, TEXT)
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


def failure(event: ArchivedEvent, document: Mapping[str, Any]) -> dict[str, Any]:
    """Show exception, whole message and traceback of the last failure's document."""
    exception = document.get("exception")
    if not isinstance(exception, dict):
        exception = {}
    traceback = document.get("traceback")
    if not isinstance(traceback, str) or not traceback:
        # The worker leaves it out first if the headers have no room.
        traceback = "\n".join(
            f'  File "{frame.get("file")}", line {frame.get("line")}, in {frame.get("function")}'
            for frame in mappings(document.get("frames"))
        )
    return {
        "exception": line(exception.get("type") or event.exception, TEXT),
        "message": visible(exception.get("message") or "", 8_000) or visible(event.message, TEXT),
        "traceback": visible(traceback),
    }


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings of a document's list, as many as a page shows."""
    items = value if isinstance(value, list) else []
    return [item for item in items[:ROWS] if isinstance(item, dict)]


# -- what happened, in order ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """A step of the timeline.

    Attributes:
        kind: ``good``, ``bad``, ``""``: how it is marked.
        replay: the replay that was requested.
    """

    at: datetime
    what: str
    who: str = ""
    note: str = ""
    kind: str = ""
    replay: Replay | None = None


def timeline(
    event: ArchivedEvent,
    failures: Iterable[ArchivedFailure],
    replays: Sequence[Replay],
    actions: Iterable[ArchiveAction],
) -> list[TimelineEntry]:
    """Put everything that is known about an event into the order of time."""
    steps = []
    numbers: dict[UUID | None, int | None] = {replay.pk: replay.number for replay in replays}
    if event.published_at is not None:
        steps.append(
            TimelineEntry(at=event.published_at, what=_("published"), who=who(event.source))
        )
    for failure in failures:
        steps += _failed(failure, numbers.get(failure.replay_id))
    steps.append(TimelineEntry(at=event.mirrored_at, what=_("mirrored into this database")))
    for replay in replays:
        steps += _replayed(replay)
    asked = {(replay.pk, replay.requested_by, replay.reason) for replay in replays}
    for action in actions:
        known = (action.replay_id, action.by, action.reason) in asked
        steps += filter(None, [_acted(action, known=known)])
    # Sorted stably: what happened at one moment stays in this order.
    return sorted(steps, key=lambda step: step.at)


def _failed(failure: ArchivedFailure, number: int | None) -> Iterator[TimelineEntry]:
    """Yield the attempts of the original delivery or of a replay, and the archiving."""
    for attempt in mappings(failure.about.get("history")):
        told = _("attempt %(attempt)s failed") % {"attempt": line(attempt.get("attempt", "?"), 12)}
        yield TimelineEntry(
            at=moment(attempt.get("at")) or failure.failed_at,
            what=_of_replay(told, number),
            who=_("on %(worker)s") % {"worker": line(attempt["worker"])}
            if attempt.get("worker")
            else "",
            note=exception_line(attempt.get("exception"), attempt.get("message")),
            kind="bad",
        )
    archived = _("archived: %(reason)s")
    if failure.late:
        archived = _("archived: %(reason)s (late, no effect)")
    known = bool(failure.about.get("history"))
    yield TimelineEntry(
        at=failure.failed_at,
        what=_of_replay(archived % {"reason": line(failure.reason)}, number),
        note="" if known else exception_line(failure.exception, failure.message),
        kind="bad",
    )


def _of_replay(what: str, number: int | None) -> str:
    """Return what happened, with the number of the replay in which it did."""
    if number is None:
        return what
    return _("replay %(number)s: %(outcome)s") % {"number": number, "outcome": what}


def _acted(action: ArchiveAction, *, known: bool) -> TimelineEntry | None:
    """Return the step of an action, ``None`` for a replay, which has steps of its own.

    Args:
        known: these steps name who asked for it; one that was not confirmed may be asked for again.
    """
    edited = action.action == ArchiveAction.Action.EDIT
    replayed = action.action == ArchiveAction.Action.REPLAY and action.batch_id is None
    if known and (edited or replayed):
        return None
    batch = _("in batch %(id)s") % {"id": str(action.batch_id)[:8]} if action.batch_id else ""
    by = " ".join(filter(None, (who(action.by), batch)))
    note = visible(action.reason, TEXT)
    return TimelineEntry(at=action.at, what=action.get_action_display(), who=by, note=note)


def who(name: str) -> str:
    """Return the name of the user who acted, ``""`` if unknown."""
    return _("by %(who)s") % {"who": line(name)} if name else ""


def _replayed(replay: Replay) -> Iterator[TimelineEntry]:
    if replay.number is None:
        yield TimelineEntry(
            at=replay.requested_at,
            what=replay.get_state_display(),
            who=who(replay.requested_by),
            note=visible(translated(replay.error or ""), TEXT),
            kind="bad",
        )
        return
    number = {"number": replay.number}
    yield TimelineEntry(
        at=replay.requested_at,
        what=_("replay %(number)s of revision %(revision)s requested")
        % {**number, "revision": replay.revision.number}
        if replay.revision
        else _("replay %(number)s requested") % number,
        who=who(replay.requested_by),
        note=visible(replay.reason, TEXT),
        replay=replay,
    )
    outcome = _of_replay(replay.get_state_display(), replay.number)
    if replay.published_at is not None:
        published = _("replay %(number)s published to %(handler)s")
        times = _TIMES % {"times": replay.publishes} if replay.publishes > 1 else ""
        yield TimelineEntry(
            at=replay.published_at,
            what=published % {**number, "handler": line(replay.handler)},
            note=str(times),
        )
    elif replay.error:
        # The time of the error is not stored.
        note = visible(translated(replay.error), TEXT)
        yield TimelineEntry(at=replay.requested_at, what=outcome, note=note, kind="bad")
    if replay.finished_at is not None:
        good = replay.state == Replay.State.SUCCEEDED
        yield TimelineEntry(at=replay.finished_at, what=outcome, kind="good" if good else "bad")
