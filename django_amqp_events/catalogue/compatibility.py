"""Compare two documents of a service and find what breaks the consumers of its events. Pure.

A changed contract breaks a consumer

- that has the old contract, if a new event does not match it, or
- that has the new contract, if an event that was published before does not match it: from a queue,
  an outbox or an archive, or from a publisher that is updated later.

So a type may become neither wider nor narrower. An additional optional argument breaks neither:
handlers leave out arguments that they do not take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..declare.patterns import is_pattern, pattern_matches
from ..exceptions import IncomparableError
from .asyncapi import EXTENSION
from .entries import VERSION
from .json_schema import Schema

Kind = Literal[
    "exchange_changed", "event_added", "event_removed", "format_changed", "contract_added",
    "contract_removed", "argument_added", "argument_removed", "argument_required", "default_added",
    "default_changed", "default_removed", "type_added", "type_changed", "enum_narrowed",
    "enum_widened", "handler_added", "handler_removed", "handler_requires",
]  # fmt: skip
#: Keywords that do not change which values match.
_ANNOTATIONS: Final = frozenset(
    {
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
        "definitions",
    }
)  # fmt: skip
#: Keywords that a text about a type leaves out.
_OUTLINE: Final = frozenset({"type", "properties", "required", "additionalProperties", "items"})
#: References that lead to references, at most.
_HOPS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A difference between two documents.

    Attributes:
        event: name of the event, ``""`` for a change that concerns no single one.
        text: what changed and, if it is incompatible, what breaks.
    """

    kind: Kind
    event: str
    text: str
    compatible: bool

    def __str__(self) -> str:
        return f"{self.event}: {self.text}" if self.event else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    publisher: str
    format: str
    payload: Schema | None
    #: What references in the payload start from.
    root: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handler:
    patterns: tuple[str, ...]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    service: str
    exchange: str
    events: Mapping[str, _Event]
    handlers: Mapping[str, _Handler]


def compare(old: Any, new: Any) -> list[Change]:
    """Return the changes from one document of a service to another, the incompatible ones first.

    Each is one that ``events_catalogue`` prints with ``--format json`` or ``asyncapi``.

    Raises:
        IncomparableError: one of them is another document, or they are of two services.
    """
    try:
        before, after = _read(old), _read(new)
        if before.service != after.service:
            raise IncomparableError(
                f"it is of service {before.service!r}, and this is {after.service!r}"
            )
        return sorted(_changes(before, after), key=lambda each: (each.compatible, each.event))
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as exc:
        raise IncomparableError(
            f"it differs from what events_catalogue writes ({type(exc).__name__}: {exc})"
        ) from exc


# -- reading ------------------------------------------------------------------------------


def _read(document: Any) -> _Document:
    described = document.get(EXTENSION, document)
    version = described["version"]
    if version != VERSION:
        raise IncomparableError(f"it has version {version!r}, and this release reads {VERSION}")
    events, handlers = _read_asyncapi(document) if EXTENSION in document else _read_json(document)
    return _Document(
        service=described["service"],
        exchange=described["exchange"].removeprefix(described["prefix"]),
        events=events,
        handlers={
            each["name"]: _Handler(
                patterns=tuple(each["patterns"]),
                required=tuple(one["name"] for one in each["arguments"] if one["required"]),
            )
            for each in handlers
        },
    )


def _read_json(document: Mapping[str, Any]) -> tuple[dict[str, _Event], list[Any]]:
    events = {
        each["name"]: _Event(
            publisher=each["publisher"],
            format=each["format"],
            payload=each["payload"],
            root=each["payload"] or {},
        )
        for each in document["events"]
    }
    return events, document["handlers"]


def _read_asyncapi(document: Mapping[str, Any]) -> tuple[dict[str, _Event], list[Any]]:
    components = document["components"]
    events = {
        each["name"]: _Event(
            publisher=each[EXTENSION]["publisher"],
            format=each[EXTENSION]["format"],
            payload=components["schemas"][key] if each[EXTENSION]["contract"] else None,
            root=document,
        )
        for key, each in components["messages"].items()
    }
    operations = document["operations"].values()
    return events, [each[EXTENSION] for each in operations if each["action"] == "receive"]


# -- comparing ----------------------------------------------------------------------------


def _changes(before: _Document, after: _Document) -> Iterator[Change]:
    if before.exchange != after.exchange:
        text = f"the exchange is {after.exchange!r} instead of {before.exchange!r}"
        yield _broken("exchange_changed", "", f"{text}, so queues bound to the old one stay empty")
    for name, event in before.events.items():
        published = event.publisher == before.service
        if name in after.events:
            yield from _event_changes(name, event, after.events[name], published=published)
        elif published:
            text = "the event was removed: its handlers receive no further events"
            yield _broken("event_removed", name, text)
        else:
            text = "this service, which does not publish it, no longer declares or handles it"
            yield _harmless("event_removed", name, text)
    for name in after.events:
        if name not in before.events:
            yield _harmless("event_added", name, "the event is new")
    yield from _handler_changes(before, after)


