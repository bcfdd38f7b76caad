"""Validate a payload against the type hints of a function, with pydantic (``VALIDATE``).

pydantic is imported when a validator is made; apart from this module, the catalogue imports it.
Publishing turns the values into those that Django's JSON encoder writes; handling turns the JSON
values into those of the hints.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from django.core.serializers.json import DjangoJSONEncoder

from ..conf import configuration_error
from ..exceptions import ControlFlow
from ..options import Problem
from .declarations import dotted

#: Maximum number of errors that are named for one payload.
MAX_ERRORS: Final = 20
#: Longest text of one error in characters; its path may have a publisher's keys.
MAX_ERROR: Final = 300
REMEDY: Final = 'pip install "django-amqp-events[contracts]"'

_ENCODER: Final = DjangoJSONEncoder(separators=(",", ":"))


class Violation(ControlFlow):
    """A payload violates type hints; the text has the path and the cause of each error."""


class Validator:
    """The type hints of a function's parameters. Values of parameters without one are unchanged.

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
        self._keywords = ""
        try:
            hints = self._hints(signature, target)
            # pydantic refuses typing.TypedDict before Python 3.12.
            typed_dict: Any = typing_extensions.TypedDict
            arguments = typed_dict("arguments", hints, total=False)
            # Otherwise, the fields of a given dataclass instance would not be checked.
            arguments.__pydantic_config__ = {"revalidate_instances": "always"}
            self._adapter = pydantic.TypeAdapter(arguments)
            self._adapter.rebuild(raise_errors=True)
        except Exception as exc:
            reason = f"{type(exc).__name__}: {exc}".partition("\n")[0].rstrip(".")
            what = f"The type hints of {dotted(target)} cannot be enforced: {reason}."
            hint = (
                "Correct them, import their names at run time, or remove VALIDATE for this "
                "function."
            )
            raise configuration_error(Problem("E080", what, hint)) from exc
        self._names = frozenset(hints)

    def _hints(self, signature: inspect.Signature, target: Any) -> dict[str, Any]:
        hints = {}
        for name, parameter in signature.parameters.items():
            kind = parameter.kind
            if parameter.annotation is parameter.empty:
                continue
            hint = evaluated(parameter.annotation, target)
            if hint is Any:
                continue
            if kind is inspect.Parameter.VAR_KEYWORD:
                self._keywords = name
                keywords = (
                    get_args(hint)[0] if is_unpack(hint) else types.GenericAlias(dict, (str, hint))
                )
                hints[name] = bridged(keywords)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                hints[name] = types.GenericAlias(tuple, (bridged(hint), ...))
            else:
                hints[name] = bridged(hint)
        return hints

    def from_python(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a publisher's arguments as values of their hints.

        Raises:
            Violation: an argument is not a value of its hint.
        """
        return self._validated(arguments, self._adapter.validate_python)

    def from_json(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return decoded arguments as values of their hints.

        Raises:
            Violation: an argument is not a value of its hint.
        """
        # From JSON text, because pydantic's strict mode reads a date or Decimal from JSON text
        # only.
        return self._validated(
            arguments, lambda hinted: self._adapter.validate_json(_ENCODER.encode(hinted))
        )

    def _validated(
        self, arguments: Mapping[str, Any], validate: Callable[[dict[str, Any]], Any]
    ) -> dict[str, Any]:
        hinted = {name: value for name, value in arguments.items() if name in self._names}
        if self._keywords:
            hinted.setdefault(self._keywords, {})  # a TypedDict may require some
        try:
            return {**arguments, **validate(hinted)}
        except self._errors as exc:
            errors = exc.errors(include_url=False, include_input=False, include_context=False)
            raise Violation(self._text(errors)) from None
        except (TypeError, ValueError) as exc:  # an upcaster's value that JSON does not have
            raise Violation(str(exc)[:MAX_ERROR]) from exc

    def surplus(self, given: Mapping[str, Any], validated: Mapping[str, Any]) -> list[str]:
        """Return the keyword arguments that ``**payload: Unpack[…]`` does not have.

        Args:
            validated: as :meth:`from_python` or :meth:`from_json` returned it for *given*.
        """
        before, after = (payload.get(self._keywords, {}) for payload in (given, validated))
        # Equally many have other names if they have aliases.
        return sorted(before.keys() - after.keys()) if len(before) > len(after) else []

    def _text(self, errors: Iterable[Mapping[str, Any]]) -> str:
        texts = []
        for error in errors:
            path = error["loc"]
            path = path[1:] if path[:1] == (self._keywords,) else path
            text = ".".join(map(str, path))
            texts.append(f"{text}: {error['msg']}"[:MAX_ERROR] if text else error["msg"])
        more = f"; and {len(texts) - MAX_ERRORS} more" if len(texts) > MAX_ERRORS else ""
        return "; ".join(texts[:MAX_ERRORS]) + more

    def to_json(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return validated arguments as values that Django's JSON encoder writes.

        Raises:
            Violation: a value has none, or an object has attributes of other types.
        """
        hinted = {name: value for name, value in arguments.items() if name in self._names}
        try:
            dumped = self._adapter.dump_python(
                hinted, by_alias=True, round_trip=True, warnings="error"
            )
            return {**arguments, **_plain(dumped)}
        except ValueError as exc:  # pydantic's, or Django's for a time with a time zone
            text = str(exc).replace("Pydantic serializer warnings:\n", "")
            raise Violation(" ".join(text.split())[: MAX_ERRORS * MAX_ERROR]) from exc


def evaluated(annotation: Any, target: Any) -> Any:
    """Return the type of an annotation of a callable's parameter, with its metadata.

    Raises:
        Exception: any, since an annotation is code.
    """
    function = function_of(target)
    return get_type_hints(
        types.SimpleNamespace(__annotations__={"it": annotation}),
        getattr(function, "__globals__", {}),
        {parameter.__name__: parameter for parameter in getattr(function, "__type_params__", ())},
        include_extras=True,
    )["it"]


def is_unpack(hint: Any) -> bool:
    """Return True for ``Unpack[…]``, of which there are two until Python 3.11."""
    return str(get_origin(hint)).rpartition(".")[2] == "Unpack"


def function_of(target: Any) -> Any:
    """Return the function whose module has the names of the hints of a callable."""
    target = inspect.unwrap(target)
    if isinstance(target, partial):
        return function_of(target.func)
    if inspect.isclass(target):
        return getattr(target, "run", target.__init__)
    if not inspect.isroutine(target):
        return function_of(type(target).__call__)
    return target


def _plain(value: Any) -> Any:
    """Return a value without the types that Django's JSON encoder does not write."""
    kind = type(value)
    if kind in _WRITTEN:
        return value
    if isinstance(value, dict):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(map(_plain, value))
    if isinstance(value, Enum):
        return _plain(value.value)
    try:
        return _ENCODER.default(value)
    except TypeError:
        from pydantic_core import to_jsonable_python

        return to_jsonable_python(value)


_WRITTEN: Final = frozenset({str, int, float, bool, type(None)})


def _key(key: Any) -> Any:
    return key if type(key) is str else _plain(key)


# -- attrs --------------------------------------------------------------------------------


def bridged(hint: Any) -> Any:
    """Return a hint whose attrs classes pydantic understands.

    It finds them as the hint itself, in its arguments (``list[Line]``, ``Line | None``), and in
    the fields of other attrs classes.
    """
    if inspect.isclass(hint) and hasattr(hint, "__attrs_attrs__"):
        from pydantic import GetPydanticSchema

        return Annotated[hint, GetPydanticSchema(_attrs_schema)]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(bridged(arguments[0]), *hint.__metadata__)]
    inner = tuple(map(bridged, arguments))
    if origin is Literal or inner == arguments:
        return hint
    if origin in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007 - a tuple
    return origin[inner]


def _attrs_schema(cls: Any, handler: Any) -> Any:
    """Return pydantic's schema of an attrs class, from its fields and back to them."""
    from typing import NotRequired

    from attr import NOTHING
    from pydantic_core import core_schema
    from typing_extensions import TypedDict

    hints = get_type_hints(cls, include_extras=True)
    fields = [field for field in cls.__attrs_attrs__ if field.init]
    given: dict[str, Any] = {}
    for field in fields:
        hint = bridged(hints.get(field.name, Any))
        given[field.alias] = hint if field.default is NOTHING else NotRequired[hint]
    typed_dict: Any = TypedDict
    fields_schema = handler.generate_schema(typed_dict(cls.__name__, given))

    def values(item: Any) -> Any:
        if not isinstance(item, cls):
            return item
        return {field.alias: getattr(item, field.name) for field in fields}

    def made(values: dict[str, Any]) -> Any:
        try:
            return cls(**values)
        except TypeError as exc:  # of attrs.validators.instance_of, for which pydantic has no place
            raise ValueError(exc) from exc

    return core_schema.no_info_before_validator_function(
        values,
        core_schema.no_info_after_validator_function(made, fields_schema),
        serialization=core_schema.wrap_serializer_function_ser_schema(
            lambda item, serialize: serialize(values(item)), schema=fields_schema
        ),
    )
