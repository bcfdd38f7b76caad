"""Concurrent users who submit pages that they have already open."""

from __future__ import annotations

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

from ..conftest import Service
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
