"""Validate a payload against the type hints of a function, with pydantic (``VALIDATE``).

pydantic is imported when a validator is made; apart from this module, the catalogue imports it. A
validator reads what is on the wire, when an event is published as well as when it is handled: what
is published is what the publisher has passed.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Final, get_type_hints

from django.core.serializers.json import DjangoJSONEncoder

from ..conf import configuration_error
from ..exceptions import ControlFlow
from ..options import Problem
from .declarations import dotted

#: Maximum number of errors that are named for one payload.
MAX_ERRORS: Final = 20
#: Longest text of one error in characters; its path may have a publisher's keys.
MAX_ERROR: Final = 300
#: Limit of the types, names and contracts in memory, since some are made at run time.
REMEMBERED: Final = 1024
REMEDY: Final = 'pip install "django-amqp-events[contracts]"'

_ENCODER: Final = DjangoJSONEncoder(separators=(",", ":"))


class Violation(ControlFlow):
    """A payload violates type hints; the text has the path and the cause of each error."""


class Validator:
    """The type hints of a function's parameters. Values of parameters without one are unchanged.

    Attributes:
        adapter: pydantic's type of all arguments with a hint, by name.

    Raises:
        ConfigurationError: pydantic is missing, or cannot enforce the hints.
    """

    def __init__(self, signature: inspect.Signature, target: Any) -> None:
        try:
            import pydantic
            import typing_extensions
        except ImportError as exc:
            what = f"VALIDATE needs pydantic, which cannot be imported ({exc})."
            hint = f"Run {REMEDY}, or remove VALIDATE."
            raise configuration_error(Problem("E080", what, hint)) from exc
        self._errors = pydantic.ValidationError
        try:
            hints = _hints(signature, target)
            # pydantic refuses typing.TypedDict before Python 3.12.
            typed_dict: Any = typing_extensions.TypedDict
            self.adapter = pydantic.TypeAdapter(typed_dict("arguments", hints, total=False))
            self.adapter.rebuild(raise_errors=True)
        except Exception as exc:
            reason = f"{type(exc).__name__}: {exc}".partition("\n")[0].rstrip(".")
            what = f"The type hints of {dotted(target)} cannot be enforced: {reason}."
            hint = (
                "Correct them, import their names at run time, or remove VALIDATE for this "
                "function."
            )
            raise configuration_error(Problem("E080", what, hint)) from exc
        self._names = frozenset(hints)

    def from_json(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return decoded arguments as values of their hints.

        Raises:
            Violation: an argument is not a value of its hint.
        """
        hinted = {name: value for name, value in arguments.items() if name in self._names}
        try:
            # From JSON text, because pydantic's strict mode reads a date or Decimal from JSON text
            # only.
            return {**arguments, **self.adapter.validate_json(_ENCODER.encode(hinted))}
        except self._errors as exc:
            errors = exc.errors(include_url=False, include_input=False, include_context=False)
            raise Violation(_text(errors)) from None
        except (TypeError, ValueError) as exc:  # an upcaster's value that JSON does not have
            raise Violation(str(exc)[:MAX_ERROR]) from exc

    def to_json(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a publisher's arguments as JSON values, those with a hint at least.

        Raises:
            Violation: a value has none.
        """
        hinted = {name: value for name, value in arguments.items() if name in self._names}
        try:
            return {**arguments, **_plain(hinted)}
        # pydantic's are of each kind; ValueError is Django's for a time with a time zone, too.
        except (TypeError, ValueError, RuntimeError) as exc:
            raise Violation(" ".join(str(exc).split())[:MAX_ERROR]) from exc


def _hints(signature: inspect.Signature, target: Any) -> dict[str, Any]:
    """Return the types of a callable's parameters, with their metadata.

    Raises:
        Exception: any, since an annotation is code.
    """
    function = _function_of(target)
    annotated = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.annotation is not parameter.empty
    }
    hints = get_type_hints(
        types.SimpleNamespace(
            __annotations__={name: parameter.annotation for name, parameter in annotated.items()}
        ),
        getattr(function, "__globals__", {}),
        {parameter.__name__: parameter for parameter in getattr(function, "__type_params__", ())},
        include_extras=True,
    )
    for name, parameter in annotated.items():
        if hints[name] is Any:
            del hints[name]
        elif parameter.kind is parameter.VAR_KEYWORD:
            hints[name] = types.GenericAlias(dict, (str, hints[name]))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            hints[name] = types.GenericAlias(tuple, (hints[name], ...))
    return hints


def _text(errors: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for error in errors[:MAX_ERRORS]:
        path = ".".join(map(str, error["loc"]))
        texts.append(f"{path}: {error['msg']}"[:MAX_ERROR] if path else error["msg"])
    more = f"; and {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
    return "; ".join(texts) + more


def _function_of(target: Any) -> Any:
    """Return the function whose module has the names of the hints of a callable."""
    target = inspect.unwrap(target)
    if isinstance(target, partial):
        return _function_of(target.func)
    if inspect.isclass(target):
        return getattr(target, "run", target.__init__)
    if not inspect.isroutine(target):
        return _function_of(type(target).__call__)
    return target


def _plain(value: Any) -> Any:
    """Return a value as Django's JSON encoder writes it, and objects as dicts of their fields.

    Raises:
        TypeError, ValueError, RuntimeError: it has no value in JSON that would be read back as it.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        items = {_plain(key): _plain(item) for key, item in value.items()}
        if len(json.loads(json.dumps(dict.fromkeys(items)))) < len(value):
            raise ValueError("two keys of a dict are equal in JSON")
        return items
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(map(_plain, value))
    if isinstance(value, Enum):
        return _plain(value.value)
    with suppress(TypeError):
        return _ENCODER.default(value)
    from pydantic_core import ValidationError, to_jsonable_python

    kind: Any = type(value)
    adapter = _adapter(kind)
    # Without warnings: values of other types are errors when the whole is read.
    dumped = adapter.dump_python(
        value, by_alias=True, round_trip=True, serialize_as_any=True, warnings=False
    )
    if type(dumped) is not kind:
        with suppress(ValidationError):  # it comes with its path when the whole is read
            # A field may be read under another name and would get its default; a serializer may
            # mask or round it.
            if not _same(value, adapter.validate_python(dumped)):
                raise ValueError(
                    f"{kind.__name__} does not read its fields as it writes them; use one alias "
                    f"to read and write each field, remove serializers that change its value, or "
                    f"publish a dict"
                )
        return _plain(dumped)
    written = to_jsonable_python(value)
    if adapter.validate_python(written) != value:
        raise ValueError(f"JSON has no value for a {kind.__name__}")
    return written


def _same(written: Any, read: Any) -> bool:
    """Return True if fields that are read have the values that were written.

    A value may be read as one of another type: a dataclass can have a text as its Decimal. A base
    class reads fewer fields than its subclass has.
    """
    written, read = _fields(written), _fields(read)
    if isinstance(written, dict) and isinstance(read, dict):
        return all(key in written and _same(written[key], read[key]) for key in read)
    if isinstance(written, (list, tuple)) and isinstance(read, (list, tuple)):
        return len(written) == len(read) and all(map(_same, written, read))
    if not _has_equality(type(written)):
        return True
    if read is None or type(written) is type(read):
        return bool(written == read)
    return True


def _has_equality(kind: Any) -> bool:
    """Return False if an object of this class is equal to itself alone."""
    return kind.__eq__ is not object.__eq__


def _fields(value: Any) -> Any:
    """Return the fields of an object of a class that has fields, without private attributes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    import pydantic

    if isinstance(value, pydantic.BaseModel):
        return {**value.__dict__, **(value.model_extra or {})}
    return value


@lru_cache(maxsize=REMEMBERED)
def _adapter(kind: type) -> Any:
    import pydantic

    return pydantic.TypeAdapter(kind)
