"""Check and compare payloads that a person edits.

Nothing here publishes or changes a row, see :func:`django_amqp_events.archive.replay.edit`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NoReturn

from django.utils.translation import ngettext

from ..conf import get_settings
from ..declare import contracts
from ..declare.declarations import EventDeclaration
from ..declare.registry import Handler, get_registry
from ..exceptions import InvalidEditError, InvalidEventError
from ..message import encoding, formats
from ..message.text import has_surrogates
from ..models import ArchivedEvent
from ..reasons import Reason
from ..worker.binding import bind, upcast, version_of
from ..worker.verdict import InvalidArguments

#: Lines of each side that are compared, at most.
COMPARED_LINES: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The body of a valid payload, and warnings about it."""

    body: bytes
    notes: tuple[Reason, ...] = ()


def parse(text: str) -> dict[str, Any]:
    """Parse a payload.

    Raises:
        InvalidEditError: it is not a JSON object, or has a name twice.
    """
    try:
        payload = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as exc:
        raise InvalidEditError(
            Reason("json", error=exc.msg, line=exc.lineno, column=exc.colno)
        ) from exc
    except InvalidEditError:
        raise
    except (ValueError, RecursionError) as exc:
        raise InvalidEditError(Reason("json-unreadable", error=str(exc))) from exc
    if not isinstance(payload, dict):
        raise InvalidEditError(Reason("json-no-object"))
    return payload


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise InvalidEditError(Reason("json-twice", name=repr(key)))
        document[key] = value
    return document


def _no_constant(text: str) -> NoReturn:
    raise InvalidEditError(Reason("json-constant", text=text))


def written(payload: Mapping[str, Any]) -> str:
    """Write a payload for an editor or a diff."""
    text = json.dumps(payload, indent=2, ensure_ascii=False)
    # No browser can get a lone surrogate but as an escape.
    return json.dumps(payload, indent=2) if has_surrogates(text) else text


def draft(event: ArchivedEvent, handler: Handler, payload: Mapping[str, Any]) -> Draft:
    """Check a payload as a publish and a delivery would, and encode it.

    An exception of the contract's own code is a warning if the original payload raises it too: the
    contract may expect Python types (Decimal, date) where a decoded payload has text.

    Raises:
        InvalidEditError: with all problems.
    """
    own = event.decoded
    args: Sequence[Any] = own.args if own is not None else ()
    problems: list[Reason] = []
    notes: list[Reason] = []
    try:
        body = encoding.encode_payload(event.name, payload, args, **_format(event))
    except InvalidEventError as exc:
        # It may be nested too deeply for further checks.
        raise InvalidEditError(_sentence(exc)) from exc
    try:
        upcasted = upcast(handler, event.name, args, payload)
        _bound, taken = bind(handler, args, upcasted)
        version_of(handler, upcasted)
    except InvalidArguments as exc:
        problems.append(_sentence(exc))
    else:
        before = own.kwargs if own is not None else {}
        left = sorted(key for key in payload if key not in taken and key not in before)
        if left and handler.upcast_of(event.name) is None:
            names = ", ".join(repr(key) for key in left)
            notes.append(Reason("not-taken", handler=repr(handler.name), names=names))
    known = get_registry().events.get(event.name)
    if known is not None and known.contract is not None:
        why = _refusal(known, args, payload)
        if isinstance(why, InvalidEventError):
            problems.append(_sentence(why))
        elif why is not None:
            kind = type(why)
            told = Reason("contract", error=f"{kind.__name__}: {why}")
            first = _refusal(known, args, own.kwargs) if own else None
            if type(first) is kind:
                notes.append(Reason("contract-own", refused=told))
            else:
                problems.append(told)
    if len(body) > (most := get_settings().max_body):
        problems.append(Reason("payload-too-large", size=len(body), most=most))
    if problems:
        raise InvalidEditError(*problems)
    return Draft(body=body, notes=tuple(notes))


def _format(event: ArchivedEvent) -> dict[str, Any]:
    """Return the format of an edited body: that of the event, ``celery`` if it cannot be read."""
    received = event.received
    form = formats.wire_format(received)
    attributes = formats.envelope_attributes(received)
    if form == "cloudevents" and attributes is None:
        form = "celery"
    return {"form": form, "attributes": attributes}


def _refusal(
    known: EventDeclaration, args: Sequence[Any], payload: Mapping[str, Any]
) -> Exception | None:
    """Return the exception that a contract raises for a payload, if any."""
    contract: Any = known.contract
    validate = bool(known.validate)
    try:
        contracts.bind_contract(known.name, contract, payload, *args, validate=validate)
    except Exception as exc:  # noqa: BLE001 - a project's own code
        return exc
    return None


def _sentence(exc: Exception) -> Reason:
    text = str(exc)
    return Reason.of(f"{text[:1].upper()}{text[1:]}.")


# -- comparing ------------------------------------------------------------------------------


def diff(before: str, after: str) -> list[tuple[str, str]]:
    """Return the unified diff of two texts, :data:`COMPARED_LINES` from the first change on.

    Returns:
        lines with their kind: ``+``, ``-``, ``" "``, or ``…`` for omitted lines.
    """
    old, new = before.splitlines(), after.splitlines()
    pairs = enumerate(zip_longest(old, new))
    changed = next((number for number, (line, other) in pairs if line != other), 0)
    first = max(0, changed - 3)  # lines of context
    old, new = old[first:], new[first:]
    compared = difflib.unified_diff(old[:COMPARED_LINES], new[:COMPARED_LINES], lineterm="", n=3)
    # Without the two file names and the first @@; others separate the parts.
    lines = [
        ("…", "") if text.startswith("@@") else (text[0], text[1:]) for text in list(compared)[3:]
    ]
    if (more := max(len(old), len(new)) - COMPARED_LINES) > 0:
        text = ngettext("%(count)s more line", "%(count)s more lines", more)
        lines.append(("…", text % {"count": more}))
    return lines
