"""Reasons: why something is as it is, as a code with parameters: errors, alerts, titles, notes.

The service code returns them and rows store them (:class:`~.models.base.ReasonField`); text is made
when a person reads it: in English in logs, commands and errors (:meth:`Reason.__str__`), in the
language of the request on pages (:meth:`Reason.translated`).
"""

from __future__ import annotations

import json
from typing import Any

from django.utils.formats import number_format
from django.utils.translation import override

from .reason_texts import TEXTS


class Reason:
    """A code and its parameters; two are equal if both are.

    Args:
        code: a key of :data:`.reason_texts.TEXTS`.
        params: values of the text's placeholders: texts, numbers, reasons or lists of these.
    """

    __slots__ = ("code", "params")

    def __init__(self, code: str, **params: object) -> None:
        self.code = code
        self.params = params
        TEXTS[code]

    @classmethod
    def of(cls, error: BaseException | Reason | str) -> Reason:
        """Return the reason that an error was raised with, or its own words as one."""
        if isinstance(error, BaseException):
            [error] = error.args if len(error.args) == 1 else [error]
        return error if isinstance(error, Reason) else cls("text", text=str(error))

    @classmethod
    def named(cls, kind: str, name: str) -> Reason:
        """Return the reason ``kind-name``; a name of a newer version stands for itself."""
        code = f"{kind}-{name}"
        return cls(code) if code in TEXTS else cls("text", text=name)

    @classmethod
    def from_json(cls, document: Any) -> Reason:
        """Return the reason of :meth:`as_json`; anything else stands for itself."""
        if not isinstance(document, dict):
            return cls.of(str(document))
        try:
            params = {name: _read(value) for name, value in document.items() if name != "code"}
            reason = cls(document["code"], **params)
            # The plural forms of most languages need a number.
            if isinstance(params.get("count", 0), int):
                str(reason)
                return reason
        except (KeyError, TypeError, ValueError, RecursionError):
            pass
        return cls("text", text=json.dumps(document))

    def as_json(self) -> dict[str, Any]:
        """Return code and parameters as JSON types, whatever language is active."""
        with override(None):
            return {
                "code": self.code,
                **{name: _plain(value) for name, value in self.params.items()},
            }

    def __str__(self) -> str:
        with override(None):
            return self.translated()

    def translated(self) -> str:
        """Return the text in the active language."""
        params = {name: translated(value) for name, value in self.params.items()}
        if isinstance(count := self.params.get("count"), int):
            params["count"] = Count(count)
        return str(TEXTS[self.code] % params)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reason) and self.as_json() == other.as_json()

    def __hash__(self) -> int:
        return hash(json.dumps(self.as_json(), sort_keys=True))

    def __repr__(self) -> str:
        return f"<Reason {self.code}: {self}>"


class Count(int):
    """A number that a text shows with the separators of the language."""

    def __str__(self) -> str:
        return number_format(int(self), force_grouping=True)


def translated(value: Any) -> Any:
    """Return reasons, and errors raised with one, in the active language; others as text."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(translated, value))
    if isinstance(value, BaseException):
        value = Reason.of(value)
    return value.translated() if isinstance(value, Reason) else str(value)


def _plain(value: object) -> Any:
    if isinstance(value, Reason):
        return value.as_json()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (int, float)):
        return value
    # As models.clean(): PostgreSQL stores no NUL and no lone surrogate in JSON.
    return str(value).replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    return Reason.from_json(value) if isinstance(value, dict) else value
