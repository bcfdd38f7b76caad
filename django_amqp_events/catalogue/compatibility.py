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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..declare.patterns import is_pattern, pattern_matches
from ..exceptions import IncomparableError
from .asyncapi import EXTENSION
from .entries import VERSION
from .json_schema import HINT, Schema

Kind = Literal[
    "exchange_changed", "event_added", "event_removed", "format_changed", "contract_added",
    "contract_removed", "argument_added", "argument_removed", "argument_required", "default_added",
    "default_changed", "default_removed", "type_added", "type_changed", "enum_narrowed",
    "enum_widened", "handler_added", "handler_removed", "handler_requires",
]  # fmt: skip
#: Keywords that do not change which values match. ``uniqueItems`` comes from sets, which pydantic
#: makes of any list.
_ANNOTATIONS: Final = frozenset(
    {
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
        "definitions", "uniqueItems",
    }
)  # fmt: skip
#: Keywords with schemas, which are compared in turn.
_OBJECT: Final = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_INNER: Final = frozenset({"propertyNames", "not", "contains", "additionalItems"})
_SCHEMAS: Final = _OBJECT | _INNER | {"items", "allOf"}
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
    #: What described the types.
    types: str
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
        if before.types != after.types:
            made = {"pydantic": "with pydantic"}
            raise IncomparableError(
                f"it was made {made.get(before.types, 'without pydantic')}, and this process runs "
                f"{made.get(after.types, 'without it')}"
            )
        return sorted(_changes(before, after), key=lambda change: (change.compatible, change.event))
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
        types=described["types"],
        events=events,
        handlers={
            handler["name"]: _Handler(
                patterns=tuple(handler["patterns"]),
                required=tuple(one["name"] for one in handler["arguments"] if one["required"]),
            )
            for handler in handlers
        },
    )


def _read_json(document: Mapping[str, Any]) -> tuple[dict[str, _Event], list[Any]]:
    events = {
        event["name"]: _Event(
            publisher=event["publisher"],
            format=event["format"],
            payload=event["payload"],
            root=event["payload"] or {},
        )
        for event in document["events"]
    }
    return events, document["handlers"]


def _read_asyncapi(document: Mapping[str, Any]) -> tuple[dict[str, _Event], list[Any]]:
    components = document["components"]
    events = {
        message["name"]: _Event(
            publisher=message[EXTENSION]["publisher"],
            format=message[EXTENSION]["format"],
            payload=components["schemas"][key] if message[EXTENSION]["contract"] else None,
            root=document,
        )
        for key, message in components["messages"].items()
    }
    operations = document["operations"].values()
    return events, [
        operation[EXTENSION] for operation in operations if operation["action"] == "receive"
    ]


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
            set(_always(event.payload)) if event.payload else set[str]()
            for event_name, event in before.events.items()
            if not is_pattern(event_name)
            and any(pattern_matches(pattern, event_name) for pattern in handler.patterns)
        ]
        for argument in handler.required:
            known = bool(given) and all(argument in names for names in given)
            if argument not in before.handlers[name].required and not known:
                text = f"handler {name!r} requires {argument!r}, which not all its events had"
                yield _broken("handler_requires", "", f"{text}: those without it are archived")
    for name in before.handlers:
        if name not in after.handlers:
            yield _harmless("handler_removed", "", f"handler {name!r} was removed")


