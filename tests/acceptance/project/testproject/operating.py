"""Decide about archived events as a user does, through the pages of the admin.

``python -m testproject.operating '{"user": "ann", "seed": "1"}'``

It opens the list and an event, follows one of the buttons there, and confirms. The decision, with a
token of its own as its reason, is written down before the last request and after it. An edit adds
the token to the payload, and in half of the cases it makes the event succeed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import uuid4

import django
from django.test import Client
from django.test.utils import setup_test_environment

#: How often each button is used, relative to the others.
BUTTONS: Final = {"replay": 4, "edit": 4, "discard": 1}
#: Seconds between two decisions; all users decide at the same times.
PAUSE: Final = 2.0
#: Of the list, from which one is taken; the first one by this share of the decisions.
EVENTS: Final = 6
SAME: Final = 0.6


def prepare(users: Sequence[str]) -> None:
    """Create the admin's tables, and superusers."""
    from django.contrib.auth.models import User
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    for name in users:
        User.objects.create_superuser(name)


class Operator:
    def __init__(self, user: str, seed: str) -> None:
        self.user = user
        self.chance = random.Random(seed)
        self.client = Client()

    def login(self) -> None:
        from django.contrib.auth.models import User

        self.client.force_login(User.objects.get(username=self.user))

    def decide(self) -> None:
        """Decide about one of the newest events, if there is one."""
        found = self._page("/admin/django_amqp_events/archivedevent/")
        rows = [row for row in found["cl"].result_list if row.state == "archived"][:EVENTS]
        if not rows:
            return
        row = rows[0] if self.chance.random() < SAME else self.chance.choice(rows)
        page = self._page(f"/admin/django_amqp_events/archivedevent/{row.pk}/change/")
        buttons = {link["name"]: link["url"] for link in page["buttons"]["links"]}
        names = [name for name in BUTTONS if name in buttons]
        if not names:
            return
        (name,) = self.chance.choices(names, [BUTTONS[name] for name in names])
        (self._edit if name == "edit" else self._confirm)(name, buttons[name])

    def _confirm(self, name: str, url: str) -> None:
        page = self._page(url)
        if page is None or not page.get("seen"):
            return
        pk, _, version = page["seen"].partition(":")
        data = {"seen": page["seen"], "back": page["back"]}
        self._send(name, page, page["events"][0], pk, int(version), data)

    def _edit(self, name: str, url: str) -> None:
        page = self._page(url)
        if page is None or "form" not in page:
            return
        event, form = page["event"], page["form"]
        payload, token = {"number": 0, "plan": "fine"}, uuid4().hex
        with suppress(ValueError):  # a malformed message
            payload |= json.loads(form["payload"].value())
        if self.chance.random() < 0.5:
            payload["plan"] = "fine"
        payload["edit"] = token
        version = str(event.version)
        data = {"payload": json.dumps(payload), "version": version, "step": "publish"}
        review = self._page(page["action_url"], {**data, "step": "review"})
        if review is None or "payload" not in review:
            return
        self._send(name, page, event, event.pk.hex, event.version, data, token)

    def _send(
        self, name: str, page: Any, event: Any, pk: str, version: int, data: dict[str, str],
        token: str = "",
    ) -> None:  # fmt: skip
        """Confirm; a success message says that it was done."""
        from django.contrib.messages import SUCCESS, get_messages

        from . import ledger

        token = token or uuid4().hex
        about = {
            "decision": name, "by": self.user, "row": pk, "version": version, "token": token,
            "event": event.event_id, "handler": event.handler.rpartition(".")[2],
        }  # fmt: skip
        time.sleep(0.2 - time.monotonic() % 0.2)
        ledger.write("decides", **about)
        self.client.cookies.pop("messages", None)  # those of earlier requests
        result = "unknown"
        try:
            response = self.client.post(page["action_url"], {**data, "reason": token})
            levels = {message.level for message in get_messages(response.wsgi_request)}
            result = "done" if SUCCESS in levels else "refused"
        finally:
            ledger.write("decided", result=result, **about)

    def _page(self, url: str, data: dict[str, str] | None = None) -> Any:
        """Return the context of a page, None if it redirects."""
        response = self.client.get(url) if data is None else self.client.post(url, data)
        assert response.status_code in (200, 302), f"{url}: {response.status_code}"
        return response.context if response.status_code == 200 else None


def main(*, user: str, seed: str, pause: float = PAUSE) -> None:
    """Decide until the process ends."""
    from django.contrib.sessions.backends.base import UpdateError
    from django.db import DatabaseError, InterfaceError, close_old_connections

    setup_test_environment()  # so that responses have their context
    operator = Operator(user, seed)
    known = False
    while True:
        try:
            if not known:
                operator.login()
                known = True
            operator.decide()
        except (DatabaseError, InterfaceError, UpdateError) as exc:  # the last one while logging in
            print(f"the database: {exc}", flush=True)
        close_old_connections()
        time.sleep(pause - time.monotonic() % pause)


if __name__ == "__main__":
    django.setup()
    main(**json.loads(sys.argv[1]))
