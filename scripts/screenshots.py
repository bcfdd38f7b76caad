#!/usr/bin/env python3
"""Take screenshots of the console: light and dark, 1280 and 390 pixels wide.

    .venv/bin/python scripts/screenshots.py [name ...]    # into .run/screenshots
    .venv/bin/python scripts/screenshots.py --docs        # those of docs/images

Those of a backfill show a real run: STORY_PICTURES=docs/images with tests/browser/test_story.py.

Serves the project of tests/browser/web.py, with events of every kind and real replays, from a
private RabbitMQ. A warning in the browser's console is an error; the pages are served under a
strict Content-Security-Policy.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from broker import Node  # noqa: E402
from chromium import Chromium  # noqa: E402
from machine import ScriptError, exit_with  # noqa: E402
from tests.browser.console import PAGES, Console, go, serving  # noqa: E402

TARGET = ROOT / ".run" / "screenshots"
IMAGES = ROOT / "docs" / "images"
#: The pages of docs/images, and the height shown of each at 1280 and at 390 pixels.
DOCS = {
    "list": (640, 0), "event": (1190, 1000), "confirm": (1060, 0), "groups": (640, 0),
    "group": (800, 0), "batch-draft": (1280, 0), "batch-running": (900, 900), "review": (930, 0),
    "dashboard": (1500, 1000), "find": (900, 0), "topology": (900, 0),
}  # fmt: skip
SCALE = 0.75
LIMIT = 150 * 1024


def main() -> int:
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as directory:
        where = Path(directory)
        node = Node.start(where / "rabbit")
        try:
            with (
                serving(node.amqp_url(), node.management_url, where) as console,
                Chromium() as browser,
            ):
                browser.log_in(console.url, console.session)
                if sys.argv[1:] == ["--docs"]:
                    return for_docs(browser, console)
                return for_review(browser, console, sys.argv[1:])
        finally:
            node.end()


def for_docs(browser: Chromium, console: Console) -> int:
    for theme, width in (("light", 1280), ("dark", 1280), ("dark", 390)):
        browser.look(theme, width)
        for name, heights in DOCS.items():
            if height := heights[width == 390]:
                go(browser, console, name)
                target = IMAGES / f"{name}-{theme}-{width}.webp"
                browser.photograph(target, scale=SCALE if width > 390 else 1, height=height)
                size = target.stat().st_size
                print(f"{target.relative_to(ROOT)} {size // 1024} kB")
                if size > LIMIT:
                    raise ScriptError(f"{target.name} is larger than {LIMIT // 1024} kB: cut it.")
    return 0


def for_review(browser: Chromium, console: Console, wanted: list[str]) -> int:
    complaints: list[str] = []
    for name in wanted or PAGES:
        for theme, width in (("light", 1280), ("light", 390), ("dark", 1280), ("dark", 390)):
            browser.look(theme, width)
            go(browser, console, name)
            target = TARGET / f"{name}-{theme}-{width}.png"
            browser.photograph(target)
            print(target.relative_to(ROOT))
            complaints += (f"{target.name}: {each}" for each in browser.complaints())
    if complaints:
        raise ScriptError("\n".join(complaints))
    return 0


if __name__ == "__main__":
    exit_with(main)
