"""pydantic's JSON Schema of arguments as they are on the wire; imported only with pydantic."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema


class _Generator(GenerateJsonSchema):
    # A default that JSON cannot express is left out.
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        # The pattern that pydantic writes differs between its versions.
        return {"type": "string", "format": "decimal"}


def describe(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """Return the schema of a type."""
    return adapter.json_schema(mode="serialization", schema_generator=_Generator)
