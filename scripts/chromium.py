"""A headless Chromium, driven by selenium: for the tests of the console and its pictures.

    with Chromium() as browser:
        browser.open("http://127.0.0.1:8000/admin/")
        browser.look("dark", 390)
        browser.photograph(Path("page.png"))

Neither downloads anything but Debian's packages `chromium` and `chromium-driver`, which are
installed where they are missing; that they cannot be is an error.
"""

from __future__ import annotations

import base64
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

sys.path.insert(0, str(Path(__file__).resolve().parent))
import apt_install  # a sibling, as in broker.py

#: Seconds until a page is there, or what a page is waited for.
PATIENCE = 30.0
HEIGHT = 900
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-search-engine-choice-screen",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--lang=en-US",
)


class ChromiumError(RuntimeError):
    """There is no browser; the message says what to do."""


def find() -> tuple[str, str]:
    """Return the browser and its driver, installed by apt where they are missing.

    Raises:
        ChromiumError: they cannot be had.
    """
    wanted = ("chromium", "chromedriver")
    if not all(map(shutil.which, wanted)):
        try:
            apt_install.install(
                ["chromium", "chromium-driver"],
                why="no Chromium with its driver was found, and the console is tested in one",
            )
        except apt_install.AptError as exc:
            raise ChromiumError(
                f"No Chromium: {exc}. Remedy: install `chromium` and `chromedriver` (Debian's "
                f"packages chromium and chromium-driver) on the PATH."
            ) from exc
    browser, driver = (shutil.which(name) for name in wanted)
    if browser is None or driver is None:
        raise ChromiumError("apt's packages have no `chromium` and `chromedriver` on the PATH.")
    return browser, driver


class Chromium:
    """One window, with a profile of its own."""

    def __init__(self) -> None:
        binary, driver = find()
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        options = ChromeOptions()
        options.binary_location = binary
        for option in OPTIONS:
            options.add_argument(option)
        options.add_argument(f"--user-data-dir={self._profile}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # Pages that are waited for are waited for by what they show.
        options.page_load_strategy = "normal"
        self.width = 1280
        self.driver = Chrome(
            options=options,
            service=ChromeService(driver, env={**os.environ, "HOME": self._profile}),
        )
        self.driver.set_page_load_timeout(PATIENCE)
        self.driver.set_script_timeout(PATIENCE)
        self.look("light", 1280)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self.driver.quit()
        finally:
            shutil.rmtree(self._profile, ignore_errors=True)

    # -- how it is looked at

    def look(self, theme: str, width: int) -> None:
        """Look at pages in a light or dark theme, so many pixels wide, from now on."""
        self.width = width
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=HEIGHT,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self._tell("Emulation.setEmulatedMedia", features=features)

    def log_in(self, url: str, session: str) -> None:
        """Take a session of somebody who is logged in."""
        host = urlsplit(url).hostname
        self._tell("Network.setCookie", name="sessionid", value=session, domain=host, path="/")

    def forget(self) -> None:
        """Forget who is logged in."""
        self._tell("Network.clearBrowserCookies")
        self.open("about:blank")

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.settled()

    def settled(self) -> None:
        """Wait until the page is all there, and drawn."""
        self.until(lambda: self.run("return document.readyState") == "complete", "the whole page")
        self.driver.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        )

    def leave_by(self, element: WebElement) -> None:
        """Click what leads to another page, and wait for that one."""
        page = self.find("html")
        element.click()
        # A click comes back before the browser has left: until then the old page looks settled.
        self.until(lambda: _is_gone(page), "another page")
        self.settled()

    def photograph(self, target: Path, *, scale: float = 1.0, height: int = 0) -> None:
        """Take a picture of the whole page, or of its beginning: PNG or WebP, as it is named."""
        self.settled()
        whole = int(self.run("return document.documentElement.scrollHeight"))
        height = min(height or whole, whole)
        area = {"x": 0, "y": 0, "width": self.width, "height": height}
        taken = self._tell(
            "Page.captureScreenshot",
            **(
                {"format": "webp", "quality": 80} if target.suffix == ".webp" else {"format": "png"}
            ),
            captureBeyondViewport=True,
            clip={**area, "scale": scale},
        )
        target.write_bytes(base64.b64decode(taken["data"]))

    # -- what is on the page

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def link(self, text: str) -> WebElement:
        return self.driver.find_element(By.PARTIAL_LINK_TEXT, text)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body on the page, whatever its policy."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Any, what: str, seconds: float = PATIENCE) -> Any:
        """Wait until *condition* is true, and return what it returned.

        It may look at a page that is just being left, which drivers answer with one error or other.
        """
        waiting = WebDriverWait(self.driver, seconds, 0.1, ignored_exceptions=[WebDriverException])
        return waiting.until(lambda _: condition(), what)

    def complaints(self) -> list[str]:
        """What the browser's console says since it was asked last."""
        return [
            f"{entry['level']} {entry['message']}"
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING") and "/favicon.ico" not in entry["message"]
        ]

    def _tell(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)


def _is_gone(element: WebElement) -> bool:
    """Say whether an element's page was left. Drivers disagree about the error's class."""
    try:
        element.is_enabled()
    except WebDriverException:
        return True
    return False