def _event_changes(
    name: str, before: _Event, after: _Event, *, published: bool
) -> Iterator[Change]:
    if before.format != after.format and published:
        text = f"the format is {after.format!r} instead of {before.format!r}"
        yield _broken("format_changed", name, f"{text}, which other programs may not read")
    if before.payload is not None and after.payload is not None:
        yield from _Payloads(name, before.root, after.root).objects(before.payload, after.payload)
    elif before.payload is not None and published:
        text = "the event no longer has a contract: it can have any arguments"
        yield _broken("contract_removed", name, text)
    elif before.payload is not None:
        text = "this service, which does not publish it, no longer has its contract"
        yield _harmless("contract_removed", name, text)
    elif after.payload is not None:
        yield _harmless("contract_added", name, "the event has a contract now")


def _handler_changes(before: _Document, after: _Document) -> Iterator[Change]:
    for name, handler in after.handlers.items():
        if name not in before.handlers:
            yield _harmless("handler_added", "", f"handler {name!r} is new")
            continue
        given = [
            set(event.payload["properties"]) if event.payload else set[str]()
            for event_name, event in before.events.items()
            if not is_pattern(event_name)
            and any(pattern_matches(each, event_name) for each in handler.patterns)
        ]
        for argument in handler.required:
            known = bool(given) and all(argument in each for each in given)
            if argument not in before.handlers[name].required and not known:
                text = f"handler {name!r} requires {argument!r}, which not all its events had"
                yield _broken("handler_requires", "", f"{text}: those without it are archived")
    for name in before.handlers:
        if name not in after.handlers:
            yield _harmless("handler_removed", "", f"handler {name!r} was removed")


def _broken(kind: Kind, event: str, text: str) -> Change:
    return Change(kind=kind, event=event, text=text, compatible=False)


def _harmless(kind: Kind, event: str, text: str) -> Change:
    return Change(kind=kind, event=event, text=text, compatible=True)


