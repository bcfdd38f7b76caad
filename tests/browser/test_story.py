"""What somebody on call fixes in a browser: a night of failures, and a handler that was wrong.

Real: RabbitMQ, ``events_worker`` with its runner of batches, ``events_mirror``, the web server, the
browser. The ledger says what was handled.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import WebDriverException

from chromium import Chromium
from machine import free_ports
from tests.acceptance.harness import Eyes, Project, until
from tests.conftest import Vhost
from tests.event_messages import published

from .console import ROOT

NUMBER = 40
#: Where to write the pictures of the backfill, such as docs/images.
PICTURES = os.environ.get("STORY_PICTURES")
SCALE = 0.75


class Billing(Project):
    """The service and its processes."""

    def __init__(self, where: Path, url: str) -> None:
        super().__init__(
            where,
            ROOT,
            DJANGO_SETTINGS_MODULE="tests.browser.billing",
            PYTHONUNBUFFERED="1",
            STORY_DIR=str(where),
            STORY_BROKER=url,
        )
        self.environ["PYTHONPATH"] += os.pathsep + str(ROOT / "scripts")
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"

    def fix(self, **rates: int) -> None:
        """Write the file that the handler reads, atomically."""
        new = self.where / "rates.new"
        new.write_text(json.dumps(rates))
        new.rename(self.where / "rates.json")

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """The orders, as often as they were invoiced."""
        ledger = self.where / "ledger.jsonl"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        return list(map(json.loads, lines))

    @property
    def invoiced(self) -> list[tuple[int, str]]:
        """Orders with their countries."""
        return [(line["order"], line["country"]) for line in self.ledger]


@pytest.fixture
def billing(tmp_path: Path, fresh_vhost: Vhost) -> Iterator[Billing]:
    service = Billing(tmp_path, fresh_vhost.url)
    service.fix(DE=19)
    try:
        service.manage("migrate", "--verbosity", "0")
        service.manage("events_declare", "--verbosity", "0")
        service.manage(
            "createsuperuser", "--noinput", "--username", "ada", "--email", "",
            DJANGO_SUPERUSER_PASSWORD="secret",
        )  # fmt: skip
        options = ("--no-mirror", "--no-reaper", "--no-relay", "-c", "2")
        service.start("worker", "-m", "django", "events_worker", *options)
        service.start("mirror", "-m", "django", "events_mirror", ready="mirroring")
        address = f"127.0.0.1:{service.port}"
        server = ("runserver", "--noreload", "--insecure", address)
        service.start("server", "-m", "django", *server, ready=address)
        yield service
    except BaseException:
        for worker in service.started:
            print(f"-- {worker.name}\n{worker.log[-2500:]}")
        raise
    finally:
        service.end()


class Person:
    """Reads a page, follows links by their words, fills in forms and presses buttons."""

    def __init__(self, browser: Chromium) -> None:
        self.browser = browser

    @property
    def page(self) -> str:
        return self.browser.find("#content").text

    @property
    def drawn(self) -> str:
        """The page with what is in its pictures, as it is now."""
        self.browser.driver.refresh()
        return self.browser.driver.page_source

    def open_first(self) -> None:
        """Open the first row of a list."""
        self.browser.leave_by(self.browser.find("#result_list tbody th a"))

    def open_row(self, words: str) -> None:
        """Open a row of a list by the words of its link, which a filter beside it may have too."""
        (link, *_) = [each for each in self.browser.all("#result_list a") if words in each.text]
        self.browser.leave_by(link)

    def turn_to(self, model: str) -> None:
        """Follow a link of the admin's side bar; those in a text keep the filters."""
        self.browser.leave_by(self.browser.find(f"#nav-sidebar a[href$='/{model}/']"))

    def follow(self, words: str) -> None:
        self.browser.leave_by(self.browser.link(words))

    def press(self, words: str) -> None:
        """Press the button with these words."""
        (button,) = [
            each
            for each in self.browser.all("#content input[type=submit], #content button")
            if words in (each.get_attribute("value") or "", each.text)
        ]
        self.browser.leave_by(button)

    def photograph(self, name: str, height: int) -> None:
        """Write pictures of the page for its documentation, if they are wanted."""
        if PICTURES is None:
            return
        for theme in ("light", "dark"):
            self.browser.look(theme, 1280)
            target = Path(PICTURES) / f"{name}-{theme}-1280.webp"
            self.browser.photograph(target, scale=SCALE, height=height)
        self.browser.look("light", 1280)

    def write(self, field: str, words: str) -> None:
        element = self.browser.find(f"[name={field}]")
        element.clear()
        element.send_keys(words)

    def wait_for(self, words: str, *, reload: bool = True, seconds: float = 60) -> None:
        """Look at the page until it says so."""

        def there() -> bool:
            try:
                if words in self.page:
                    return True
            except WebDriverException:  # the page reloads and may be incomplete
                return False
            if reload:
                self.browser.driver.refresh()
            return False

        until(there, seconds, f"{words!r} on {self.browser.driver.current_url}")


