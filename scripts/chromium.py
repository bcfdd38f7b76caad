"""A headless Chromium, driven by selenium, for the tests of the console and its screenshots.

    with Chromium() as browser:
        browser.open("http://127.0.0.1:8000/admin/")
        browser.look("dark", 390)
        browser.photograph(Path("page.png"))

Selenium would download a missing browser; here apt installs it.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

import apt_install
from machine import ScriptError

#: Seconds to wait for a page or for a change of it.
PATIENCE = 30.0
HEIGHT = 900
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--lang=en-US",
)


def find() -> tuple[str, str]:
    """Return the paths of the browser and its driver; install them if they are missing."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        apt_install.install(
            ["chromium", "chromium-driver"],
            why="The tests of the console need Chromium and its driver",
        )
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        raise ScriptError("There is no `chromium` and `chromedriver` on the PATH. Install both.")
    return browser, driver


class Chromium:
    """One window, with its own profile."""

    def __init__(self) -> None:
        binary, driver = find()
        self._home = tempfile.mkdtemp(prefix="chromium-")
        options = ChromeOptions()
        options.binary_location = binary
        for option in (*OPTIONS, f"--user-data-dir={self._home}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = ChromeService(driver, env={**os.environ, "HOME": self._home})
        self.driver = Chrome(options=options, service=service)
        self.driver.set_page_load_timeout(PATIENCE)
        self.driver.set_script_timeout(PATIENCE)
        self.look("light", 1280)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.driver.quit()
        finally:
            shutil.rmtree(self._home, ignore_errors=True)

    def look(self, theme: str, width: int) -> None:
        """Show pages in a light or dark theme, *width* pixels wide."""
        self.width = width
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._tell("Emulation.setDeviceMetricsOverride", **size)
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self._tell("Emulation.setEmulatedMedia", features=features)

    def log_in(self, url: str, session: str) -> None:
        """Use the session of a logged-in user."""
        host = urlsplit(url).hostname
        self._tell("Network.setCookie", name="sessionid", value=session, domain=host, path="/")

    def forget(self) -> None:
        """Log out, without asking the server."""
        self._tell("Network.clearBrowserCookies")
        self.open("about:blank")

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.settled()

    def settled(self) -> None:
        """Wait until the page is loaded and drawn."""
        self.until(lambda: self.run("return document.readyState") == "complete", "the whole page")
        self.driver.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        )

    def leave_by(self, element: WebElement) -> None:
        """Click an element that leads to another page, and wait for that page."""
        page = self.find("html")

        def left() -> bool:
            try:
                page.is_enabled()
            except WebDriverException:  # drivers disagree about its class
                return True
            return False

        element.click()
        # A click returns before the browser leaves; until then the old page looks settled.
        self.until(left, "another page")
        self.settled()

    def photograph(self, target: Path, *, scale: float = 1.0, height: int = 0) -> None:
        """Write a picture of the page, or of its first *height* pixels, as PNG or WebP."""
        self.settled()
        whole = int(self.run("return document.documentElement.scrollHeight"))
        height = min(height or whole, whole)
        area = {"x": 0, "y": 0, "width": self.width, "height": height}
        kind = {"format": "webp", "quality": 80} if target.suffix == ".webp" else {"format": "png"}
        clip = {**area, "scale": scale}
        taken = self._tell("Page.captureScreenshot", **kind, captureBeyondViewport=True, clip=clip)
        target.write_bytes(base64.b64decode(taken["data"]))

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def link(self, text: str) -> WebElement:
        return self.driver.find_element(By.PARTIAL_LINK_TEXT, text)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body on the page, regardless of its Content-Security-Policy."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Any, what: str, seconds: float = PATIENCE) -> Any:
        """Wait until *condition* is true, and return what it returned.

        Drivers raise various errors for a page that the browser is leaving; they are ignored.
        """
        waiting = WebDriverWait(self.driver, seconds, 0.1, ignored_exceptions=[WebDriverException])
        return waiting.until(lambda _: condition(), what)

    def complaints(self) -> list[str]:
        """Return the warnings in the browser's console since the last call."""
        return [
            f"{entry['level']} {entry['message']}"
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING") and "/favicon.ico" not in entry["message"]
        ]

    def _tell(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)
