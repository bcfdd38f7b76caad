"""The roles of the admin's users, as docs/admin.md has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_ROW: Final = re.compile(r"^\| \*(\w+)\* \| (.*) \|$", re.MULTILINE)


def roles() -> dict[str, set[str]]:
    """Return the codenames of each role's permissions; each has also those of the roles before."""
    page = (Path(__file__).parent.parent / "docs" / "admin.md").read_text()
    found, allowed = {}, set[str]()
    for role, cell in _ROW.findall(page):
        allowed |= set(re.findall(r"`(\w+)`", cell))
        found[role] = set(allowed)
    return found
