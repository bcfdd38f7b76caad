"""Valid values of settings and handler options.

A reader returns a value as the program uses it, and raises :class:`Invalid` if it is not valid.
Each field of the dataclasses in :mod:`~django_amqp_events.conf` has one, and so has each handler
option in :data:`HANDLER_OPTIONS`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Final, Literal, TypedDict, get_args

#: Upper limit of seconds, bytes and lengths: AMQP's integers and Python's dates end there.
MAX: Final = 2**31
#: Longest time to live of a message in seconds, as RabbitMQ takes it: ten years.
LONGEST_TTL: Final = 315_360_000

Reader = Callable[[Any], Any]
_DEFAULT: Final = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """An error or a risk in settings or declarations.

    Attributes:
        code: ``E…`` if events cannot work, ``W…`` if they are at risk, ``I…`` otherwise; the id of
            the system check without its prefix.
        what: what is wrong; after *place*, if that is given.
        hint: what to write or do instead.
        place: of which setting or declaration the options are.
    """

    code: str
    what: str
    hint: str
    place: str = ""

    @property
    def message(self) -> str:
        return f"{self.place}{self.what}"

    @property
    def is_error(self) -> bool:
        return self.code.startswith("E")


class Invalid(Exception):
    """A value is not valid; the text names the values that are.

    Attributes:
        instead: the value to use instead of the option's default.
    """

    def __init__(self, valid: str, instead: object = _DEFAULT) -> None:
        super().__init__(valid)
        self.instead = instead


# -- readers ------------------------------------------------------------------------------


def accept(test: Callable[[Any], bool], valid: str) -> Reader:
    """Return a reader of the values that pass *test*, described by *valid*."""

    def read(value: Any) -> Any:
        if not test(value):
            raise Invalid(valid)
        return value

    return read


def optional(read: Reader) -> Reader:
    """Return a reader that takes ``None`` as well."""

    def read_optional(value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except Invalid as exc:
            raise Invalid(f"{exc}, or None") from None

    return read_optional


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)


boolean: Final = accept(lambda value: isinstance(value, bool), "True or False")
string: Final = accept(lambda value: isinstance(value, str), "a string")
#: Read by the registry, which needs more than the value to check it.
unchecked: Final = accept(lambda _: True, "")


def choice(*names: str) -> Reader:
    return accept(lambda value: value in names, f"one of {', '.join(map(repr, names))}")


def count(unit: str) -> Reader:
    return accept(
        lambda value: _is_integer(value) and 0 < value < MAX,
        f"a whole number of {unit} above 0",
    )


def mapping(valid: str) -> Reader:
    return accept(lambda value: isinstance(value, Mapping), valid)


def seconds(value: Any) -> float:
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if not _is_number(number) or not 0 < number < MAX:
        raise Invalid("a positive number of seconds or a timedelta")
    return float(number)


_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_BYTES: Final = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE: Final = re.compile(r"(\d+) ?(|kb|mb|gb|tb)")


def parse_age(text: str) -> float | None:
    """Return an age such as ``90s`` or ``1d12h`` in seconds, ``None`` if *text* is not one."""
    cleaned = text.strip().lower()
    if not cleaned or _AGE.sub("", cleaned):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _AGE.findall(cleaned))


def age(value: Any) -> float:
    number = seconds(parse_age(value) if isinstance(value, str) else value)
    if number < 1:
        raise Invalid("an age of at least a second, such as 3600, '90s' or '14d'")
    return number


def size(value: Any) -> int:
    matched = _SIZE.fullmatch(str(value).strip().lower()) if value is not True else None
    number = int(matched[1]) * _BYTES[matched[2]] if matched else 0
    if not 10**6 <= number < 2**63:
        raise Invalid("a number of bytes from 1000000, such as 20000000000 or '20GB'")
    return number


def _whole_seconds(minimum: int) -> Reader:
    def read(value: Any) -> int:
        # Booleans too: retry_backoff=True is 1, as in Celery.
        number = isinstance(value, (int, float)) and minimum <= value <= LONGEST_TTL
        if number and value == int(value):
            return int(value)
        raise Invalid(
            f"a whole number of seconds from {minimum} to {LONGEST_TTL} (ten years); each delay "
            f"has its own queue"
        )

    return read


def has_control_characters(text: str) -> bool:
    """Return True if a text has control characters or lone surrogates."""
    return any(ord(char) < 32 or "\ud800" <= char <= "\udfff" for char in text)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the items of a list, or a single item as the only one; so is what can be read once."""
    single = isinstance(value, (str, type, Iterator)) or not isinstance(value, Iterable)
    return (value,) if single else tuple(value)


def _exceptions(value: Any) -> tuple[type[BaseException], ...]:
    classes = as_tuple(value)
    if not all(isinstance(item, type) and issubclass(item, BaseException) for item in classes):
        raise Invalid("a list of exception classes")
    return classes


def _search_paths(value: Any) -> tuple[str, ...]:
    paths = as_tuple(value)
    known = {path for path in paths if isinstance(path, str) and is_path(path)}
    if len(known) < len(paths):
        raise Invalid(
            "a list of different paths such as 'order_id' or 'customer.email': keys of the payload "
            "separated by dots, without spaces, = and *"
        )
    return paths


def _newest(value: Any) -> tuple[str, str] | None:
    if value is None:
        return None
    paths = as_tuple(value)
    if len(paths) != 2 or not all(isinstance(path, str) and is_path(path) for path in paths):
        raise Invalid(
            "two paths of the payload: to the value that names the thing, and to its version, such "
            "as ('order_id', 'version')"
        )
    return paths[0], paths[1]


