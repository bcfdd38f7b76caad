"""Compare two documents of a service and find what may break the consumers of its events. Pure.

A changed contract breaks a consumer that has the old one, if a new event does not match it, or one
that has the new one, if an event that was published before does not match it. So a type may become
neither wider nor narrower: any difference may break a consumer, except for a part that is new and
optional.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

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
        ValueError: one of them is another document, or they are of two services.
    """
    try:
        for key in ("version", "service", "types"):
            if old[key] != new[key]:
                raise ValueError(f"its {key!r} is {old[key]!r}, and here it is {new[key]!r}")
        found = list(_differences("", _normal(old), _normal(new)))
    except (AttributeError, KeyError, RecursionError, TypeError) as exc:
        raise ValueError(
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
    }


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    normal = {"format": event["format"], _OPTIONAL: True}
    payload = event["payload"]
    if payload:  # without a contract, it may have any arguments
        normal["payload"] = _schema(payload, payload) | {_OPTIONAL: True}
    return normal


def _schema(schema: Schema, root: Schema, models: tuple[str, ...] = ()) -> Schema:
    """Return a schema without what does not matter: annotations, order, names of models.

    Args:
        models: references to the models around it.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in models:
            return {"recursive": len(models) - models.index(name)}
        return _schema(root["$defs"][name], root, (*models, name))
    normal: Schema = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key == "properties":
            normal[key] = {
                name: _schema(field, root, models) | _optional(name, schema)
                for name, field in value.items()
            }
        elif isinstance(value, dict):
            normal[key] = _schema(value, root, models)
        elif isinstance(value, list) and all(isinstance(member, dict) for member in value):
            members = [_schema(member, root, models) for member in value]
            if key != "prefixItems":  # a union, whose order does not matter
                members.sort(key=partial(json.dumps, sort_keys=True))
            normal[key] = {str(number): member for number, member in enumerate(members)}
        elif isinstance(value, list):
            normal[key] = sorted(map(json.dumps, value))
        else:
            normal[key] = value
    return normal


def _optional(name: str, schema: Schema) -> dict[str, bool]:
    # Where other keys are refused or have a type, a new one may be refused too.
    others = schema.get("additionalProperties", True)
    optional = name not in schema.get("required", ()) and others in (True, {})
    return {_OPTIONAL: True} if optional else {}


def _differences(path: str, old: Any, new: Any) -> Iterator[Change]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield Change(path=path, old=old, new=new)
        return
    for key in {**old, **new}:
        place = f"{path}/{key}" if path else key
        if key not in old:
            addition = isinstance(new[key], dict) and _OPTIONAL in new[key]
            yield Change(path=place, new=new[key], compatible=addition)
        elif key not in new:
            yield Change(path=place, old=old[key])
        else:
            yield from _differences(place, old[key], new[key])


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
