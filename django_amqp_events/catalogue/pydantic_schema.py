"""pydantic's JSON Schema of types as they are on the wire; imported only if pydantic is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonRef

from ..declare.validation import bridged

#: Constraints of a Decimal, which is a string on the wire.
_OF_DECIMALS: Final = ("gt", "ge", "lt", "le", "multiple_of", "max_digits", "decimal_places")


class _Generator(GenerateJsonSchema):
    """Describes values as Django's JSON encoder writes them."""

    # A default that JSON cannot express is left out.
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        # pydantic's pattern has another text in each of its versions.
        limits = {f"x-{key}": str(schema[key]) for key in _OF_DECIMALS if key in schema}
        return {"type": "string", "format": "decimal", **limits}

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """Describe keys too, which are strings on the wire."""
        converted = super().dict_schema(schema)
        keys = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
        while "$ref" in keys:
            keys = self.get_schema_from_definitions(cast("JsonRef", keys["$ref"])) or {}
        if "const" in keys or "enum" in keys:
            values = keys.get("enum", [keys.get("const")])
            converted["propertyNames"] = {"enum": [_as_key(value) for value in values]}
        elif keys.get("type") == "integer":
            converted["propertyNames"] = {"pattern": "^-?[0-9]+$"}
        elif keys.get("type") in ("boolean", "null"):
            values = [None] if keys["type"] == "null" else [False, True]
            converted["propertyNames"] = {"enum": [_as_key(value) for value in values]}
        return converted


def _as_key(value: object) -> str:
    """Return a key as JSON writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def describe(hints: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the schemas of the types that pydantic knows, and their definitions.

    References are ``#/definitions/<name>``.
    """
    known = []
    for name, hint in hints.items():
        try:
            adapter = TypeAdapter(bridged(hint))
            adapter.json_schema(mode="serialization", schema_generator=_Generator)
        except Exception:  # noqa: BLE001, S112 - pydantic runs hooks of the user's types
            continue
        known.append((name, "serialization", adapter))
    schemas, definitions = TypeAdapter.json_schemas(
        known,  # type: ignore[arg-type]
        ref_template="#/definitions/{model}",
        schema_generator=_Generator,
    )
    return {name: schema for (name, _), schema in schemas.items()}, definitions.get("$defs", {})