def _always(payload: Schema) -> Iterator[str]:
    """Yield the arguments that each event has: a default of the contract is published."""
    for name, schema in payload["properties"].items():
        if name in payload["required"] or "default" in schema:
            yield name


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

    def objects(self, old: Schema, new: Schema, path: str = "") -> Iterator[Change]:
        """Compare payloads, or with *path* objects within them."""
        what = "field" if path else "argument"
        was, now = old.get("properties", {}), new.get("properties", {})
        needed, needs = old.get("required", ()), new.get("required", ())
        others = old.get("additionalProperties")
        for name in was:
            place = f"{path}{name}"
            if name not in now:
                text = f"{what} {place!r} was removed: handlers that require it fail"
                yield _broken("argument_removed", self.event, text)
                continue
            if name in needs and name not in needed:
                text = f"{what} {place!r} is required now: events without it do not match"
                yield _broken("default_removed", self.event, text)
            elif name in needed and name not in needs:
                # Publishing fills in the defaults of a contract, but not those of models.
                filled = not path and "default" in now[name]
                text = f"{what} {place!r} " + (
                    "has a default now"
                    if filled
                    else "is no longer required: handlers that require it fail without it"
                )
                yield (_harmless if filled else _broken)("default_added", self.event, text)
            elif _json(was[name].get("default")) != _json(now[name].get("default")):
                text = (
                    f"the default of {what} {place!r} is {_json(now[name].get('default'))} instead "
                    f"of {_json(was[name].get('default'))}"
                )
                yield _harmless("default_changed", self.event, text)
            yield from self.types(was[name], now[name], f"{what} {place!r}", f"{place}.")
        for name in now:
            place = f"{path}{name}"
            if name in was:
                continue
            if name in needs:
                text = f"{what} {place!r} is new and required: events published before lack it"
                yield _broken("argument_required", self.event, text)
            elif others is False:
                text = f"{what} {place!r} is new, and handlers of the old contract refuse it"
                yield _broken("argument_added", self.event, text)
            else:
                text = f"{what} {place!r} is new and optional"
                yield _harmless("argument_added", self.event, text)
            if isinstance(others, dict) and others:  # its former type
                yield from self.types(others, now[name], f"{what} {place!r}", f"{place}.")
        yield from self.others(others, new.get("additionalProperties"), path)
        yield from self.patterns(
            old.get("patternProperties", {}), new.get("patternProperties", {}), path
        )

    def others(self, old: Any, new: Any, path: str) -> Iterator[Change]:
        """Compare what an object may have besides its properties; None is not specified."""
        where = f"{path.rstrip('.')!r}" if path else "the event"
        if not path and (old is None) != (new is None):
            if new is None:
                text = "the event no longer takes other arguments (**kwargs)"
                yield _broken("argument_removed", self.event, text)
            else:
                text = "the event takes other arguments (**kwargs) now"
                yield _harmless("argument_added", self.event, text)
        elif (old is False) != (new is False):
            text = f"{where} may {'not ' if new is False else ''}have other fields now"
            yield _broken("type_changed", self.event, text)
        elif isinstance(old, dict) or isinstance(new, dict):
            yield from self.types(old, new, f"a value of {where}", f"{path}*.")

    def patterns(
        self, old: Mapping[str, Any], new: Mapping[str, Any], path: str
    ) -> Iterator[Change]:
        """Compare values by the patterns of their keys."""
        where = f"{path.rstrip('.')!r}"
        if old.keys() != new.keys():
            yield _broken("type_changed", self.event, f"the keys of {where} have another pattern")
        for pattern in old.keys() & new.keys():
            yield from self.types(old[pattern], new[pattern], f"a value of {where}", f"{path}*.")

    def types(self, old: Any, new: Any, what: str, path: str) -> Iterator[Change]:
        """Compare the types of an argument, a field or an item."""
        old, new = ({} if schema in (None, True) else schema for schema in (old, new))
        pair = (old.get("$ref"), new.get("$ref"))
        if all(pair) and pair in self.open:
            return
        self.open.append(pair)
        try:
            olds, news = _members(old, self.old_root), _members(new, self.new_root)
            if len(olds) == len(news) == 1:
                yield from self.single(olds[0], news[0], what, path)
            else:
                yield from self.alternatives(olds, news, what, path)
        finally:
            self.open.pop()

    def same(self, old: Schema, new: Schema) -> bool:
        differences = self.types(old, new, "", ".")
        try:
            return next(differences, None) is None
        finally:
            differences.close()  # type: ignore[attr-defined]

    def single(self, old: Schema, new: Schema, what: str, path: str) -> Iterator[Change]:
        """Compare types that are no unions."""
        texts = _text(new, self.new_root), _text(old, self.old_root)
        old, new = _resolved(old, self.old_root), _resolved(new, self.new_root)
        keywords = {*old, *new}
        if not old and new:
            yield _harmless("type_added", self.event, f"{what} has a type now: {texts[0]}")
        elif "enum" in old and "enum" in new:
            yield from self.enums(old["enum"], new["enum"], what)
        elif any(_json(old.get(key)) != _json(new.get(key)) for key in keywords - _SCHEMAS):
            text = f"{what} is {texts[0]} instead of {texts[1]}"
            yield _broken("type_changed", self.event, f"{text}, which handlers may not expect")
        else:
            if keywords & _OBJECT:
                yield from self.objects(old, new, path)
            if "items" in keywords:
                yield from self.items(old.get("items"), new.get("items"), what, path)
            for key in sorted(keywords & _INNER):
                if (key in old) != (key in new) and key != "additionalItems":
                    names = "the keys" if key == "propertyNames" else "the values"
                    yield _broken(
                        "type_changed", self.event, f"{names} of {what} have another type"
                    )
                else:
                    where = f"a key of {what}" if key == "propertyNames" else f"a value of {what}"
                    yield from self.types(old.get(key), new.get(key), where, f"{path}*.")
            yield from self.items(old.get("allOf", []), new.get("allOf", []), what, path)

    def items(self, old: Any, new: Any, what: str, path: str) -> Iterator[Change]:
        """Compare the items of lists, or of tuples, whose items have a type each."""
        path = f"{path.removesuffix('.')}[]."
        olds, news = (schemas if isinstance(schemas, list) else [schemas] for schemas in (old, new))
        if isinstance(old, list) != isinstance(new, list) or len(olds) != len(news):
            yield _broken("type_changed", self.event, f"{what} has another number of items")
            return
        for one, other in zip(olds, news, strict=True):
            yield from self.types(one, other, f"an item of {what}", path)

    def enums(self, old: list[Any], new: list[Any], what: str) -> Iterator[Change]:
        olds, news = set(map(_json, old)), set(map(_json, new))
        if gone := [value for value in old if _json(value) not in news]:
            text = f"{what} can no longer be {_listed(gone)}"
            yield _broken("enum_narrowed", self.event, f"{text}, which earlier events may contain")
        if more := [value for value in new if _json(value) not in olds]:
            text = f"{what} can also be {_listed(more)} now, which handlers may not know"
            yield _broken("enum_widened", self.event, text)

    def alternatives(
        self, olds: list[Schema], news: list[Schema], what: str, path: str
    ) -> Iterator[Change]:
        """Compare types of which a value has one, in any order."""
        if olds == [{}]:
            text = " or ".join(_text(schema, self.new_root) for schema in news)
            yield _harmless("type_added", self.event, f"{what} has a type now: {text}")
            return
        left, more = [], [*news]
        for old in olds:
            # Of the same name first, since it is the most likely one.
            likely = sorted(more, key=lambda new: _name(new) != _name(old))
            if (equal := next((new for new in likely if self.same(old, new)), None)) is None:
                left.append(old)
            else:
                more.remove(equal)
        pairs = [
            (old, new)
            for old in left
            for new in more
            if len(left) == len(more) == 1 or (_name(old) and _name(old) == _name(new))
        ]
        for old, new in pairs:
            left.remove(old)
            more.remove(new)
            yield from self.types(old, new, what, path)
        for old in left:
            text = f"{what} can no longer be {_text(old, self.old_root)}"
            yield _broken("type_changed", self.event, f"{text}, which earlier events may contain")
        for new in more:
            text = f"{what} can also be {_text(new, self.new_root)} now"
            yield _broken("type_changed", self.event, f"{text}, which handlers may not expect")


