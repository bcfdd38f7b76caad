"""An archive, an outbox and a day of snapshots such as a service in trouble has them.

For what looks at pages: the tests in this folder, and scripts/screenshots.py.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from django.urls import reverse

from django_amqp_events.admin.action_pages import encode_selection
from django_amqp_events.archive import search_values, tables
from django_amqp_events.archive.batches import batch_states, preview
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.archive.selection import Selection
from django_amqp_events.models import (
    ArchivedEvent,
    FailureGroup,
    OutboxEvent,
    Replay,
    ReplayBatch,
    State,
)
from django_amqp_events.reasons import Reason
from tests.archive_rows import add_replay, make_outbox
from tests.unit.admin import admin_world as world

MISTAKES = (
    # exception, message, location, what the handler's own function is called
    ("billing.errors.TaxError", "there is no tax rate for 'XX'", "billing.tax", 28, "rate"),
    (
        "requests.exceptions.ConnectionError",
        "no route to mail.example",
        "billing.mail",
        9,
        "post",
    ),
    ("KeyError", "'customer'", "billing.handlers", 17, "send_invoice"),
)
ORDER = (
    b'[[], {"order_id": 4711, "customer": {"name": "Zo\xc3\xab", "country": "XX"}, '
    b'"total": "19.90", "lines": [{"sku": "A-1", "count": 2}, {"sku": "B-7"}]}, {}]'
)


def fill() -> dict[str, str]:
    """Fill the tables; returns the address of each page by its name, and ``session``.

    The topology is declared: replays really are published, to queues that nobody reads.
    """
    ada = User.objects.create_superuser("ada", password="secret")
    client = world.client_of(ada)
    now = datetime.now(UTC)
    pages = {"session": client.cookies["sessionid"].value}

    def url(model: str, name: str, *args: Any, query: str = "") -> str:
        path = reverse(f"admin:django_amqp_events_{model}_{name}", args=args)
        return f"{path}?{query}" if query else path

    def asked(name: str, *rows: ArchivedEvent) -> str:
        return url("archivedevent", name, query=f"seen={world.frozen(*rows)}")

    with transaction.atomic():
        for number in range(36):
            mistake(number % 7 % 3, now - timedelta(minutes=3 + number**2 * 1.05), number)
    event = _event(now)
    for number in range(8):
        world.make(event_id=f"twice-{number}", handler="book", correlation_id="basket-9")
    # Discarded one by one while somebody looks at the list.
    live = [world.make(event_id=f"live-{number}", handler="book") for number in range(7)]
    # Long names, in a list that is narrow.
    world.make(
        name="warehouse.reservation.cancellation_requested",
        handler="send_reservation_cancellation_to_customer",
        exception="warehouse.exceptions.ReservationCancellationNotAllowedError",
        location="warehouse.reservations.cancellation.handlers:218 in check_the_reservation_period",
        last_failed_at=now - timedelta(hours=2, minutes=1),
    )
    gone = world.make(handler="gone", body=ORDER)
    spare = [world.make(handler="book"), world.make(handler="book")]
    late = [world.overdue(), world.overdue(handler="book")]
    world.make(State.DISCARDED)
    edited = _edited(client, url)
    world.make(event_id=edited.event_id, handler="book", state=State.SUCCEEDED)
    unconfirmed = mistake(0, now - timedelta(minutes=40), 3)
    ArchivedEvent.objects.filter(pk=unconfirmed.pk).update(
        unconfirmed=True, error="no confirm came within 10 seconds"
    )
    failure_groups.rebuild()
    event.refresh_from_db()
    assert event.group_id is not None
    group = FailureGroup.objects.get(pk=event.group_id)
    failure_groups.write(
        group.pk,
        by="bob",
        note="The shop sends XX where the country is not known.\nBilling 1.2 knows it.",
        assignee="ada",
        ticket="https://tickets.example/BILL-1207",
        seen=group.edits,
        now=now - timedelta(minutes=6),
    )
    few = list(ArchivedEvent.objects.filter(state="archived", unconfirmed=False)[:3])
    mixed = [*few, unconfirmed, gone]
    dashboard = url("dashboard", "changelist")
    pages |= {
        # First, while the snapshot is fresh.
        "dashboard": dashboard,
        "topology": f"{dashboard}topology/",
        "list": url("archivedevent", "changelist"),
        "event": url("archivedevent", "change", event.pk),
        "spare": url("archivedevent", "change", spare[0].pk),
        # Their order was placed twice, so one is discarded.
        "twice": url("archivedevent", "changelist", query="q=twice-&state=archived"),
        "overdue": url("archivedevent", "change", late[0].pk),
        "edited": url("archivedevent", "change", edited.pk),
        "confirm": asked("replay", *mixed),
        "discard": asked("discard", *few),
        "discard-spare": asked("discard", spare[1]),
        "force": asked("force", *late),
        "edit": url("archivedevent", "edit", edited.pk),
        **{each.event_id: url("archivedevent", "change", each.pk) for each in live},
        "groups": url("failuregroup", "changelist"),
        "group": url("failuregroup", "change", group.pk),
    }
    pages |= {
        f"batch-{name}": url("replaybatch", "change", pk) for name, pk in _batches(now).items()
    }
    pages["batches"] = url("replaybatch", "changelist")
    done = ReplayBatch.objects.get(state=ReplayBatch.State.DONE)
    pages["batch-events"] = f"{url('archivedevent', 'changelist')}?state=all&batch={done.pk}"
    tables.repair(Selection(state=None).queryset(), search_values.correct)
    waiting = outbox(now)
    watched(now, group)
    client.get(pages["list"])  # consume the messages so that no later page shows them
    return pages | {
        "find": f"{dashboard}find/?q=order_id%3D4711",
        "find-nothing": f"{dashboard}find/?q=order_id%3D1",
        "outbox": url("outboxevent", "changelist", query="state=all"),
        "outbox-event": url("outboxevent", "change", waiting[0].pk),
        "outbox-discard": url("outboxevent", "discard")
        + f"?seen={encode_selection({row.pk: 0 for row in waiting})}",
    }


def mistake(kind: int, at: datetime, number: int) -> ArchivedEvent:
    """An event that failed then, as handlers with this mistake fail."""
    exception, message, module, line, function = MISTAKES[kind]
    row = world.make(
        name=("shop.order.created", "shop.order.paid")[number % 2],
        handler=("send_invoice", "book")[kind == 2 and number % 2],
        exception=exception,
        message=message,
        location=f"{module}:{line} in {function}",
        reason=("exhausted", "failed")[kind % 2],
        attempts=(4, 1)[kind % 2],
        replays=int(number % 5 == 0),
        published_at=at - timedelta(seconds=63),
        first_failed_at=at - timedelta(seconds=62),
        last_failed_at=at,
        mirrored_at=at + timedelta(seconds=1),
        state_since=at,
        correlation_id=f"basket-{number // 2}",
        body=ORDER.replace(b"4711", b"%d" % (4711 + number)),
    )
    # The page's words come from the failure's own document.
    failure = row.failure_set.get()
    document = json.loads(failure.document)
    document |= {
        "reason": row.reason,
        "exception": {"type": exception, "message": message},
        "frames": [
            {"file": f"/srv/{module.replace('.', '/')}.py", "line": line, "module": module}
            | {"function": function}
        ],
    }
    failure.document = json.dumps(document)
    failure.save()
    return row


def _event(now: datetime) -> ArchivedEvent:
    """One that has been through much."""
    at = now - timedelta(minutes=24)
    history = world.document()["history"]
    row = world.make(
        error="no queue is bound to billing:replay for billing.send_invoice",
        replays=1,
        causation_id="6f1f0c11-0000-4000-8000-000000000001",
        body=ORDER,
        published_at=at - timedelta(seconds=70),
        first_failed_at=at - timedelta(seconds=68),
        last_failed_at=at,
        mirrored_at=at + timedelta(seconds=1),
        state_since=at,
        failure=world.document(
            history=[
                {**each, "at": (at - timedelta(seconds=68 - 34 * number)).isoformat()}
                for number, each in enumerate(history)
            ]
        ),
    )
    add_replay(
        row,
        state=Replay.State.RETURNED,
        error=row.error,
        requested_at=now - timedelta(minutes=9),
        publishes=1,
    )
    return row


def _edited(client: Client, url: Any) -> ArchivedEvent:
    """One that was edited and replayed twice, in vain."""
    at = datetime.now(UTC) - timedelta(hours=3)
    history = [
        {**each, "at": (at - timedelta(seconds=number)).isoformat()}
        for number, each in zip((9, 5, 0), world.document()["history"], strict=True)
    ]
    row = world.make(
        body=ORDER,
        event_id="order-4711",
        published_at=at - timedelta(seconds=10),
        last_failed_at=at,
        mirrored_at=at,
        failure=world.document(history=history, deaths=[]),
    )
    payload = json.loads(ORDER)[1]
    for country in ("FR", "DE"):
        row.refresh_from_db()
        payload["customer"]["country"] = country
        form = {"version": row.version, "base": 0, "payload": json.dumps(payload)}
        answer = client.post(
            url("archivedevent", "edit", row.pk),
            {**form, "step": "publish", "reason": f"the customer is in {country}"},
        )
        assert answer.status_code == 302, answer.content
        replayed = Replay.objects.get(event=row, number=row.replays + 1)
        Replay.objects.filter(pk=replayed.pk).update(state=Replay.State.FAILED)
        ArchivedEvent.objects.filter(pk=row.pk).update(state=State.ARCHIVED)
    row.refresh_from_db()
    return row


def _batches(now: datetime) -> dict[str, Any]:
    """Create a draft, a running, a paused and a finished batch."""
    made: dict[str, Any] = {}
    title = "All with handler send_invoice, failed day"
    open_ones = tables.rows().filter(state=State.ARCHIVED)
    found = open_ones.filter(handler="send_invoice")
    draft = batch_states.freeze(open_ones, by="ada", title="All that are open, failed day")
    preview.preview_batch(draft)
    made["draft"] = draft.pk
    counts = {
        "running": {"succeeded": 17, "failed": 1, "published": 6, "skipped": 2},
        "paused": {"succeeded": 8, "failed": 10, "skipped": 1},
        "done": {"succeeded": 28, "failed": 1, "skipped": 3},
    }
    for name, states in counts.items():
        size = sum(states.values()) if name == "done" else 30
        batch = batch_states.freeze(found[:size], by="ada", title=title)
        batch_states.start(
            batch.pk, by="ada", reason="tax table fixed in 1.2", rate=5, canary=3, threshold=20
        )
        everything = list(batch_states.events(batch.pk).order_by("position"))
        at = 0
        for state, number in states.items():
            for each in everything[at : at + number]:
                each.state = state
                if state == "skipped":
                    each.error = "another user or tab changed it first; its state is now discarded"
            at += number
        Replay.objects.bulk_update(everything, ["state", "error"])
        if name == "paused":
            batch_states.pause(
                batch.pk,
                by="",
                note="10 of the last 18 events failed again: look at one before you resume",
            )
        batch_states.rows().filter(pk=batch.pk).update(trusted=True)
        batch_states.count(batch.pk)
        made[name] = batch.pk
    batch_states.rows().filter(pk=made["running"]).update(
        runner=uuid4(), leased_until=now + timedelta(hours=8)
    )
    batch_states.rows().filter(pk=made["done"]).update(
        state=ReplayBatch.State.DONE, finished_at=now - timedelta(minutes=1)
    )
    return made


def watched(now: datetime, group: FailureGroup) -> None:
    """A day of snapshots: the last one of this broker, with messages in queues and an alert."""
    from django_amqp_events import conf
    from django_amqp_events.broker import connection as connection_module
    from django_amqp_events.broker import topology
    from django_amqp_events.broker.connection import celery_app
    from django_amqp_events.declare import registry
    from django_amqp_events.models import Snapshot
    from django_amqp_events.monitor import alerts
    from django_amqp_events.monitor.snapshots import SnapshotLoop

    settings = conf.get_settings()
    app = celery_app(settings)
    loop = SnapshotLoop(app, settings, topology.build(settings, registry.get_registry()))
    for hour in range(24, 0, -1):
        before = loop.take(now - timedelta(hours=hour), {})
        before.open = max(6 + hour % 4, 46 - 3 * hour)
        before.save()
    with connection_module.connection(app, timeout=10) as connection:
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
    loop.look(now)
    seen = Snapshot.objects.latest("at")
    document = seen.about
    document["consumed"] = {"billing.send_invoice": (now - timedelta(minutes=50)).isoformat()}
    document["queues"]["billing.book"] |= {
        "consumers": 2,
        "published": 12.5,
        "delivered": 12.4,
        "meaning": "empty",
    }
    seen.document = json.dumps(document)
    seen.save()
    growth = Reason("alert-growth", most=5)
    alerts.update_alert("growth", "", growth, now=now - timedelta(minutes=20))
    back = Reason("alert-group", group=group, open=3, what="TaxError", frame="billing.tax in rate")
    alerts.update_alert("group_back", str(group.pk), back, now=now - timedelta(minutes=3))


def outbox(now: datetime) -> list[OutboxEvent]:
    """Rows of every kind, the first one failed, the last one discarded."""
    body = b'[[], {"order_id": 4711, "customer": {"name": "Zo\xc3\xab", "country": "XX"}}, {}]'
    refused = Reason("nacked")
    kinds: list[dict[str, Any]] = [
        {"attempts": 4, "error": refused, "due_at": now + timedelta(minutes=32)},
        {"attempts": 1, "error": refused, "due_at": now + timedelta(seconds=90)},
        {"name": "billing.invoice.issued", "due_at": now + timedelta(seconds=40)},
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
    return [
        make_outbox(
            **{
                "name": "billing.invoice.sent",
                "body": body,
                "created_at": now - timedelta(minutes=3 * 7**number),
                **kind,
            }
        )
        for number, kind in enumerate(kinds)
    ]
