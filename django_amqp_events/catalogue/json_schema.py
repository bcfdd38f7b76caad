"""JSON Schema of a payload, from the type hints of its contract. Pure.

pydantic describes the types. Without it, or if it does not know one of them, ``$comment`` has each
hint as it is written, so that a change of it is seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

from ..declare.validation import Validator

Schema = dict[str, Any]


def source() -> Literal["pydantic", "annotations"]:
    """Return what describes the types in this process."""
    return "pydantic" if find_spec("pydantic") else "annotations"


def object_schema(signature: inspect.Signature, function: Callable[..., Any]) -> Schema:
    """Return the schema of a payload that has the parameters of a contract or handler as its keys.

    Further keys match too, since handlers leave out the arguments that a newer publisher added.
    ``additionalProperties`` is the schema of ``**kwargs``.
    """
    types = _types(signature, function)
    properties: Schema = {}
    schema: Schema = {"type": "object", "properties": properties, "required": []}
    for name, parameter in signature.parameters.items():
        type_ = types.get("properties", {}).get(name, {})
        if parameter.kind is parameter.VAR_KEYWORD:
            schema["additionalProperties"] = type_.get("additionalProperties", type_)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            properties[name] = type_
            if parameter.default is parameter.empty:
                schema["required"].append(name)
    if "$defs" in types:
        schema["$defs"] = types["$defs"]
    return schema


def _types(signature: inspect.Signature, function: Callable[..., Any]) -> Schema:
    """Return the schemas of all arguments, as ``properties``, and their definitions."""
    if source() == "pydantic":
        from .pydantic_schema import describe

        try:
            return describe(Validator(signature, function).adapter)
        except Exception:  # noqa: BLE001, S110 - pydantic runs hooks of the user's types
            pass
    hints = {name: _annotation_text(p) for name, p in signature.parameters.items()}
    return {"properties": {name: {"$comment": hint} for name, hint in hints.items() if hint}}


def _annotation_text(parameter: inspect.Parameter) -> str:
    """Return the type hint of a parameter as it is written, ``""`` without one."""
    if parameter.annotation is parameter.empty:
        return ""
    annotation = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
