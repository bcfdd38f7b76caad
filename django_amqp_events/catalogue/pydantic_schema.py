"""pydantic's JSON Schema of arguments as they are on the wire; imported only with pydantic."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema


class _Generator(GenerateJsonSchema):
    """Writes what draft 7 and AsyncAPI read, and the same text in each version of pydantic."""

    # A default that JSON cannot express is left out.
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        return {"type": "string", "format": "decimal"}

    def tuple_schema(self, schema: Any) -> dict[str, Any]:
        described = super().tuple_schema(schema)
        if "prefixItems" in described:
            described["items"] = described.pop("prefixItems")
        return described

    def tagged_union_schema(self, schema: Any) -> dict[str, Any]:
        described = super().tagged_union_schema(schema)
        described.pop("discriminator", None)  # of OpenAPI; AsyncAPI has another one
        return described


def describe(adapter: TypeAdapter[Any], root: str) -> dict[str, Any]:
    """Return the schema of a type; its references start from *root*, such as ``#``."""
    return adapter.json_schema(
        mode="serialization",
        ref_template=root + "/$defs/{model}",
        schema_generator=_Generator,
    )
