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
from tests.browser.console import PAGES, Console, go, serving  # noqa: E402

TARGET = ROOT / ".run" / "screenshots"
IMAGES = ROOT / "docs" / "images"
LOOKS = [(theme, width) for theme in ("light", "dark") for width in (1280, 390)]


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
                serving(node.amqp_url(vhost), node.management_url or "", Path(directory)) as console,
                Chromium() as browser,
            ):
                return shoot(browser, console, [] if docs else sys.argv[1:])
        finally:
            node.delete_vhost(vhost)
            if isinstance(node, Node):
                node.end()


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