class _Payloads:
    """Compares the payload of an event with its former one."""

    def __init__(self, event: str, old_root: Any, new_root: Any) -> None:
        self.event = event
        self.old_root = old_root
        self.new_root = new_root
        #: References that are being compared, of models that contain themselves.
        self.open: list[tuple[Any, Any]] = []

    def change(self, kind: Kind, text: str, *, compatible: bool = False) -> Change:
        return Change(kind=kind, event=self.event, text=text, compatible=compatible)

    def objects(self, old: Schema, new: Schema, path: str = "") -> Iterator[Change]:
        """Compare payloads, or with *path* objects within them."""
        what = "field" if path else "argument"
        was, now = old.get("properties", {}), new.get("properties", {})
        needed, needs = old.get("required", ()), new.get("required", ())
        for name in was:
            place = f"{path}{name}"
            if name not in now:
                text = f"{what} {place!r} was removed: handlers that require it fail"
                yield self.change("argument_removed", text)
                continue
            if name in needs and name not in needed:
                text = f"{what} {place!r} no longer has a default: events without it do not match"
                yield self.change("default_removed", text)
            elif name in needed and name not in needs:
                # Publishing fills in the defaults of a contract, but not those of models.
                text = f"{what} {place!r} has a default now" + (
                    ": handlers that require it fail without it" if path else ""
                )
                yield self.change("default_added", text, compatible=not path)
            elif was[name].get("default") != now[name].get("default"):
                text = (
                    f"the default of {what} {place!r} is {_json(now[name].get('default'))} instead "
                    f"of {_json(was[name].get('default'))}"
                )
                yield self.change("default_changed", text, compatible=True)
            yield from self.types(was[name], now[name], f"{what} {place!r}", f"{place}.")
        for name in now:
            place = f"{path}{name}"
            if name in was:
                continue
            if name in needs:
                text = f"{what} {place!r} is new and required: events published before lack it"
                yield self.change("argument_required", text)
            else:
                text = f"{what} {place!r} is new and optional"
                yield self.change("argument_added", text, compatible=True)
        yield from self.others(
            old.get("additionalProperties"), new.get("additionalProperties"), path
        )

    def others(self, old: Any, new: Any, path: str) -> Iterator[Change]:
        """Compare what an object may have besides its properties; None is not specified."""
        where = f"{path.rstrip('.')!r}" if path else "the event"
        if not path and (old is None) != (new is None):
            if new is None:
                text = "the event no longer takes other arguments (**kwargs)"
                yield self.change("argument_removed", text)
            else:
                text = "the event takes other arguments (**kwargs) now"
                yield self.change("argument_added", text, compatible=True)
        elif (old is False) != (new is False):
            text = f"{where} may {'not ' if new is False else ''}have other fields now"
            yield self.change("type_changed", text)
        elif isinstance(old, dict) or isinstance(new, dict):
            old, new = (each if isinstance(each, dict) else {} for each in (old, new))
            yield from self.types(old, new, f"a value of {where}", f"{path}*.")

    def types(self, old: Schema, new: Schema, what: str, path: str) -> list[Change]:
        """Compare the types of an argument, a field or an item."""
        pair = (old.get("$ref"), new.get("$ref"))
        if all(pair) and pair in self.open:
            return []
        self.open.append(pair)
        was, now = _resolved(old, self.old_root), _resolved(new, self.new_root)
        found = list(self._types(was, now, what, path))
        self.open.pop()
        return found

    def _types(self, old: Schema, new: Schema, what: str, path: str) -> Iterator[Change]:
        if not old and new:
            text = f"{what} has a type now: {_text(new)}"
            yield self.change("type_added", text, compatible=True)
        elif "enum" in old and "enum" in new:
            yield from self.enums(old["enum"], new["enum"], what)
        elif "anyOf" in old or "anyOf" in new:
            yield from self.alternatives(
                old.get("anyOf", [old]), new.get("anyOf", [new]), what, path
            )
        else:
            compared = {"items"} if old.get("type") == "array" else set[str]()
            if old.get("type") == "object":
                compared = {"properties", "required", "additionalProperties"}
            if any(old.get(key) != new.get(key) for key in {*old, *new} - compared):
                text = f"{what} is {_text(new)} instead of {_text(old)}"
                yield self.change("type_changed", f"{text}, which handlers may not expect")
            elif old.get("type") == "object":
                yield from self.objects(old, new, path)
            elif old.get("type") == "array":
                yield from self.items(old.get("items", {}), new.get("items", {}), what, path)

    def items(self, old: Any, new: Any, what: str, path: str) -> Iterator[Change]:
        """Compare the items of lists, or of tuples, whose items have a type each."""
        path = f"{path.removesuffix('.')}[]."
        olds, news = (each if isinstance(each, list) else [each] for each in (old, new))
        if isinstance(old, list) != isinstance(new, list) or len(olds) != len(news):
            yield self.change("type_changed", f"{what} has another number of items")
            return
        for one, other in zip(olds, news, strict=True):
            yield from self.types(one, other, f"an item of {what}", path)

    def enums(self, old: list[Any], new: list[Any], what: str) -> Iterator[Change]:
        if gone := [each for each in old if each not in new]:
            text = f"{what} can no longer be {_listed(gone)}"
            yield self.change("enum_narrowed", f"{text}, which earlier events may contain")
        if more := [each for each in new if each not in old]:
            text = f"{what} can also be {_listed(more)} now, which handlers may not know"
            yield self.change("enum_widened", text)

    def alternatives(
        self, old: list[Schema], new: list[Schema], what: str, path: str
    ) -> Iterator[Change]:
        """Compare types of which a value has one, in any order."""
        left, more = [], [*new]
        for each in old:
            same = (one for one in more if not self.types(each, one, what, path))
            if (found := next(same, None)) is None:
                left.append(each)
            else:
                more.remove(found)
        if len(left) == len(more) == 1:
            yield from self.types(left[0], more[0], what, path)
            return
        for each in left:
            text = f"{what} can no longer be {self.text(each, self.old_root)}"
            yield self.change("type_changed", f"{text}, which earlier events may contain")
        for each in more:
            text = f"{what} can also be {self.text(each, self.new_root)} now"
            yield self.change("type_changed", f"{text}, which handlers may not expect")

    def text(self, schema: Schema, root: Any) -> str:
        return _text(_resolved(schema, root))


def _resolved(schema: Any, root: Any) -> Schema:
    """Return what a schema refers to, without annotations."""
    for _ in range(_HOPS):
        if "$ref" in schema:
            found: Any = root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        elif len(schema.get("allOf", ())) == 1:
            schema = schema["allOf"][0]
        elif "const" in schema or "enum" in schema:
            return {"enum": schema["enum"] if "enum" in schema else [schema["const"]]}
        else:
            return {key: each for key, each in schema.items() if key not in _ANNOTATIONS}
    raise IncomparableError(f"a reference leads to more than {_HOPS} others: {schema}")


def _text(schema: Schema) -> str:
    """Describe a type in a few words."""
    if "anyOf" in schema:
        return " or ".join(map(_text, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {_listed(schema['enum'])}"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    more = {key: each for key, each in schema.items() if key not in _ANNOTATIONS | _OUTLINE}
    return f"{schema.get('type', 'any value')}{f' {_json(more)}' if more else ''}"


def _listed(values: list[Any]) -> str:
    return ", ".join(map(_json, values))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
