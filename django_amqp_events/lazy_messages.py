"""Sentences that know their own translation: English for logs, commands and rows, else on pages.

Whoever says why an event is left alone does not know who reads it. The answer is a ``str``, and
English: it is logged, printed and stored as any other. A page asks :func:`told` for it in the
language of whoever looks.
"""

from __future__ import annotations

from typing import Any, Self

from django.utils.translation import gettext, override


class Sentence(str):
    """A text in English that can be said in the language of the moment.

    Whatever is made of it (a slice, an f-string, a row read back) is English and nothing else.

    Args:
        template: what ``gettext_noop`` returned; with named placeholders (``%(name)s``) where
            there are values.
        values: may be sentences, or lazy texts, themselves.
    """

    __slots__ = ("template", "values")

    template: str
    values: dict[str, object]

    def __new__(cls, template: str, **values: object) -> Self:
        with override(None):
            made = super().__new__(cls, template % values if values else template)
        made.template, made.values = template, values
        return made

    def __str__(self) -> str:
        # An exception's str() then is the sentence that it was raised with.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self[:],)


def told(text: str) -> str:
    """Say a sentence in the language of the moment; other texts are returned as they are."""
    if not isinstance(text, Sentence):
        return text
    found = gettext(text.template)
    values = {
        name: told(value) if isinstance(value, str) else value
        for name, value in text.values.items()
    }
    return found % values if values else found


def stored(text: str) -> str:
    """Translate a text of a row, where it is one of ours without a name or number in it."""
    return gettext(text) if text else ""
