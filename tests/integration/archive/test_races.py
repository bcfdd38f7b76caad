"""Concurrent users who submit pages that they have already open."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.conftest import slow
from tests.unit.admin.admin_world import Page

from ..conftest import Service, wait_until
from ..processes import runners
from ..serving import Browser, more, serving
from ..wire import in_threads

QUEUE = "billing.send_invoice"
ADMIN = "/admin/django_amqp_events/"
ARCHIVE = f"{ADMIN}archivedevent/"
EVENTS = 20

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize(
        "empty_database", ["postgresql", *slow("sqlite", "mariadb")], indirect=True
    ),
]


@dataclass
class Office:
    """Two users who manage one failure group.

    Attributes:
        first: one of its events.
    """

    ada: Browser
    bob: Browser
    first: UUID
    group: str
    log: Path

    def meet(self, *acts: Callable[[], object]) -> None:
        """Let all users act at the same time; no response may be a server error."""
        barrier = threading.Barrier(len(acts))

        def act(number: int) -> None:
            barrier.wait(30)
            acts[number]()

        raised = in_threads(len(acts), act)
        assert not raised, (raised[:3], self.log.read_text()[-3_000:])

    def states(self) -> Counter[str]:
        """In how many events each state is, as the list says."""
        names = ("archived", "replaying", "discarded")
        return Counter({name: self._listed(name) for name in names})

    def _listed(self, state: str) -> int:
        page = self.ada.open(f"{ARCHIVE}?state={state}&group={self.group}")
        return sum("/archivedevent/" in link and "/change/" in link for link in page.links)

    def ask(self, who: Browser, what: str) -> Page:
        """Press one of the group's buttons, up to the page that asks."""
        form = who.open(f"{self.group_url}change/").fields
        token = {"csrfmiddlewaretoken": form["csrfmiddlewaretoken"]}
        return who.open(f"{self.group_url}{what}/", token)

    @property
    def group_url(self) -> str:
        return f"{ADMIN}failuregroup/{self.group}/"


@pytest.fixture
def office(empty_database: dict[str, Any], billing: Service, tmp_path: Path) -> Iterator[Office]:
    url = billing.vhost.url
    with serving(empty_database, url, tmp_path) as (address, first):
        more(empty_database, url, EVENTS)
        ada, bob = Browser(address).login("ada"), Browser(address).login("bob")
        listed = ada.open(f"{ADMIN}failuregroup/")
        [group] = {link.split("/")[-3] for link in listed.links if "/change/" in link}
        yield Office(ada, bob, first, group, tmp_path / "log")


def sent(service: Service) -> Counter[str]:
    """Which events are in the handler's queue, and how often."""
    return Counter(message.headers["event-id"] for message in service.take_all(QUEUE))


def test_a_group_is_replayed_by_one_and_discarded_by_another(
    office: Office, billing: Service
) -> None:
    """Each of them presses twice, while a third tab replays one of the events."""
    replay, discard = office.ask(office.ada, "replay"), office.ask(office.bob, "discard")
    assert f"Replay {EVENTS} events?" in replay.words
    assert f"Discard {EVENTS} events?" in discard.words
    single = office.ada.open(f"{ARCHIVE}decide/replay/?seen={office.first.hex}:0")
    told: list[str] = []

    def confirm(who: Browser, what: str, page: Page) -> Callable[[], None]:
        tab = who.again()
        form = {**page.fields, "reason": f"{what} it"}
        return lambda: told.append(tab.open(f"{ARCHIVE}decide/{what}/", form).words)

    office.meet(
        *[confirm(office.ada, "replay", replay) for _ in range(2)],
        *[confirm(office.bob, "discard", discard) for _ in range(2)],
        confirm(office.ada, "replay", single),
    )
    states = office.states()
    assert states["archived"] == 0
    assert states["replaying"] + states["discarded"] == EVENTS
    messages = sent(billing)
    assert sum(messages.values()) == states["replaying"]
    assert set(messages.values()) <= {1}
    # The late user is told about the skipped events.
    assert sum("another user or tab changed it first" in words for words in told) >= 3


def test_everybody_presses_the_buttons_of_a_batch(
    office: Office, empty_database: dict[str, Any], billing: Service, tmp_path: Path
) -> None:
    """Concurrent start, pause, resume and cancel publish each event once."""
    page = office.ask(office.ada, "batch")
    batch = office.ada.last.removesuffix("change/")
    token = {"csrfmiddlewaretoken": page.fields["csrfmiddlewaretoken"]}
    mine = {"csrfmiddlewaretoken": office.bob.open("/admin/").fields["csrfmiddlewaretoken"]}
    told: list[tuple[str, bool]] = []

    def press(who: Browser, what: str, form: dict[str, str]) -> Callable[[], None]:
        tab = who.again()
        start = {"reason": "fixed", "rate": "", "canary": "", "threshold": ""}
        version = {"version": page.fields["version"]}
        given = {**form, **version, **(start if what == "start" else {})}

        def act() -> None:
            words = tab.open(f"{batch}{what}/", given).words
            late = "Nothing was done" in words or "There is no replay batch" in words
            told.append((what, not late))

        return act

    with runners(billing.vhost.url, json.dumps(empty_database), tmp_path) as starter:
        processes = [starter.start() for _ in range(2)]
        office.meet(
            *[press(office.ada, what, token) for what in ("start", "pause", "resume")],
            *[press(office.bob, what, mine) for what in ("start", "resume", "cancel")],
        )
        done = Counter(what for what, ok in told if ok)
        assert done["start"] <= 1, told
        assert done["cancel"] <= 1, told
        if not done["cancel"]:
            # Nobody was in time to cancel it: whatever stands now is ended by its owner.
            version = office.ada.open(f"{batch}change/").fields["version"]
            office.ada.open(f"{batch}cancel/", {**token, "version": version})

        def over() -> bool:
            states = office.states()
            return states["archived"] + states["replaying"] == EVENTS and (
                billing.ready(QUEUE) == states["replaying"]
            )

        # One of them may be about to claim events that it read before the batch was cancelled.
        for each in processes:
            each.stop()
        wait_until(over, "what was begun is sent")
    messages = sent(billing)
    assert set(messages.values()) <= {1}
    assert sum(messages.values()) == office.states()["replaying"]
