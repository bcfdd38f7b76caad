"""JSON Schema (draft 7) of a payload, from the type hints of its contract. Pure.

pydantic describes the types. Without it, and for a hint that it does not know, ``$comment`` has the
hint as it is written, so that a change of it is seen.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from django.core.serializers.json import DjangoJSONEncoder

from ..declare.declarations import signature_of
from ..declare.validation import evaluated, is_unpack

Schema = dict[str, Any]
Source = Literal["pydantic", "annotations"]

#: What references begin with.
DEFINITIONS: Final = "#/definitions/"
#: The keyword with a type hint that has no schema. Validators ignore it.
HINT: Final = "$comment"
#: Keywords whose value is a schema, a list of them, or a dict of them by name.
ONE: Final = frozenset(
    {"items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not"}
)
LISTS: Final = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
BY_NAME: Final = frozenset({"properties", "patternProperties", "definitions"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """A key of a payload, from a parameter or a key of ``**payload: Unpack[…]``.

    Attributes:
        annotation: the type hint as it is written, ``""`` without one.
        hint: the type; ``inspect.Parameter.empty`` if the annotation cannot be evaluated.
        others: whether it stands for all other keys (``**kwargs``).
    """

    annotation: str
    hint: Any
    required: bool = False
    default: Any = inspect.Parameter.empty
    others: bool = False

    def fallback(self) -> Schema:
        return {HINT: self.annotation} if self.annotation and self.hint is not Any else {}


def source() -> Source:
    """Return what describes the types in this process."""
    try:
        import pydantic  # noqa: F401
    except ImportError:
        return "annotations"
    return "pydantic"


def object_schema(function: Callable[..., Any]) -> Schema:
    """Return the schema of a payload that has the parameters of *function* as its keys.

    Further keys match too, since handlers leave out the arguments that a newer publisher added.
    ``additionalProperties`` is the schema of ``**kwargs``.
    """
    keys = dict(_keys(function))
    schemas: dict[str, Schema] = {}
    definitions: Schema = {}
    if source() == "pydantic":
        from .pydantic_schema import describe

        hints = {
            name: key.hint for name, key in keys.items() if key.hint is not inspect.Parameter.empty
        }
        schemas, definitions = describe(hints)
    properties: Schema = {}
    whole: Schema = {
        "type": "object",
        "properties": properties,
        "required": [name for name, key in keys.items() if key.required],
    }
    for name, key in keys.items():
        schema = in_draft_7(schemas.get(name, key.fallback()))
        if key.others:
            whole["additionalProperties"] = schema
        else:
            properties[name] = _with_default(schema, key.default)
    own = {name: in_draft_7(schema) for name, schema in definitions.items()}
    return {**whole, "definitions": own} if own else whole


def _keys(function: Callable[..., Any]) -> Iterator[tuple[str, _Key]]:
    for parameter in signature_of(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        annotation = annotation_text(parameter)
        hint: Any = Any
        if annotation:
            try:
                hint = evaluated(parameter.annotation, function)
            except Exception:  # noqa: BLE001 - a hint is any code
                hint = parameter.empty
        others = parameter.kind is parameter.VAR_KEYWORD
        if others and is_unpack(hint):
            try:
                yield from _unpacked(get_args(hint)[0])
                continue
            except Exception:  # noqa: BLE001 - the hints of the TypedDict too
                hint = parameter.empty
        yield (
            parameter.name,
            _Key(
                annotation=annotation,
                hint=hint,
                required=not others and parameter.default is parameter.empty,
                default=parameter.default,
                others=others,
            ),
        )


def _unpacked(words: Any) -> Iterator[tuple[str, _Key]]:
    """Yield the keys of a TypedDict."""
    for name, given in get_type_hints(words, include_extras=True).items():
        hint, required = given, name in words.__required_keys__
        while (form := str(get_origin(hint)).rpartition(".")[2]) in (
            "Required", "NotRequired", "ReadOnly"
        ):  # fmt: skip
            # With postponed annotations, __required_keys__ does not know these forms.
            required = required if form == "ReadOnly" else form == "Required"
            (hint,) = get_args(hint)
        yield name, _Key(annotation=_written(hint), hint=hint, required=required)


def annotation_text(parameter: inspect.Parameter) -> str:
    """Return the type hint of a parameter as it is written, ``""`` without one."""
    if parameter.annotation is parameter.empty:
        return ""
    return _written(getattr(parameter.annotation, "__forward_arg__", parameter.annotation))


def _written(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def may_have_value(schema: Schema, keys: Sequence[str], definitions: Schema) -> bool:
    """Return True if a value of the schema may have a scalar below the keys.

    A list stands for each of its elements.
    """

    def below(part: Any, left: Sequence[str]) -> bool:
        return part is True or (
            isinstance(part, Mapping) and may_have_value({**part}, left, definitions)
        )

    if "$ref" in schema:
        return below(definitions.get(schema["$ref"].removeprefix(DEFINITIONS), True), keys)
    for keyword in LISTS & schema.keys():
        return any(below(part, keys) for part in schema[keyword])
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items", True)
        return any(below(part, keys) for part in (items if isinstance(items, list) else [items]))
    if kind == "object":
        known, others = schema.get("properties"), schema.get("additionalProperties")
        if not keys or known is None:
            return bool(keys) and below(True if others is None else others, keys[1:])
        return below(known.get(keys[0], others), keys[1:])
    return kind != "null" and not (keys and (kind or "enum" in schema))


def in_draft_7(schema: Any, base: str = DEFINITIONS) -> Any:
    """Return a schema of pydantic or of this module with references that begin with *base*.

    pydantic writes draft 2020-12, whose ``prefixItems`` are ``items`` in draft 7, and OpenAPI's
    ``discriminator``, which says no more than the ``oneOf`` beside it.
    """
    if not isinstance(schema, Mapping):
        return schema  # True or False
    converted: Schema = {}
    for keyword, value in schema.items():
        if isinstance(value, list) and (keyword in LISTS or keyword == "items"):
            converted[keyword] = [in_draft_7(part, base) for part in value]
        elif keyword in BY_NAME:
            converted[keyword] = {name: in_draft_7(part, base) for name, part in value.items()}
        elif keyword in ONE:
            converted[keyword] = in_draft_7(value, base)
        elif keyword == "$ref":
            converted[keyword] = base + value.removeprefix(DEFINITIONS)
        elif keyword != "discriminator":
            converted[keyword] = value
    if "prefixItems" in converted:
        rest = {"additionalItems": converted["items"]} if "items" in converted else {}
        converted |= {"items": converted.pop("prefixItems"), **rest}
    return converted


def as_json(value: object) -> Any:
    """Return a value as it is read from the wire.

    Raises:
        TypeError, ValueError: JSON cannot express it.
    """
    plain = value.value if isinstance(value, Enum) else value
    return json.loads(json.dumps(plain, cls=DjangoJSONEncoder, allow_nan=False))


def _with_default(schema: Schema, default: object) -> Schema:
    if default is inspect.Parameter.empty:
        return schema
    if default is None and schema and HINT not in schema:
        null = {"type": "null"}
        members = schema.get("anyOf", [schema])
        schema = schema if null in members else {"anyOf": [*members, null]}
    try:
        written = as_json(default)
    except (TypeError, ValueError):
        return schema
    # Draft 7 ignores what stands beside $ref.
    return {**({"allOf": [schema]} if "$ref" in schema else schema), "default": written}
