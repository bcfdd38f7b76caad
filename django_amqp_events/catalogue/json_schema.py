"""JSON Schema (draft 7) of a callable's arguments, from its type hints. Pure.

A plain type has the same schema with and without pydantic, so that documents of two environments
can be compared. pydantic describes the others: models, dataclasses, ``TypedDict``, constraints.
Without it, their schema is ``{}``, which any value matches.
"""

from __future__ import annotations

import inspect
import itertools
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder

from ..declare import validation

Schema = dict[str, Any]

#: What references begin with.
DEFINITIONS: Final = "#/definitions/"

#: Values as Django's JSON encoder writes them.
_PLAIN: Final[Mapping[Any, Schema]] = {
    Any: {},
    object: {},
    None: {"type": "null"},
    type(None): {"type": "null"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    Decimal: {"type": "string", "format": "decimal"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
    timedelta: {"type": "string", "format": "duration"},
    UUID: {"type": "string", "format": "uuid"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
}
#: Keywords whose value is a schema, a list of them, or a dict of them by name.
_ONE: Final = {"items", "additionalProperties", "propertyNames", "contains", "not"}
_LISTS: Final = {"anyOf", "allOf", "oneOf", "prefixItems"}
_BY_NAME: Final = {"properties", "patternProperties", "definitions"}
_ARRAYS: Final = (list, Sequence, Iterable, AbstractSet, set, frozenset)
_OBJECTS: Final = (dict, Mapping)


def type_hints(
    function: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> dict[str, Any]:
    """Return the type of each parameter by name.

    It is ``Any`` for one without a hint, or with one that cannot be evaluated, such as a name that
    is imported for type checkers only.
    """
    function = validation.function_of(function)
    names = getattr(function, "__globals__", {})
    own_names = {each.__name__: each for each in getattr(function, "__type_params__", ())}
    found: dict[str, Any] = {}
    for each in parameters:
        found[each.name] = Any
        if each.annotation is not each.empty:
            owner = types.SimpleNamespace(__annotations__={each.name: each.annotation})
            try:
                found |= get_type_hints(owner, names, own_names, include_extras=True)
            except Exception:  # noqa: BLE001, S112 - a hint is any code
                continue
    return found


def object_schema(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Schema:
    """Return the schema of a payload that has the parameters of *function* as its keys.

    Further keys match too, since handlers leave out the arguments that a newer publisher added.
    ``additionalProperties`` is the schema of ``**kwargs``.
    """
    definitions: Schema = {}
    properties: Schema = {}
    whole: Schema = {
        "type": "object",
        "properties": properties,
        "required": [
            each.name
            for each in parameters
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ],
    }
    hints = type_hints(function, parameters)
    for each in parameters:
        schema = type_schema(hints[each.name], definitions)
        if each.kind is each.VAR_KEYWORD:
            whole["additionalProperties"] = schema
        elif each.kind is not each.VAR_POSITIONAL:
            properties[each.name] = _with_default(schema, each.default)
    return {**whole, "definitions": definitions} if definitions else whole


def type_schema(hint: Any, definitions: Schema) -> Schema:
    """Return the schema of a type as it is on the wire.

    Args:
        definitions: schemas of models are added here; references are ``#/definitions/<name>``.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint) or {}
    if origin is Literal:
        return _enum(arguments) or {}
    if origin in (Union, types.UnionType):
        return _any_of([type_schema(each, definitions) for each in arguments])
    if origin in _ARRAYS or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", **_inner("items", arguments[0], definitions)}
    if origin in _OBJECTS:
        return {"type": "object", **_inner("additionalProperties", arguments[1], definitions)}
    if isinstance(getattr(hint, "__supertype__", None), type):  # NewType
        return type_schema(hint.__supertype__, definitions)
    try:
        return {**_PLAIN[hint]}
    except (KeyError, TypeError):  # TypeError: it cannot be hashed
        pass
    schema = _by_pydantic(hint, definitions)
    if schema is None and origin is Annotated:
        return type_schema(arguments[0], definitions)
    return schema or {}


def may_have_value(schema: Schema, keys: Sequence[str], definitions: Schema) -> bool:
    """Return True if a value of the schema may have a scalar below the keys.

    A list stands for each of its elements.
    """

    def below(each: Any, left: Sequence[str]) -> bool:
        return each is True or (
            isinstance(each, Mapping) and may_have_value({**each}, left, definitions)
        )

    if "$ref" in schema:
        return below(definitions.get(schema["$ref"].removeprefix(DEFINITIONS), True), keys)
    for keyword in _LISTS & schema.keys():
        return any(below(each, keys) for each in schema[keyword])
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items", True)
        return any(below(each, keys) for each in (items if isinstance(items, list) else [items]))
    if kind == "object":
        known, others = schema.get("properties"), schema.get("additionalProperties")
        if not keys or known is None:
            return bool(keys) and below(True if others is None else others, keys[1:])
        return below(known.get(keys[0], others), keys[1:])
    return kind != "null" and not (keys and (kind or "enum" in schema))


def in_draft_7(schema: Any, base: str = DEFINITIONS) -> Any:
    """Return a schema of pydantic or of this module with references that begin with *base*.

    pydantic writes draft 2020-12, whose ``prefixItems`` are ``items`` in draft 7.
    """
    if not isinstance(schema, Mapping):
        return schema  # True or False
    found: Schema = {}
    for keyword, value in schema.items():
        if isinstance(value, list) and (keyword in _LISTS or keyword == "items"):
            found[keyword] = [in_draft_7(each, base) for each in value]
        elif keyword in _BY_NAME:
            found[keyword] = {name: in_draft_7(each, base) for name, each in value.items()}
        elif keyword in _ONE:
            found[keyword] = in_draft_7(value, base)
        elif keyword == "$ref":
            found[keyword] = base + value.removeprefix(DEFINITIONS)
        else:
            found[keyword] = value
    if "prefixItems" in found:
        rest = {"additionalItems": found["items"]} if "items" in found else {}
        found |= {"items": found.pop("prefixItems"), **rest}
    return found


def as_json(value: object) -> Any:
    """Return a value as it is read from the wire.

    Raises:
        TypeError, ValueError: JSON cannot express it.
    """
    plain = value.value if isinstance(value, Enum) else value
    return json.loads(json.dumps(plain, cls=DjangoJSONEncoder, allow_nan=False))


def _inner(keyword: str, hint: Any, definitions: Schema) -> Schema:
    schema = type_schema(hint, definitions)
    return {keyword: schema} if schema else {}


def _with_default(schema: Schema, default: object) -> Schema:
    if default is inspect.Parameter.empty:
        return schema
    if default is None:
        schema = _any_of([schema, _PLAIN[None]])
    try:
        written = as_json(default)
    except (TypeError, ValueError):
        return schema
    # Draft 7 ignores what stands beside $ref.
    return {**({"allOf": [schema]} if "$ref" in schema else schema), "default": written}


def _any_of(schemas: Iterable[Schema]) -> Schema:
    """Return the schema of alternatives; ``{}`` if one of them matches any value."""
    found: list[Schema] = []
    for schema in schemas:
        for each in schema.get("anyOf", [schema]):
            if each not in found:
                found.append(each)
    if {} in found:
        return {}
    return found[0] if len(found) == 1 else {"anyOf": found}


def _enum(values: Iterable[Any]) -> Schema | None:
    try:
        return {"enum": [as_json(each) for each in values]}
    except (TypeError, ValueError):
        return None


def _by_pydantic(hint: Any, definitions: Schema) -> Schema | None:
    for number in itertools.count(1):
        # Two models of the same name have different definitions.
        suffix = "" if number == 1 else f".{number}"
        found = validation.json_schema(hint, f"{DEFINITIONS}{{model}}{suffix}")
        if found is None:
            return None
        own = {f"{name}{suffix}": in_draft_7(each) for name, each in found.pop("$defs", {}).items()}
        if all(definitions.get(name, each) == each for name, each in own.items()):
            definitions.update(own)
            schema: Schema = in_draft_7(found)
            return schema
    return None
