#!/usr/bin/env python3
"""Screenshots of our pages in the admin: light and dark, 1280 and 390 pixels wide.

    .venv/bin/python scripts/screenshots.py [name ...]
    .venv/bin/python scripts/screenshots.py --docs    # the small ones in docs/images

A private RabbitMQ and a SQLite database with events of every kind, replays that really are
published, the pages served here to somebody who is logged in, a headless chromium. Images go to
.run/screenshots. The pages are served under a strict Content-Security-Policy; what chromium says
about it is printed, and is an error.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"

import django  # noqa: E402

from broker import Node  # noqa: E402

TARGET = ROOT / ".run" / "screenshots"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'self'; frame-src 'self'"
)
#: Page: its height at 1280 and at 390 pixels.
HEIGHTS = {
    "list": (900, 1300),
    "detail": (2250, 2900),
    "confirmation": (1050, 1400),
    "force": (1050, 1500),
    "result": (900, 1500),
    "editor": (1250, 1700),
    "review": (1100, 1500),
    "edited": (3300, 4300),
    "outbox": (800, 1300),
    "outbox-event": (1500, 2100),
    "outbox-discarded": (1400, 2000),
    "outbox-publish": (1000, 1500),
    "inbox": (600, 900),
    "dashboard": (2300, 5200),
    "topology": (1500, 2600),
    "retries": (1300, 1700),
}
#: Those of docs/images: their heights at 1280 pixels, before they are made smaller.
DOCS = {"list": 620, "detail": 1250, "confirmation": 1000}
SCALE = 0.7
#: Pages that answer a form, by the address that they are shown under.
POSTED: dict[str, bytes] = {}
FRAME = (
    "<!doctype html><title>390</title><link rel=stylesheet href=/frame.css>"
    '<iframe src="{path}" width="390" height="{height}"></iframe>'
)


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its own name
        pass


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("No chromium is on the PATH.")
    docs = sys.argv[1:] == ["--docs"]
    wanted = list(DOCS) if docs else sys.argv[1:] or list(HEIGHTS)
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as directory:
        node = Node.start(Path(directory) / "rabbit")
        try:
            return shoot(browser, wanted, Path(directory), node, docs=docs)
        finally:
            node.end()


def shoot(browser: str, wanted: list[str], directory: Path, node: Node, *, docs: bool) -> int:
    from django.conf import settings

    node.add_vhost("screenshots")
    database = directory / "db.sqlite3"
    settings.DATABASES["default"]["NAME"] = str(database)
    settings.ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
    settings.MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"
    django.setup()

    from django.core.management import call_command
    from django.test import override_settings

    from tests.celery_app import app
    from tests.unit import admin_world as world

    app.conf.broker_url = node.amqp_url("screenshots")
    call_command("migrate", verbosity=0)
    with override_settings(**world.SETTINGS, AMQP_EVENTS={**world.EVENTS, "EDITING": True}):
        call_command("events_declare", verbosity=0)
        prepare: dict[str, Callable[[], str]] = pages(world)
        server = serve()
        problems = 0
        try:
            for name in wanted:
                if docs:
                    target = ROOT / "docs" / "images" / f"admin-{name}.png"
                    url = f"http://127.0.0.1:{server.server_port}{prepare[name]()}"
                    problems += photograph(
                        browser, directory, url, target, "light", 1280, DOCS[name], SCALE
                    )
                    continue
                for theme in ("light", "dark"):
                    for width, height in zip((1280, 390), HEIGHTS[name], strict=True):
                        path = prepare[name]()
                        target = TARGET / f"{name}-{theme}-{width}.png"
                        url = f"http://127.0.0.1:{server.server_port}{path}"
                        if width == 390:
                            # The browser's window is never that narrow, a frame is.
                            server.frame = FRAME.format(path=path, height=height)
                            url = f"http://127.0.0.1:{server.server_port}/frame"
                        problems += photograph(
                            browser, directory, url, target, theme, width, height
                        )
                        print(target.relative_to(ROOT))
        finally:
            server.shutdown()
    return int(problems > 0)


def photograph(
    browser: str,
    directory: Path,
    url: str,
    target: Path,
    theme: str,
    width: int,
    height: int,
    scale: float = 1.0,
) -> int:
    """Take one; returns how many violations of the policy chromium reports."""
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        + ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        + ["--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={directory}/profile"]
        + [f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}"]
        + [f"--force-device-scale-factor={scale}"]
        + [f"--window-size={max(width, 500)},{height}", f"--screenshot={target}", url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    found = [line for line in done.stderr.splitlines() if "Content Security Policy" in line]
    for line in found:
        print(line, file=sys.stderr)
    return len(found)


def pages(world: Any) -> dict[str, Callable[[], str]]:
    """What to do before each page is opened, and its address."""
    from django.contrib.auth.models import User

    from django_amqp_events.admin import decisions
    from django_amqp_events.models import ArchivedEvent, Replay, State

    client = world.client_of(User.objects.create_superuser("ada"))
    global SESSION  # noqa: PLW0603 - the server is a function
    SESSION = client.cookies["sessionid"].value
    now = datetime.now(UTC)
    failures = [
        ("billing.errors.TaxError", "there is no tax rate for 'XX'", "billing.tax:28 in rate"),
        (
            "requests.exceptions.ConnectionError",
            "no route to mail.example",
            "billing.mail:9 in post",
        ),
        ("KeyError", "'customer'", "billing.handlers:17 in send_invoice"),
    ]
    for number in range(14):
        exception, message, location = failures[number % 3]
        world.make(
            name=("shop.order.created", "shop.order.paid")[number % 2],
            handler=("send_invoice", "book")[number % 2],
            exception=exception,
            message=message,
            location=location,
            reason=("exhausted", "failed")[number % 2],
            attempts=1 + number % 4,
            replays=number % 2,
            last_failed_at=now - timedelta(minutes=3 * 3**number / 50),
            unconfirmed=number == 3,
            error="no confirm came within 10 seconds" if number == 3 else "",
        )
    world.make(State.SUCCEEDED)
    world.make(State.DISCARDED)
    late = [world.overdue(), world.overdue(handler="book")]
    detail = world.make(
        error="no queue is bound to billing:replay for billing.send_invoice",
        replays=1,
        causation_id="6f1f0c11-0000-4000-8000-000000000001",
        body=b'[[], {"order_id": 4711, "customer": {"name": "Zo\xc3\xab", "country": "XX"}, '
        b'"total": "19.90", "lines": [{"sku": "A-1", "count": 2}, {"sku": "B-7"}]}, {}]',
        failure=world.document(
            history=[
                {**each, "at": (now - timedelta(minutes=123 - number)).isoformat()}
                for number, each in enumerate(world.document()["history"])
            ]
        ),
    )
    world.add_replay(
        detail,
        outcome=Replay.Outcome.REFUSED,
        error=detail.error,
        requested_at=now - timedelta(minutes=30),
        publishes=1,
    )

    def some() -> list[Any]:
        return list(ArchivedEvent.objects.filter(state="archived", unconfirmed=False)[:3])

    def result() -> str:
        rows = some()[:2]
        settled = ArchivedEvent.objects.filter(state="succeeded")[0]
        seen = world.frozen(*rows) + f",{settled.pk.hex}:0"
        client.post(world.url("replay"), {"seen": seen, "reason": "tax table mended in 1.2"})
        return str(world.url("changelist"))

    def asked(name: str, rows: list[Any]) -> str:
        return f"{world.url(name)}?seen={world.frozen(*rows)}"

    mended = world.make(
        body=detail.body, correlation_id=detail.correlation_id, event_id="order-4711"
    )
    world.make(event_id="order-4711", handler="book", state=State.SUCCEEDED)
    payload = json.loads(detail.body)[1]
    for country in ("FR", "DE"):
        mended.refresh_from_db()
        payload["customer"]["country"] = country
        text = json.dumps(payload)
        form = {"version": mended.version, "base": 0, "payload": text, "step": "publish"}
        client.post(world.url("edit", mended.pk), {**form, "reason": "the shop sent XX"})
        ArchivedEvent.objects.filter(pk=mended.pk).update(state="archived")
    mended.refresh_from_db()

    def review() -> str:
        payload["customer"]["country"] = "AT"
        form = {"version": mended.version, "base": 2, "payload": json.dumps(payload)}
        answer = client.post(world.url("edit", mended.pk), {**form, "step": "review"})
        # What is posted has no address of its own.
        POSTED["/review/"] = answer.content
        return "/review/"

    mixed = [*some(), ArchivedEvent.objects.get(unconfirmed=True), world.make(handler="gone")]
    waiting = outbox(now)
    seen = decisions.freeze({row.pk: 0 for row in waiting})
    pages = "/admin/django_amqp_events/outboxevent/"
    watched(now)
    dashboard = "/admin/django_amqp_events/dashboard/"
    return {
        "dashboard": lambda: dashboard,
        "topology": lambda: f"{dashboard}topology/",
        "retries": lambda: f"{dashboard}retries/",
        "outbox": lambda: f"{pages}?state=all",
        "outbox-event": lambda: f"{pages}{waiting[0].pk}/change/",
        "outbox-discarded": lambda: f"{pages}{waiting[-1].pk}/change/",
        "outbox-publish": lambda: f"{pages}decide/publish/?seen={seen}",
        "inbox": lambda: "/admin/django_amqp_events/inboxentry/",
        "list": lambda: f"{world.url('changelist')}?state=all",
        "detail": lambda: str(world.url("change", detail.pk)),
        "confirmation": lambda: asked("replay", mixed),
        "force": lambda: asked("force", late),
        "result": result,
        "editor": lambda: str(world.url("edit", mended.pk)),
        "review": review,
        "edited": lambda: str(world.url("change", mended.pk)),
    }


def watched(now: datetime) -> None:
    """A day of snapshots: the last one of this broker, with messages in queues and an alert."""
    from django_amqp_events import alerts, broker, conf, registry, topology
    from django_amqp_events.models import Snapshot
    from django_amqp_events.snapshots import Camera, Watcher

    settings = conf.get_settings()
    app = broker.celery_app(settings)
    camera = Camera(app, settings, topology.build(settings, registry.get_registry()))
    for hour in range(24, 0, -1):
        before = camera.take(now - timedelta(hours=hour))
        before.open = 40 - abs(12 - hour) * 3
        before.save()
    with broker.connection(app, timeout=10) as connection:
        channel = connection.channel()
        for queue, count in (
            ("billing.send_invoice", 42), ("billing:delay.8s", 9), ("billing:delay.512s", 17),
            ("billing:abyss", 1),
        ):  # fmt: skip
            for _ in range(count):
                channel.basic_publish(
                    channel.prepare_message(b"[[], {}, {}]"), exchange="", routing_key=queue
                )
        channel.close()
    Watcher(camera).look(now)
    seen = Snapshot.objects.latest("at")
    document = seen.about
    document["consumed"] = {"billing.send_invoice": (now - timedelta(minutes=50)).isoformat()}
    document["queues"]["billing.book"] |= {"consumers": 2, "published": 12.5, "delivered": 12.4}
    seen.document = json.dumps(document)
    seen.save()
    alerts.consider("growth", "", "More than 100 events came into the archive within an hour.",
                    now=now - timedelta(minutes=20))  # fmt: skip


def outbox(now: datetime) -> list[Any]:
    """Rows of every kind, the first one failed, the last one discarded; and an inbox."""
    from uuid import uuid4

    from django_amqp_events import outbox
    from django_amqp_events.models import InboxEntry, OutboxEvent

    body = b'[[], {"order_id": 4711, "customer": {"name": "Zo\xc3\xab", "country": "XX"}}, {}]'
    envelope = {
        "headers": {
            "task": "billing.invoice.sent",
            "event-id": "5c1d9d5e-58a7-4e6c-9fd9-0b8a2a2f3c11",
            "event-correlation-id": "basket-5",
            "event-published-at": now.isoformat(),
        },
        "properties": {"content_type": "application/json", "delivery_mode": 2},
    }
    refused = (
        "RabbitMQ refused 'billing.invoice.sent' (5c1d9d5e-58a7-4e6c-9fd9-0b8a2a2f3c11): a queue "
        "that is bound for it is full or rejects it; other queues may have it"
    )
    kinds: list[dict[str, Any]] = [
        {"attempts": 4, "error": refused, "due_at": now + timedelta(minutes=32)},
        {"attempts": 1, "error": refused, "due_at": now + timedelta(seconds=90)},
        {"name": "billing.invoice.paid", "due_at": now + timedelta(seconds=40)},
        {"due_at": now - timedelta(seconds=2)},
        {"service": "invoices", "due_at": now - timedelta(days=2)},
        {
            "attempts": 7,
            "error": refused,
            "due_at": now + timedelta(days=9999),
            "discarded_at": now - timedelta(minutes=50),
            "discarded_by": "ada",
            "discard_reason": "the customer's account is closed; nobody waits for it",
        },
    ]
    rows = [
        OutboxEvent.objects.create(
            **{
                "pk": outbox.new_id(),
                "service": "billing",
                "event_id": str(uuid4()),
                "name": "billing.invoice.sent",
                "exchange": "events",
                "envelope": json.dumps(envelope),
                "body": body,
                "size": len(body),
                "created_at": now - timedelta(minutes=3 * 7**number),
                **kind,
            }
        )
        for number, kind in enumerate(kinds)
    ]
    for number in range(6):
        InboxEntry.objects.create(
            pk=uuid4(),
            service="billing",
            handler=("book", "send_invoice")[number % 2],
            source="shop",
            event_id=str(uuid4()),
            name="shop.order.created",
            handled_at=now - timedelta(minutes=5**number),
        )
    return rows


def serve() -> Any:
    """Serve the project and its static files to somebody who is logged in."""
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.wsgi import get_wsgi_application

    project = StaticFilesHandler(get_wsgi_application())

    def application(environ: dict[str, Any], start: Any) -> Any:
        if environ["PATH_INFO"] == "/frame":
            start("200 OK", [("Content-Type", "text/html")])
            return [server.frame.encode()]
        if environ["PATH_INFO"] == "/frame.css":
            start("200 OK", [("Content-Type", "text/css")])
            return [b"body { margin: 0; background: gray } iframe { border: 0; display: block }"]
        if environ["PATH_INFO"] in POSTED:
            policy = ("Content-Security-Policy", POLICY)
            start("200 OK", [("Content-Type", "text/html; charset=utf-8"), policy])
            return [POSTED[environ["PATH_INFO"]]]
        environ["HTTP_COOKIE"] = f"sessionid={SESSION}; csrftoken={'x' * 32}"

        def with_policy(status: str, headers: list[Any], *more: Any) -> Any:
            return start(status, [*headers, ("Content-Security-Policy", POLICY)], *more)

        return project(environ, with_policy)

    server: Any = make_server("127.0.0.1", 0, application, WSGIServer, Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


SESSION = ""

if __name__ == "__main__":
    sys.exit(main())