def is_path(text: str) -> bool:
    """Return True if a text can be the path of a search value."""
    path = re.fullmatch(r"[^ .=*]+(\.[^ .=*]+)*", text)
    return path is not None and text.isprintable() and len(text) <= 255


def _is_rate_limit(value: object) -> bool:
    """Return True if Celery accepts *value* as a rate limit (celery.utils.time.rate)."""
    if isinstance(value, str):
        number, _, unit = value.partition("/")
        return unit in ("", "s", "m", "h") and re.fullmatch(r"\d+(\.\d+)?", number) is not None
    return _is_number(value) and 0 <= value < MAX  # type: ignore[operator]


# -- options ------------------------------------------------------------------------------


POLICY_OPTIONS: Final[Mapping[str, Reader]] = {
    "max_retries": optional(
        accept(
            lambda value: _is_integer(value) and 0 <= value < MAX,
            f"a whole number from 0 to {MAX - 1}",
        )
    ),
    "retry_backoff": _whole_seconds(0),
    "retry_backoff_max": _whole_seconds(1),
    "retry_jitter": boolean,
    "default_retry_delay": _whole_seconds(1),
    "autoretry_for": _exceptions,
    "dont_autoretry_for": _exceptions,
}
_time_limit: Final = accept(
    lambda value: _is_number(value) and 0 < value < MAX, "a number of seconds above 0"
)
TASK_OPTIONS: Final[Mapping[str, Reader]] = {
    "time_limit": optional(_time_limit),
    "soft_time_limit": optional(_time_limit),
    "rate_limit": optional(
        accept(
            _is_rate_limit, "a number per second, or a string such as '10/s', '100/m' or '1000/h'"
        )
    ),
    "ignore_result": boolean,
}
#: Options that ``DEFAULTS`` may have too. Settings write the names in upper case.
DEFAULT_OPTIONS: Final[Mapping[str, Reader]] = {
    **POLICY_OPTIONS,
    **TASK_OPTIONS,
    "queue": unchecked,
    "strict": boolean,
    "once": boolean,
    "using": string,
}
HANDLER_OPTIONS: Final[Mapping[str, Reader]] = {
    **DEFAULT_OPTIONS,
    "events": unchecked,
    "handler": unchecked,
    "enabled": boolean,
    "bind": boolean,
    "validate": boolean,
    "newest": _newest,
}
#: The formats in which an event can be published; docs/message-format.md describes them.
Format = Literal["celery", "cloudevents", "json"]
EVENT_OPTIONS: Final[Mapping[str, Reader]] = {
    "format": choice(*get_args(Format)),
    "validate": boolean,
    "publisher": string,
    "search": _search_paths,
}

_Exceptions = str | type[BaseException] | Iterable[str | type[BaseException]]


class HandlerWords(TypedDict, total=False):
    """The options of ``@handler``, for type checkers and editors; docs/settings.md explains them.

    They are those of :data:`HANDLER_OPTIONS` without ``events`` and ``handler``.
    """

    max_retries: int | None
    retry_backoff: int
    retry_backoff_max: int
    retry_jitter: bool
    default_retry_delay: int
    autoretry_for: _Exceptions
    dont_autoretry_for: _Exceptions
    time_limit: float | None
    soft_time_limit: float | None
    rate_limit: str | float | None
    ignore_result: bool
    queue: str
    strict: bool
    once: bool
    using: str
    enabled: bool
    bind: bool
    validate: bool
    newest: tuple[str, str] | None


def option(read: Reader, **default: Any) -> Any:
    """Return a dataclass field with a reader; *default* as for :func:`dataclasses.field`."""
    return field(metadata={"read": read}, **default)


def keys(section: type) -> dict[str, Reader]:
    """Return the readers of a dataclass of settings by key, in upper case."""
    return {key.name.upper(): key.metadata["read"] for key in fields(section)}


def read_options(
    readers: Mapping[str, Reader],
    given: Mapping[Any, Any],
    where: str,
    problems: list[Problem],
    code: str = "E003",
) -> dict[str, Any]:
    """Return the values of *given* under their names in lower case, without the defaults.

    An unknown name or an invalid value is added to *problems*, the latter under *code*.
    """
    problems.extend(unknown_option(where, key, readers) for key in given if key not in readers)
    values = {}
    for key, read in readers.items():
        if key not in given:
            continue
        try:
            values[key.lower()] = read(given[key])
        except Invalid as exc:
            name = f"[{key!r}]" if key.isupper() else f": {key}"
            what = f"{name} is {given[key]!r:.120}, which is not valid."
            problems.append(Problem(code, what, f"Use {exc}.", where))
            if exc.instead is not _DEFAULT:
                values[key.lower()] = exc.instead
    return values


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a wrong one, as the end of a message."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown_option(where: str, key: object, known: Iterable[str]) -> Problem:
    """Return the problem of an unknown key, with the nearest known one."""
    by_upper = {name.upper(): name for name in known}
    near = difflib.get_close_matches(str(key).upper(), by_upper, n=1)
    hint = f"Did you mean {by_upper[near[0]]!r}?" if near else ""
    return Problem(
        "E002",
        f" has the unknown key {key!r}.",
        hint or f"Known keys are {', '.join(sorted(by_upper.values()))}.",
        where,
    )
