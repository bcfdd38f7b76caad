"""Read the marked texts and the catalogues without gettext's programs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from gettext import GNUTranslations
from pathlib import Path

from django.utils.translation.template import templatize

import django_amqp_events

PACKAGE = Path(django_amqp_events.__file__).parent
LANGUAGES = ("de", "ru")
#: Which arguments of a function are context, text and plural.
FUNCTIONS = {
    "gettext": (None, 0, None),
    "ngettext": (None, 0, 1),
    "pgettext": (0, 1, None),
    "npgettext": (0, 1, 2),
}
_LITERAL = r"""(?:u?'(?:[^'\\]|\\.)*'|u?"(?:[^"\\]|\\.)*")"""
_CALL = re.compile(rf"\b(_|n?p?gettext)\(({_LITERAL}(?:,\s*{_LITERAL})*)")
#: Context, text, plural.
Key = tuple[str | None, str, str | None]


def path(language: str, suffix: str) -> Path:
    return PACKAGE / "locale" / language / "LC_MESSAGES" / f"django.{suffix}"


def translations(language: str) -> dict[str | tuple[str, int], str]:
    """Read the compiled catalogue as Python's gettext has it; the text of "" is the header."""
    with path(language, "mo").open("rb") as file:
        found = GNUTranslations(file)
    catalogue: dict[str | tuple[str, int], str] = vars(found)["_catalog"]
    return catalogue


def names(key: Key, plurals: int) -> list[str | tuple[str, int]]:
    """Return the names of a text's forms in a catalogue."""
    context, text, plural = key
    name = text if context is None else f"{context}\x04{text}"
    return [name] if plural is None else [(name, number) for number in range(plurals)]


def marked() -> dict[Key, str]:
    """Return every text of the package that is marked for translation, and a file that has it."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for key in _of_python(file.read_text(encoding="utf-8")):
            found[key] = file.name
    for file in sorted(PACKAGE.rglob("*.html")):
        for key in _of_template(file.read_text(encoding="utf-8")):
            found[key] = file.name
    return found


def _of_python(source: str) -> Iterator[Key]:
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "django.utils.translation"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function = names.get(node.func.id, "").removesuffix("_lazy").removesuffix("_noop")
            if function in FUNCTIONS:
                texts = [
                    each.value
                    for each in node.args
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                ]
                # A variable: a text that is marked elsewhere.
                if texts:
                    yield _key(function, texts)


def _of_template(source: str) -> Iterator[Key]:
    # Django's own way to show a template to xgettext: what is no message is X.
    for call in _CALL.finditer(templatize(source)):
        texts = [ast.literal_eval(each) for each in re.findall(_LITERAL, call[2])]
        yield _key("gettext" if call[1] == "_" else call[1], texts)


def _key(function: str, texts: list[str]) -> Key:
    context, text, plural = FUNCTIONS[function]
    return (
        None if context is None else texts[context],
        texts[text],
        None if plural is None else texts[plural],
    )
