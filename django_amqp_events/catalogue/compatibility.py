"""Compare two documents of a service and find what may break the consumers of its events. Pure.

A changed contract breaks a consumer that has the old one, if a new event does not match it, or one
that has the new one, if an event that was published before does not match it. So a type may become
neither wider nor narrower: any difference may break a consumer, except for a part that is new and
optional. Handlers leave out arguments that they do not take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..exceptions import IncomparableError
from .json_schema import Schema

#: Keywords that do not change which values match.
_ANNOTATIONS: Final = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$defs",
    "discriminator",  # its values are those of a property
    "required",  # of each property
}  # fmt: skip
#: The mark of a part that may be added.
_OPTIONAL: Final = "optional"
#: Longest text of a value in characters.
_MAX_TEXT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A difference between two documents.

    Attributes:
        path: of the part that changed, such as ``events/shop.paid/payload/properties/total``.
        old, new: its normalised values; ``None`` if only one document has it.
        compatible: whether it breaks no consumer.
    """

    path: str
    old: Any = None
    new: Any = None
    compatible: bool = False

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.path} is new: {_text(self.new)}"
        if self.new is None:
            return f"{self.path} was removed: {_text(self.old)}"
        return f"{self.path} is {_text(self.new)} instead of {_text(self.old)}"


def compare(old: Any, new: Any) -> list[Change]:
    """Return the changes from one document of a service to another, the incompatible ones first.

    Both are documents that ``events_catalogue`` printed.

    Raises:
        IncomparableError: one of them is another document, or they are of two services.
    """
    try:
        for key in ("version", "service", "types"):
            if old[key] != new[key]:
                raise IncomparableError(f"its {key!r} is {old[key]!r}, and here it is {new[key]!r}")
        found = [*_differences("", _normal(old), _normal(new)), *_requirements(old, new)]
    except (AttributeError, KeyError, RecursionError, TypeError) as exc:
        raise IncomparableError(
            f"it is not a document of events_catalogue ({type(exc).__name__}: {exc})"
        ) from exc
    return sorted(found, key=lambda change: change.compatible)


def _normal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a service promises: other services compare the events that they publish."""
    return {
        "exchange": document["exchange"].removeprefix(document["prefix"]),
        "events": {
            event["name"]: _event(event)
            for event in document["events"]
            if event["publisher"] == document["service"]
        },
        "handlers": {handler["name"]: {_OPTIONAL: True} for handler in document["handlers"]},
    }


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    normal = {"format": event["format"], _OPTIONAL: True}
    payload = event["payload"]
    if payload:  # without a contract, it may have any arguments
        normal["payload"] = _schema(payload, payload) | {_OPTIONAL: True}
    return normal


def _schema(schema: Any, root: Schema, models: tuple[str, ...] = ()) -> Any:
    """Return a schema without what does not matter: annotations, order, names of models.

    Args:
        models: references to the models around it.
    """
    if not isinstance(schema, dict):
        return schema  # True or False, or the value of another keyword
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in models:
            return {"recursive": len(models) - models.index(name)}
        return _schema(root["$defs"][name], root, (*models, name))
    normal: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            normal[key] = {
                name: _schema(field, root, models) | _optional(name, schema)
                for name, field in value.items()
            }
        elif key in ("enum", "const"):
            normal["enum"] = tuple(sorted(map(json.dumps, value if key == "enum" else [value])))
        elif key in ("anyOf", "oneOf"):
            normal["anyOf"] = [_schema(member, root, models) for member in value]
        elif key == "patternProperties":
            normal[key] = {name: _schema(part, root, models) for name, part in value.items()}
        elif isinstance(value, list) and key not in _ANNOTATIONS:  # items of a tuple
            normal[key] = {str(n): _schema(part, root, models) for n, part in enumerate(value)}
        elif key not in _ANNOTATIONS:
            normal[key] = _schema(value, root, models)
    return normal


def _optional(name: str, schema: Schema) -> dict[str, bool]:
    # Where other keys are refused or have a type, a new one may be refused too.
    others = schema.get("additionalProperties", True)
    optional = name not in schema.get("required", ()) and others in (True, {})
    return {_OPTIONAL: True} if optional else {}


def _differences(path: str, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, list) and isinstance(new, list):
        yield from _members(path, old, new)
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            place = f"{path}/{key}" if path else key
            if key not in old:
                addition = isinstance(new[key], dict) and _OPTIONAL in new[key]
                yield Change(path=place, new=new[key], compatible=addition)
            elif key not in new:
                yield Change(path=place, old=old[key])
            else:
                yield from _differences(place, old[key], new[key])
    elif old != new:
        yield Change(path=path, old=old, new=new)


def _members(path: str, old: Sequence[Any], new: Sequence[Any]) -> Iterator[Change]:
    """Compare types of which a value has one, in any order."""
    gone = [member for member in old if member not in new]
    more = [member for member in new if member not in old]
    if len(gone) != len(more):
        yield Change(path=path, old=old, new=new)
        return
    for one, other in zip(gone, more, strict=True):
        yield from _differences(path, one, other)


def _requirements(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Yield what handlers newly require, unless all contracts of their events had it before."""
    contracts = {event["name"]: event["payload"] for event in old["events"]}
    before = {handler["name"]: _required(handler) for handler in old["handlers"]}
    for handler in new["handlers"]:
        name = handler["name"]
        received = [
            contracts.get(event["name"], event["payload"])
            for event in new["events"]
            if name in event["handlers"] and event["publisher"]  # no pattern
            and event["name"] not in handler["upcasts"]
        ]  # fmt: skip
        for argument in sorted(_required(handler) - before.get(name, _required(handler))):
            known = [payload and argument in payload["properties"] for payload in received]
            if not known or not all(known):
                path = f"handlers/{name}/payload/properties/{argument}"
                yield Change(path=path, new={"required": True})


def _required(handler: Mapping[str, Any]) -> set[str]:
    return set(handler["payload"]["required"])


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
