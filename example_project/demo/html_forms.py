"""HTML pages as a browser reads them: forms to fill in, links, messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from urllib.parse import urljoin
from xml.etree.ElementTree import Element, SubElement

#: Elements that have no content and no end tag.
VOID = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "wbr")
)
#: Inputs that a form sends only if they are clicked or filled in.
SILENT = frozenset(("submit", "button", "reset", "image", "file"))


class Page:
    """An HTML page from *url*."""

    def __init__(self, url: str, html: str) -> None:
        self.url = url
        self.root = parse(html)
        self.title = next(map(text_of, self.root.iter("title")), "")

    @property
    def forms(self) -> list[Form]:
        return [Form(self, each) for each in self.root.iter("form")]

    @property
    def links(self) -> list[tuple[str, str]]:
        """Addresses and texts."""
        return [
            (urljoin(self.url, href), text_of(each))
            for each in self.root.iter("a")
            if (href := each.get("href"))
        ]

    @property
    def messages(self) -> list[str]:
        """What Django's messages say about the last action."""
        return self._items("messagelist")

    @property
    def errors(self) -> list[str]:
        notes = (each for each in self.root.iter() if "errornote" in each.get("class", "").split())
        return [*map(text_of, notes), *self._items("errorlist")]

    def _items(self, name: str) -> list[str]:
        lists = (each for each in self.root.iter("ul") if name in each.get("class", "").split())
        return [text_of(item) for each in lists for item in each.iter("li")]


class Form:
    """A form, and the data that a browser would send."""

    def __init__(self, page: Page, element: Element) -> None:
        # A form without an action is sent to its page.
        self.action = urljoin(page.url, element.get("action", "")) or page.url
        self.method = element.get("method", "get").lower()
        kinds = ("input", "select", "textarea", "button")
        self.controls = [each for each in element.iter() if each.tag in kinds]

    @property
    def buttons(self) -> list[Element]:
        kinds = {"button": ("", "submit"), "input": ("submit",)}
        return [each for each in self.controls if each.get("type", "") in kinds.get(each.tag, ())]

    def named(self, name: str) -> list[Element]:
        return [each for each in self.controls if each.get("name") == name]

    def options(self, name: str) -> dict[str, str]:
        """Return the values and labels of a select."""
        found = (option for each in self.named(name) for option in each.iter("option"))
        return {option.get("value", ""): text_of(option) for option in found}

    def data(
        self, filled: Mapping[str, str | list[str]], button: Element | None
    ) -> list[tuple[str, str]]:
        """Return names and values, with *filled* in place of what the page has."""
        pairs = []
        for each in self.controls:
            name = each.get("name")
            if name and name not in filled and "disabled" not in each.attrib:
                pairs += [(name, value) for value in _values(each)]
        for name, given in filled.items():
            pairs += [(name, value) for value in ([given] if isinstance(given, str) else given)]
        if button is not None and (name := button.get("name")):
            pairs.append((name, button.get("value", "")))
        return pairs


def _values(control: Element) -> Iterator[str]:
    kind = control.get("type", "").lower()
    if control.tag == "select":
        options = list(control.iter("option"))
        chosen = [each for each in options if "selected" in each.attrib]
        yield from (each.get("value", "") for each in chosen or options[:1])
    elif control.tag == "textarea":
        yield control.text or ""
    elif kind in ("checkbox", "radio"):
        if "checked" in control.attrib:
            yield control.get("value", "on")
    elif control.tag == "input" and kind not in SILENT:
        yield control.get("value", "")


def text_of(element: Element) -> str:
    """Return an element's text, with single spaces."""
    return " ".join("".join(element.itertext()).split())


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("page")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = SubElement(self.open[-1], tag, {name: value or "" for name, value in attrs})
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        # An end tag also ends the elements inside that have none.
        if any(each.tag == tag for each in self.open):
            while self.open.pop().tag != tag:
                pass

    def handle_data(self, data: str) -> None:
        parent = self.open[-1]
        if len(parent):
            parent[-1].tail = (parent[-1].tail or "") + data
        else:
            parent.text = (parent.text or "") + data


def parse(html: str) -> Element:
    parser = _Parser()
    parser.feed(html)
    parser.close()
    return parser.open[0]