@pytest.mark.timeout(300)
def test_a_night_on_call(browser: Chromium, billing: Billing, fresh_vhost: Vhost) -> None:
    ada = Person(browser)

    # The evening: forty orders without a tax rate, one without country, one without customer.
    eyes = Eyes(fresh_vhost.node, fresh_vhost.name)
    orders = [{"order": n, "country": "XX", "customer": "Zoë"} for n in range(NUMBER)]
    orders.append({"order": 100, "country": "??", "customer": "Zoë"})
    orders.append({"order": 101, "country": "DE"})
    for order in orders:
        eyes.event("shop.order.created", order)
    eyes.close()

    # She is woken, logs in, and looks how it stands.
    browser.open(f"{billing.url}/admin/")
    ada.write("username", "ada")
    ada.write("password", "secret")
    ada.press("Log in")
    ada.follow("Dashboard")
    ada.wait_for(f"Open\n{NUMBER + 2}")
    until(lambda: "TaxError in invoice" in ada.drawn, 30, "the dashboard names the group")

    # Which events fail?
    ada.follow("Failure groups")
    ada.wait_for("TaxError")
    ada.open_row("TaxError")
    assert f"{NUMBER} open events" in ada.page
    assert "there is no tax rate for 'XX'" in ada.page
    group = browser.driver.current_url
    ada.follow("shop.order.created")
    assert "raise TaxError(" in ada.page
    assert "attempt 2 failed" in ada.page  # the timeline
    assert '"country": "XX"' in ada.page
    assert billing.invoiced == []

    # She fixes it, and tries three before the others.
    billing.fix(DE=19, XX=20)
    browser.open(group)
    ada.press("Replay all in the background…")
    assert f"{NUMBER} of {NUMBER} events can be replayed" in ada.page
    assert billing.invoiced == []  # a dry run
    ada.write("reason", "the rate of XX was missing")
    ada.write("canary", "3")
    ada.press("Start in the background")
    ada.wait_for(f"succeeded\n{NUMBER}", reload=False)
    browser.until(browser.find(".ae-changed").is_displayed, "the line that it has changed")
    browser.leave_by(browser.find(".ae-changed a"))
    browser.until(lambda: browser.all(".ae-batch-done"), "the batch is done")
    assert "(succeeded)" in ada.page
    assert "the rate of XX was missing" in ada.page
    ada.follow("All events of this batch")
    assert ada.page.count("succeeded") >= NUMBER
    browser.open(group)
    ada.wait_for("0 open events")

    # The order of no country: what the shop meant is DE.
    ada.turn_to("archivedevent")
    assert "2 archived events" in ada.page
    ada.follow("CountryError")
    ada.open_first()
    assert "'??' is no country" in ada.page
    event = browser.driver.current_url
    ada.follow("Edit and replay…")
    editor = browser.find("textarea.ae-editor")
    written = str(editor.get_attribute("value"))
    editor.clear()
    editor.send_keys(written.replace("??", "DE"))
    ada.press("Preview changes")
    changed = [each.text for each in browser.all(".ae-diff .ae-removed, .ae-diff .ae-added")]
    assert [line.split()[-1].strip(",") for line in changed] == ['"??"', '"DE"'], changed
    ada.write("reason", "the shop says it is DE")
    ada.press("Replay with this payload")
    browser.open(event)
    ada.wait_for("succeeded")
    assert "Revision 1" in ada.page

    # The order without a customer was the shop's mistake.
    ada.turn_to("archivedevent")
    assert "1 archived event" in ada.page
    ada.open_first()
    assert "KeyError" in ada.page
    ada.follow("Discard…")
    ada.write("reason", "placed by a test of the shop")
    ada.press("Discard 1 event")
    ada.turn_to("archivedevent")
    assert "0 archived events" in ada.page
    ada.turn_to("dashboard")
    ada.wait_for("Open\n0")

    # Every order once, the one that was discarded never.
    expected = {(n, "XX"): 1 for n in range(NUMBER)} | {(100, "DE"): 1}
    assert Counter(billing.invoiced) == expected
    assert browser.complaints() == []


@pytest.mark.timeout(300)
def test_two_hours_run_again_in_five_clicks(
    browser: Chromium, billing: Billing, fresh_vhost: Vhost
) -> None:
    ada = Person(browser)

    # An order every three minutes for four hours, while the rate was wrong.
    billing.fix(DE=16)
    begin = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=4)
    times = {number: begin + timedelta(minutes=3 * number) for number in range(80)}
    eyes = Eyes(fresh_vhost.node, fresh_vhost.name)
    customer = {"country": "DE", "customer": "Zoë"}
    eyes.send(*(published(payload={"order": n, **customer}, at=at) for n, at in times.items()))
    eyes.close()
    until(lambda: len(billing.ledger) == len(times), 60, "all are invoiced")

    browser.open(f"{billing.url}/admin/")
    ada.write("username", "ada")
    ada.write("password", "secret")
    ada.press("Log in")

    # It is fixed now, and those of two hours run again.
    billing.fix(DE=19)
    ada.follow("Replay batches")
    browser.find("summary").click()
    since, until_ = begin + timedelta(hours=1), begin + timedelta(hours=3)
    ada.write("since", f"{since:%Y-%m-%d %H:%M}")
    ada.write("until", f"{until_:%Y-%m-%d %H:%M}")
    browser.find("[name=again]").click()
    ada.photograph("backfill-form", 780)
    ada.press("Preview")
    assert f"{NUMBER} past events will be given to the handler" in ada.page
    ada.write("reason", "the rate of DE was 16")
    ada.photograph("backfill-preview", 1010)
    assert len(billing.ledger) == len(times)
    ada.press("Start in the background")
    ada.wait_for(f"succeeded\n{NUMBER}", reload=False)
    ada.wait_for("done")
    ada.photograph("backfill-done", 740)

    rates = Counter((line["order"], line["rate"]) for line in billing.ledger)
    again = {order for order, at in times.items() if since <= at < until_}
    assert len(again) == NUMBER
    assert rates == {(order, 16): 1 for order in times} | {(order, 19): 1 for order in again}
    assert browser.complaints() == []
