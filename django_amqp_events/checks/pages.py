"""The page of the documentation that each hint names."""

from __future__ import annotations

from typing import Final

#: Of codes that no other page is about; it has a row for each code.
DEFAULT: Final = "checks"
#: Codes by the page that explains them.
_CODES: Final = {
    "archive": "E023 W008 W013",
    "alerts": "W060",
    "console": "I001",
    "consumer-timeout": "E042 W026",
    "contracts": "E011 E022 E080 E081",
    "databases": "E021 E026 E028 E029 E030 E041 W014 W019 W024 W028",
    "deployment": "W020",
    "editing": "E070",
    "getting-started": "E001 E017 E018 W001 W003 W012",
    "handling": "E006 E008 E010 E012 E013 E014",
    "metrics": "E090",
    "modes": "E025 W017",
    "pools": "E019 W006 W007",
    "redis": "E016 E027 W016",
    "retries": "E009 E040 W040",
    "search-values": "W070",
    "settings": "E002 E003 E004 E007 W010 W018 W022 W023",
    "testing": "W004 W021",
    "topology": "E005 E020 W009 W011",
    "tutorial": "E015",
    "upgrades": "E031",
}
PAGES: Final = {code: page for page, codes in _CODES.items() for code in codes.split()}


def with_page(code: str, hint: str) -> str:
    """Return a hint that ends with its page, relative to the repository."""
    page = f"docs/{PAGES.get(code, DEFAULT)}.md"
    return hint if page in hint else f"{hint} See {page}."
