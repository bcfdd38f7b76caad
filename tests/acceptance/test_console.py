"""A project without Django's admin, by commands and with the console of docs/console.md."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from machine import free_ports
from tests.conftest import sqlite_settings
from tests.forked import REAL_START
from tests.roles import roles

from .harness import Eyes, Project, until

HERE = Path(__file__).resolve().parent / "console"
ROOT = HERE.parents[2]
BLOCK = re.compile(r"`(store/\w+\.py)`:\n\n```python\n(.*?)```", re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONSOLE = {"DJANGO_SETTINGS_MODULE": "store.console"}
#: Run with these settings, as a user with the permissions of an operator.
BROWSE = """
from django.test import Client
from django.urls import reverse
from django_amqp_events.admin.action_pages import encode_selection
from django_amqp_events.models import ArchivedEvent
from store.models import LogEntry, User
ada = User.objects.get()
LogEntry.objects.create(user=ada, text="hello")
assert [row.text for row in ada.logentry_set.all()] == ["hello"]
assert User.objects.filter(logentry__text="hello").get() == ada
client = Client(headers={"accept-language": "en"})
page = client.get("/", follow=True)
assert page.request["PATH_INFO"] == "/login/"
form = {"username": ada.email, "password": "secret", "next": "/"}
said = client.post("/login/", form, follow=True)
assert "Archived events" in said.content.decode(), said.content.decode()
for name in "archivedevent failuregroup replaybatch outboxevent dashboard".split():
    page = client.get(reverse(f"admin:django_amqp_events_{name}_changelist"))
    assert page.status_code == 200, (name, page)
row = ArchivedEvent.objects.get(state="archived")
page = client.get(reverse("admin:django_amqp_events_archivedevent_change", args=[row.pk]))
assert "ValueError" in page.content.decode()
url = reverse("admin:django_amqp_events_archivedevent_replay")
page = client.post(url, {"seen": encode_selection({row.pk: row.version})}, follow=True)
assert "1 event published to its handler." in page.content.decode(), page.content.decode()
"""


class Store(Project):
    """The project, whose processes import the admin or not, as their settings say."""

    def __init__(self, eyes: Eyes, where: Path) -> None:
        self.booked, self.fixed = where / "booked", where / "fixed"
        super().__init__(
            where,
            where,
            DJANGO_SETTINGS_MODULE="store.settings",
            RABBITMQ_URL=eyes.url,
            STORE_DATABASE=json.dumps(sqlite_settings(where / "db.sqlite3")),
            STORE_BOOKED=str(self.booked),
            STORE_FIXED=str(self.fixed),
            # Processes of the fork server have imported the admin.
            **{REAL_START: "1"},
        )
        shutil.copytree(HERE / "store", where / "store")
        page = (ROOT / "docs" / "console.md").read_text()
        files = dict(BLOCK.findall(page))
        assert set(files) == {"store/console.py", "store/console_urls.py"}
        for name, code in files.items():
            (where / name).write_text(code)

    def publish(self, order: int) -> None:
        self.python(f"from store.events import ordered\nordered.publish(order={order})")

    def states(self) -> list[str]:
        rows = "ArchivedEvent.objects.order_by('first_failed_at').values_list('state', flat=True)"
        code = f"from django_amqp_events.models import ArchivedEvent\nprint(*{rows})"
        return self.python(code).split()


@pytest.fixture
def store(fresh_eyes: Eyes, tmp_path: Path) -> Iterator[Store]:
    made = Store(fresh_eyes, tmp_path)
    yield made
    made.end()


def test_a_project_without_the_admin_and_its_console(store: Store) -> None:
    loaded = store.python("import sys\nprint('django.contrib.admin' in sys.modules)")
    assert loaded.split() == ["False"]
    store.manage("check", "--fail-level", "WARNING")
    store.manage("makemigrations", "store")
    store.manage("makemigrations", "--check", "--dry-run")
    store.manage("migrate", "--verbosity", "0")
    store.manage("events_declare")
    store.start("worker", "-m", "django", "events_worker", "--", "-P", "solo", "-l", "INFO")

    # By commands.
    store.publish(1)
    until(lambda: store.states() == ["archived"], 60, "the event is mirrored")
    assert "ValueError" in store.manage("events_groups")
    store.fixed.touch()
    store.manage("events_replay", "--handler", "store.book")
    until(lambda: store.states() == ["succeeded"], 60, "its replay is mirrored")
    assert store.booked.read_text() == "1\n"

    # With the console.
    store.fixed.unlink()
    store.publish(2)
    until(lambda: store.states() == ["succeeded", "archived"], 60, "the second is mirrored")
    store.fixed.touch()
    assert "no issues" in store.manage("check", **CONSOLE)
    store.manage("migrate", "--verbosity", "0", **CONSOLE)
    store.python(
        "from store.models import User\n"
        "user = User(email='ada@example.com'); user.set_password('secret'); user.save()"
    )
    store.python(
        "from django.contrib.auth.models import Permission\n"
        "from store.models import User\n"
        f"allowed = Permission.objects.filter(codename__in={roles()['operator']})\n"
        "User.objects.get().user_permissions.set(allowed)",
        **CONSOLE,
    )
    store.manage("collectstatic", "--verbosity", "0", **CONSOLE)
    assert (store.where / "static" / "django_amqp_events" / "admin.css").exists()
    store.python(BROWSE, **CONSOLE)
    until(lambda: store.states() == ["succeeded", "succeeded"], 60, "the second is handled")
    assert store.booked.read_text() == "1\n2\n"
    (port,) = free_ports(1)
    bound = ("-m", "gunicorn", "--bind", f"127.0.0.1:{port}", "--no-control-socket")
    store.start("console", *bound, "store.wsgi", ready="Listening at", **CONSOLE)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
        assert page.url.endswith("/login/?next=/")
        assert "<title>Log in | Events</title>" in page.read().decode()
    # The project itself is as it was.
    store.manage("makemigrations", "--check", "--dry-run")
    code = "from django.test import Client\nprint(Client().get('/office/').content.decode())"
    assert store.python(code).split() == ["internal"]
