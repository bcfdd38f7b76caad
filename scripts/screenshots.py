#!/usr/bin/env python3
"""Screenshots of the console: light and dark, 1280 and 390 pixels wide.

    .venv/bin/python scripts/screenshots.py [name ...]
    .venv/bin/python scripts/screenshots.py --docs    # those of docs/images

A private RabbitMQ and the project of tests/browser/web.py, with events of every kind and replays
that really are published, in a headless Chromium. Images go to .run/screenshots. What the browser
complains about is printed, and is an error; the pages are served under a strict
Content-Security-Policy.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from broker import Broker, Node  # noqa: E402
from chromium import Chromium  # noqa: E402
from tests.browser.console import (  # noqa: E402
    PAGES,
    Console,
    go,
    serving,
)

TARGET = ROOT / ".run" / "screenshots"
IMAGES = ROOT / "docs" / "images"
LOOKS = [(theme, width) for theme in ("light", "dark") for width in (1280, 390)]


#: Those of docs/images, which are smaller: how much of each is shown at 1280 and at 390 pixels.
DOCS = {
    "list": (640, 0), "event": (1190, 1000), "confirm": (1060, 0), "groups": (640, 0),
    "group": (800, 0), "batch-draft": (1280, 0), "batch-running": (900, 900), "review": (930, 0),
    "dashboard": (1500, 1000), "topology": (900, 0),
}  # fmt: skip
SCALE = 0.75
LIMIT = 150 * 1024


def main() -> int:
    docs = sys.argv[1:] == ["--docs"]
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as directory:
        node: Broker
        if url := os.environ.get("AMQP_URL"):
            node = Broker.from_urls(url, os.environ.get("AMQP_MANAGEMENT_URL"))
        else:
            node = Node.start(Path(directory) / "rabbit")
        vhost = f"screenshots-{os.getpid()}"
        try:
            node.add_vhost(vhost)
            with (
                serving(
                    node.amqp_url(vhost), node.management_url or "", Path(directory)
                ) as console,
                Chromium() as browser,
            ):
                return (for_docs if docs else shoot)(browser, console, sys.argv[1:])
        finally:
            node.delete_vhost(vhost)
            if isinstance(node, Node):
                node.end()


def for_docs(browser: Chromium, console: Console, _: list[str]) -> int:
    """Light and dark where it is wide, and dark where it is narrow, as it is read at night."""
    browser.log_in(console.url, console.session)
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
                    sys.exit(f"{target.name} is larger than {LIMIT // 1024} kB: show less of it")
    return 0


def shoot(browser: Chromium, console: Console, wanted: list[str]) -> int:
    browser.log_in(console.url, console.session)
    problems = 0
    for name in wanted or PAGES:
        for theme, width in LOOKS:
            browser.look(theme, width)
            go(browser, console, name)
            target = TARGET / f"{name}-{theme}-{width}.png"
            browser.photograph(target)
            print(target.relative_to(ROOT))
            for complaint in browser.complaints():
                print(f"  {complaint}", file=sys.stderr)
                problems += 1
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
