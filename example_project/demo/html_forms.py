"""Pages as a person reads them: forms to fill in, links to follow, what the page says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import urljoin

#: Elements without content, and so without an end tag.
VOID = frozenset(
    "area base br col embed hr img input link meta param source track wbr".split()  # noqa: SIM905
)
#: Kinds of input that are not sent unless they are pressed or filled in.
SILENT = frozenset({"submit", "button", "reset", "image", "file"})


@dataclass(slots=True)
class Element:
    """An element with what is in it, texts and elements, in their order."""

    tag: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    inside: list[Element | str] = field(default_factory=list)

    def get(self, name: str) -> str:
        return self.attributes.get(name, "")

    @property
    def classes(self) -> list[str]:
        return self.get("class").split()

    def all(self, *tags: str) -> Iterator[Element]:
        """Yield the elements below this one, those of some tags or all."""
        for each in self.inside:
            if isinstance(each, Element):
                if not tags or each.tag in tags:
                    yield each
                yield from each.all(*tags)

    @property
    def text(self) -> str:
        texts = (each if isinstance(each, str) else each.text for each in self.inside)
        return " ".join("".join(texts).split())


class Page:
    """An HTML page that came from *url*."""

    def __init__(self, url: str, html: str) -> None:
        self.url = url
        self.root = parse(html)
        self.title = next((each.text for each in self.root.all("title")), "")

    @property
    def forms(self) -> list[Form]:
        return [Form(self, each) for each in self.root.all("form")]

    @property
    def links(self) -> list[tuple[str, str]]:
        """Addresses and texts."""
        found = [each for each in self.root.all("a") if each.get("href")]
        return [(urljoin(self.url, each.get("href")), each.text) for each in found]

    @property
    def messages(self) -> list[str]:
        """What the last step came to."""
        return [li.text for ul in self._lists("messagelist") for li in ul.all("li")]

    @property
    def errors(self) -> list[str]:
        notes = [each.text for each in self.root.all() if "errornote" in each.classes]
        return notes + [li.text for ul in self._lists("errorlist") for li in ul.all("li")]

    def _lists(self, name: str) -> Iterator[Element]:
        return (each for each in self.root.all("ul") if name in each.classes)


class Form:
    """A form, and what a browser would send of it."""

    def __init__(self, page: Page, element: Element) -> None:
        self.element = element
        # A form without an action goes where its page came from.
        self.action = urljoin(page.url, element.get("action")) or page.url
        self.method = element.get("method").lower() or "get"

    @property
    def controls(self) -> list[Element]:
        return list(self.element.all("input", "select", "textarea", "button"))

    @property
    def buttons(self) -> list[Element]:
        return [
            each
            for each in self.controls
            if (each.tag == "button" and each.get("type") in ("", "submit"))
            or (each.tag == "input" and each.get("type") == "submit")
        ]

    def named(self, name: str) -> list[Element]:
        return [each for each in self.controls if each.get("name") == name]

    def options(self, name: str) -> dict[str, str]:
        """Return the values and labels of a select."""
        found = (option for each in self.named(name) for option in each.all("option"))
        return {option.get("value"): option.text for option in found}

    def data(
        self, filled: Mapping[str, str | list[str]], button: Element | None
    ) -> list[tuple[str, str]]:
        """Return names and values: what is *filled* in, and the rest as it is."""
        pairs = []
        for each in self.controls:
            name = each.get("name")
            if name and name not in filled and "disabled" not in each.attributes:
                pairs += [(name, value) for value in _values(each)]
        for name, given in filled.items():
            pairs += [(name, value) for value in ([given] if isinstance(given, str) else given)]
        if button is not None and button.get("name"):
            pairs.append((button.get("name"), button.get("value")))
        return pairs


def _values(control: Element) -> list[str]:
    kind = control.get("type").lower()
    if control.tag == "button" or kind in SILENT:
        return []
    if control.tag == "select":
        options = list(control.all("option"))
        chosen = [each for each in options if "selected" in each.attributes]
        return [each.get("value") for each in chosen or options[:1]]
    if control.tag == "textarea":
        return ["".join(each for each in control.inside if isinstance(each, str))]
    if kind in ("checkbox", "radio") and "checked" not in control.attributes:
        return []
    return [control.attributes.get("value", "on" if kind in ("checkbox", "radio") else "")]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        # Whatever was not ended inside of it ends with it.
        if any(each.tag == tag for each in self.open):
            while self.open.pop().tag != tag:
                pass

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def parse(html: str) -> Element:
    parser = _Parser()
    parser.feed(html)
    parser.close()
    return parser.open[0]
