"""Which of several events is the newest of its thing, such as of one order. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from .declarations import readable_signature

#: Versions are stored in columns of 64 bits, whose lowest value means "none yet".
LIMIT: Final = 2**63
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a thing that an event has.

    Attributes:
        thing: the value that names it.
        number: greater for a newer event: the integer, or microseconds since 1970 of the time.
        is_time: whether the event has a time.
    """

    thing: str
    number: int
    is_time: bool


def read(paths: tuple[str, str], payload: Mapping[str, Any]) -> Version:
    """Return the version in a payload.

    Args:
        paths: to the value that names the thing, and to its version: an integer, or a time as ISO
            8601 writes it, which is in UTC if it has no offset.

    Raises:
        ValueError: the payload has none; the text says why.
    """
    thing, version = (_value(path, payload) for path in paths)
    if isinstance(thing, bool) or not isinstance(thing, (int, str)) or thing == "":
        raise ValueError(f"{paths[0]!r} is {thing!r:.80}, and must be an integer or a text")
    if isinstance(version, int) and not isinstance(version, bool):
        if abs(version) >= LIMIT:
            raise ValueError(f"{paths[1]!r} is {version}, which has more than 64 bits")
        return Version(str(thing), version, is_time=False)
    try:
        moment = datetime.fromisoformat(version)
    except (TypeError, ValueError):
        raise ValueError(
            f"{paths[1]!r} is {version!r:.80}, and must be an integer or a time in ISO format"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return Version(str(thing), (moment - _EPOCH) // timedelta(microseconds=1), is_time=True)


def _value(path: str, payload: Mapping[str, Any]) -> Any:
    value: Any = payload
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"the payload has no {path!r}")
        value = value[key]
    return value


def contract_problem(paths: tuple[str, str], contract: Callable[..., Any]) -> str:
    """Return why events of a contract have no version at *paths*, ``""`` if they may have one."""
    signature = readable_signature(contract)
    if signature is None:
        return ""
    parameters = signature.parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return ""
    for path in paths:
        if path.partition(".")[0] not in parameters:
            return f"has no argument {path.partition('.')[0]!r}"
    return ""
