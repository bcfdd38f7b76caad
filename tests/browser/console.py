"""The process of web.py, and the browser's tools: where the pages are, and axe-core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from selenium.webdriver.support.ui import Select

import npm
from chromium import Chromium
from machine import free_ports
from tests import forked

#: The pages, by the names of :func:`go`; those that change data come last.
PAGES = (
    "dashboard", "find", "find-nothing", "topology", "list", "event",
    "overdue", "edited", "confirm", "discard", "force", "edit", "review", "groups", "group",
    "batches", "batch-draft", "batch-running", "batch-paused", "batch-done", "batch-events",
    "outbox", "outbox-event", "outbox-discard", "result",
)  # fmt: skip

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """A project that is served.

    Attributes:
        session: of somebody who is logged in and may do everything.
        pages: address of each page by its name.
    """

    url: str
    session: str
    pages: dict[str, str]


@contextmanager
def serving(
    broker_url: str, management_url: str, where: Path, site: str = "admin"
) -> Iterator[Console]:
    """Serve for a block, then stop the process."""
    (port,) = free_ports(1)
    log = where / f"console-{site}.log"
    with log.open("wb") as out:
        process = forked.Popen(
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
        url, pages = f"http://127.0.0.1:{port}", json.loads(line)
        session = pages.pop("session")
        yield Console(
            url=url,
            session=session,
            pages={name: f"{url}{path}" for name, path in pages.items()},
        )
    finally:
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def axe_core() -> str:
    """Return axe-core's program.

    Raises:
        ScriptError: npm is missing or failed.
    """
    packages = npm.install(HERE, "axe-core, which checks the pages of the console")
    return (packages / "axe-core" / "axe.min.js").read_text()


def go(browser: Chromium, console: Console, name: str) -> None:
    """Open a page, some of them by a form."""
    if name == "review":
        browser.open(console.pages["edit"])
        editor = browser.find("textarea.ae-editor")
        browser.run("arguments[0].value = arguments[0].value.replace('DE', 'AT')", editor)
        browser.leave_by(browser.find("button[value=review]"))
        browser.until(lambda: browser.all(".ae-diff"), "the diff")
    elif name == "result":
        browser.open(console.pages["twice"])
        browser.find("input.action-select").click()
        # django-unfold shows neither before there is something to do with it.
        action = browser.find("select[name=action]")
        browser.until(action.is_displayed, "the choice of an action")
        Select(action).select_by_value("discard_selected")
        button = browser.find("button[name=index]")
        browser.until(button.is_displayed, "the button for it")
        browser.leave_by(button)
        browser.find("#id_reason").send_keys("the order was placed twice")
        browser.leave_by(browser.find("input[type=submit].default"))
        browser.until(lambda: "1 event discarded" in browser.find("body").text, "a message")
    else:
        browser.open(console.pages[name])
