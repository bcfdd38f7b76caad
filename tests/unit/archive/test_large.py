"""Every page with 5 rows of everything and with 30: as many queries, and no count without an end.

What it takes with a million is measured by ``benchmarks.pages``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_amqp_events import databases
from django_amqp_events.archive import tables
from django_amqp_events.archive.batches import batch_states, preview
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.databases import Now
from django_amqp_events.models import (
    Alert,
    ArchiveAction,
    ArchivedEvent,
    OutboxEvent,
    Replay,
    ReplayBatch,
    SearchValue,
    Snapshot,
    State,
)
from django_amqp_events.reasons import Reason
from tests.archive_rows import add_failure, add_replay, add_revision, make_inbox, make_outbox

from ..admin import admin_world as world
from ..admin.admin_world import client_of, document, make

pytestmark = pytest.mark.django_db

#: The event whose pages are opened.
OPENED = "opened-1"
#: A count of which SQL bounds what is counted: by LIMIT below it, by ids, by a batch, or by hours.
BOUNDED = re.compile(r'LIMIT \d+\) |\bIN \(|"batch_id" = |"(failed_at|state_since)" < ')


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # What is asked again after a while would be more queries on a slow machine.
    monkeypatch.setattr(databases, "REMEMBERED_SECONDS", 3600.0)
    monkeypatch.setattr(databases, "_has_table", {})
    with override_settings(**world.SETTINGS, AMQP_EVENTS=world.EVENTS):
        yield


def fill(number: int) -> None:
    """Make so many rows of everything that pages show."""
    states = (State.ARCHIVED, State.ARCHIVED, State.REPLAYING, State.SUCCEEDED, State.DISCARDED)
    for n in range(number):
        row = make(
            states[n % 5],
            handler=("send_invoice", "book")[n % 2],
            exception=f"billing.errors.Error{n % 7}",
            location=f"billing.tax:28 in rate{n}",
            replays=1,
        )
        SearchValue.objects.create(event=row, path="order_id", value="17")
        replay = add_replay(row)
        ArchiveAction.objects.create(
            event=row, at=datetime.now(UTC), action="replay", by="ada", replay_id=replay.pk
        )
        discarded = {"discarded_at": Now()} if n % 3 == 0 else {}
        make_outbox(due=0, name=f"shop.order.{n}", attempts=n % 2, **discarded)
        make_inbox(str(uuid4()))
        Snapshot.objects.create(at=datetime.now(UTC), service="billing", seen=True, document="{}")
    opened = ArchivedEvent.objects.filter(event_id=OPENED, handler="book").first()
    opened = opened or make(handler="book", event_id=OPENED)
    # Few: a page shows the last of them.
    replays = opened.replays + number // 5
    for n in range(opened.replays + 1, replays + 1):
        # One row of each table that is shown with an event.
        replay = add_replay(opened, n, revision=add_revision(opened, n))
        add_failure(opened, replay=replay, document=json.dumps(document()))
        ArchiveAction.objects.create(event=opened, at=opened.mirrored_at, action="discard")
        make(event_id=opened.event_id, handler=f"other-{n}")
        Alert.objects.create(
            service="billing", kind="growth", details=Reason("alert-growth", most=1), key=n,
            since=opened.mirrored_at, last=opened.mirrored_at,
        )  # fmt: skip
    ArchivedEvent.objects.filter(pk=opened.pk).update(replays=replays)
    failure_groups.rebuild()
    batch = batch_states.freeze(tables.rows(), by="ada", title="all")
    preview.preview_batch(batch)
    batch_states.start(batch.pk, by="ada", reason="all")
    skipped = Replay.objects.filter(batch=batch, event__state=State.DISCARDED)
    skipped.update(state=Replay.State.SKIPPED, error="it is discarded")
    batch_states.freeze(tables.rows(), by="ada", title="a draft")


def pages(client: Any) -> dict[str, Callable[[], Any]]:
    def of(model: str, page: str, *args: Any) -> str:
        return reverse(f"admin:django_amqp_events_{model}_{page}", args=args)

    def got(url: str, **query: str) -> Callable[[], Any]:
        return lambda: client.get(url, query)

    events = of("archivedevent", "changelist")
    row = ArchivedEvent.objects.get(event_id=OPENED, handler="book")
    group = row.group_id
    batch = ReplayBatch.objects.filter(state="running")[0].pk
    draft = ReplayBatch.objects.filter(state="draft")[0].pk
    waiting = OutboxEvent.objects.filter(discarded_at=None)[0].pk
    found = {
        "event": got(of("archivedevent", "change", row.pk)),
        "group": got(of("failuregroup", "change", group)),
        "batch": got(of("replaybatch", "change", batch)),
        "draft": got(of("replaybatch", "change", draft)),
        "outbox: event": got(of("outboxevent", "change", waiting)),
    }
    for page in ("changelist", "topology"):
        found[f"dashboard: {page}"] = got(of("dashboard", page))
    found["dashboard: find"] = got(of("dashboard", "find"), q=OPENED)
    lists: dict[str, list[dict[str, str]]] = {
        "archivedevent": [
            *({"state": each} for each in ("all", "in_progress", "overdue")),
            {"state": "succeeded"}, {"state": "discarded"},
            {"handler": "book"}, {"event": row.name}, {"exception": row.exception},
            {"reason": row.reason}, {"failed": "hour"},
            {"batch": str(batch)}, {"batch": f"{batch}.skipped"},
            {"group": str(group)}, {"q": row.event_id}, {"q": row.event_id[:3]},
            {"q": str(row.pk)}, {"o": "6"},
        ],
        "failuregroup": [
            *({"state": each} for each in ("all", "back", "right")),
            {"handler": "book"}, {"exception": row.exception}, {"assignee": ""}, {"q": "Error"},
            {"o": "-2"},
        ],
        "outboxevent": [
            *({"state": each} for each in ("all", "failed", "overdue", "discarded")),
            {"name": "shop.order.1"}, {"q": "a"}, {"o": "-1"},
        ],
        "replaybatch": [],
    }  # fmt: skip
    for model, queries in lists.items():
        for number, query in enumerate(({}, *queries)):
            found[f"{model}: {number} {'+'.join(query)}"] = got(of(model, "changelist"), **query)

    def posted(url: str, chosen: Any = (), action: str = "") -> Callable[[], Any]:
        return lambda: client.post(url, world.select(chosen, action) if action else {})

    chosen = list(ArchivedEvent.objects.filter(state=State.ARCHIVED))
    found["replay"] = posted(events, chosen, "replay")
    found["discard"] = posted(events, chosen, "discard")
    found["discard of the outbox"] = posted(
        of("outboxevent", "changelist"),
        list(OutboxEvent.objects.filter(discarded_at=None, attempts=1)),
        "discard",
    )
    return found


def measured(client: Any) -> dict[str, list[str]]:
    found = {}
    for name, page in pages(client).items():
        with CaptureQueriesContext(connection) as captured:
            assert page().status_code == 200, name
        # MariaDB quotes names differently.
        found[name] = [each["sql"].replace("`", '"') for each in captured]
    return found


def test_pages_have_constant_queries_and_capped_counts():
    client = client_of(User.objects.create_superuser("ada"))
    fill(5)
    measured(client)  # what is read once in a process
    few = measured(client)
    fill(25)
    many = measured(client)
    grown = {
        name: (len(few[name]), len(queries))
        for name, queries in many.items()
        if len(queries) != len(few[name])
    }
    assert not grown
    assert max(map(len, many.values())) <= 27
    endless = {
        (name, sql)
        for name, queries in many.items()
        for sql in queries
        if "COUNT(" in sql and not BOUNDED.search(sql)
    }
    assert not endless
    read = {name for name, queries in many.items() if any('"document"' in sql for sql in queries)}
    assert {name.partition(":")[0] for name in read} == {"event", "group", "dashboard"}
    # What may be large is read for one row at most.
    large = re.compile('"(body|headers_raw|envelope)"')
    read = {name for name, queries in many.items() if any(map(large.search, queries))}
    assert read == {"event", "outbox: event"}
