"""The process of web.py, and the browser's tools: where the pages are, and axe-core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker import free_ports
from chromium import Chromium

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Console:
    """A project that is served.

    Attributes:
        pages: address of each page by its name.
    """

    def __init__(self, url: str, pages: dict[str, str]) -> None:
        self.url = url
        self.session = pages.pop("session")
        self.pages = {name: f"{url}{path}" for name, path in pages.items()}
        #: All that :func:`go` opens; what changes something comes last.
        self.names = [*self.pages, "review", "result"]


@contextmanager
def serving(broker_url: str, management_url: str, where: Path, site: str = "admin") -> Iterator[Console]:
    """Serve for a block; the process is gone at its end."""
    (port,) = free_ports(1)
    log = where / f"console-{site}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.browser.web", str(port)],
            cwd=ROOT,
            env={
                **{k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"},
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts"), *sys.path]),
                "CONSOLE_BROKER": broker_url,
                "CONSOLE_MANAGEMENT": management_url,
                "CONSOLE_DATABASE": str(where / f"console-{site}.sqlite3"),
                "CONSOLE_SITE": site,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # ends when the process does
        if not line:
            raise RuntimeError(f"the console did not start:\n{log.read_text()[-4000:]}")
        yield Console(f"http://127.0.0.1:{port}", json.loads(line))
    finally:
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def go(browser: Chromium, console: Console, name: str) -> None:
    """Open a page, some of them by a form."""
    if name == "review":
        browser.open(console.pages["edit"])
        editor = browser.find("textarea.ae-editor")
        browser.run("arguments[0].value = arguments[0].value.replace('XX', 'AT')", editor)
        browser.find("button[value=review]").click()
        browser.until(lambda: browser.all(".ae-diff"), "the diff")
    elif name == "result":
        browser.open(console.pages["discard"])
        browser.find("textarea").send_keys("the orders were placed twice")
        browser.find("input[type=submit].default").click()
        browser.until(lambda: browser.all("ul.messagelist"), "a message")
    else:
        browser.open(console.pages[name])