def _name(schema: Schema) -> str:
    """Return the name of a model, or what tells an enum from other members of a union."""
    if "enum" in schema:
        return "enum"
    return str(schema["$ref"]).rpartition("/")[2] if "$ref" in schema else ""


def _members(schema: Schema, root: Any) -> list[Schema]:
    """Return the types of which a value has one; the values of enums are one type.

    It is ``[{}]`` if one of them matches any value.
    """
    members: list[Schema] = []
    values: list[Any] = []
    for member in _flat(schema, root):
        resolved = _resolved(member, root)
        if not resolved:
            return [{}]
        if resolved.keys() == {"enum"}:
            values += resolved["enum"]
        elif resolved == {"type": "null"}:
            values.append(None)
        elif member not in members:
            members.append(member)
    if values:
        members.append({"enum": values})
    return members


def _flat(schema: Schema, root: Any) -> Iterator[Schema]:
    """Yield the members of a union and of the unions in it."""
    resolved = _resolved(schema, root)
    (keyword,) = resolved if len(resolved) == 1 else ("",)
    if keyword in ("anyOf", "oneOf"):
        for member in resolved[keyword]:
            yield from _flat(member, root)
    else:
        yield schema


def _resolved(schema: Any, root: Any) -> Schema:
    """Return what a schema refers to, without annotations."""
    for _ in range(_HOPS):
        if "$ref" in schema:
            target: Any = root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            schema = target
        elif len(schema.get("allOf", ())) == 1:
            schema = schema["allOf"][0]
        elif "const" in schema or "enum" in schema:
            return {"enum": schema["enum"] if "enum" in schema else [schema["const"]]}
        else:
            return {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    raise IncomparableError(f"a reference leads to more than {_HOPS} others: {schema}")


def _text(schema: Schema, root: Any) -> str:
    """Describe a type in a few words."""
    name, schema = _name(schema), _resolved(schema, root)
    if "enum" in schema:
        values = _listed(schema["enum"])
        return values if len(schema["enum"]) == 1 else f"one of {values}"
    if name:
        return name
    if HINT in schema:
        return str(schema[HINT])
    more = {key: value for key, value in schema.items() if key not in _SCHEMAS | {"type"}}
    return f"{schema.get('type', 'any value')}{f' {_json(more)}' if more else ''}"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(_json, values))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
