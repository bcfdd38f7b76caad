"""The archive in the admin: pages, permissions, actions. No broker: that is tests/integration."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.contrib.admin import site
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.urls import reverse
from django_celery_results.models import TaskResult

from django_amqp_events.admin import (
    ArchivedEventAdmin,
    action_pages,
    formatting,
    lists,
)
from django_amqp_events.archive import replay, tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.broker.publish_errors import unavailable_errors
from django_amqp_events.exceptions import UnroutableError
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    FailureGroup,
    OutboxEvent,
    Replay,
    SearchValue,
    State,
)
from django_amqp_events.monitor.state_texts import STATES
from django_amqp_events.reasons import Reason
from tests.archive_rows import add_failure, add_replay, make_outbox, seen
from tests.conftest import ONE, Replicas, routed_by

from .admin_world import (
    BEFORE,
    DECISIONS,
    LISTED,
    PERMISSIONS,
    RIGHTS,
    Page,
    client_of,
    frozen,
    ids_in,
    make,
    overdue,
    page,
    said,
    select,
    url,
    user,
)

pytestmark = pytest.mark.django_db

#: Nobody has this id.
NOBODY = UUID("c0ffee00-0000-4000-8000-000000000000")


@pytest.fixture
def ada():
    return client_of(user(*PERMISSIONS))


# -- list


def test_search_values_are_shown_to_users_who_may_see_payloads(ada):
    row = make(name="shop.order.created")
    for number in range(6):
        SearchValue.objects.create(event=row, path="line.sku", value=f"<A{number}>")
    html = ada.get(url("changelist")).content.decode()
    shown = "line.<wbr>sku=&lt;A{}&gt;"
    assert [shown.format(number) in html for number in range(6)] == [True] * 4 + [False] * 2
    assert "</span> …" in html
    limited = client_of(user("view", name="bob")).get(url("changelist")).content.decode()
    assert "line." not in limited


def test_filters(ada):
    rows = {
        "open": make(),
        "old": make(
            handler="book",
            name="shop.order.paid",
            reason="malformed",
            exception="KeyError",
            last_failed_at=datetime.now(UTC) - timedelta(days=9),
        ),
        "queued": make(State.QUEUED),
        "replaying": make(State.REPLAYING, state_since=datetime.now(UTC)),
        "overdue": overdue(),
        "succeeded": make(State.SUCCEEDED),
        "discarded": make(State.DISCARDED),
    }
    names = {row.pk: name for name, row in rows.items()}
    for query, found in (
        ("", {"open", "old"}),
        ("state=archived", {"open", "old"}),
        ("state=in_progress", {"queued", "replaying", "overdue"}),
        ("state=overdue", {"overdue"}),
        ("state=succeeded", {"succeeded"}),
        ("state=discarded", {"discarded"}),
        ("state=all", set(rows)),
        ("state=nonsense", set()),
        ("handler=book", {"old"}),
        ("handler=", set()),
        ("handler=bo%00ok", set()),
        ("event=shop.order.paid", {"old"}),
        ("reason=malformed", {"old"}),
        ("exception=KeyError", {"old"}),
        ("failed=day", {"open"}),
        ("failed=hour", set()),
        ("failed=nonsense", set()),
        ("failed=older-week", set()),
        ("failed=day&handler=book", set()),
    ):
        response = ada.get(f"{url('changelist')}?{query}")
        page(response)
        assert {names[pk] for pk in ids_in(response)} == found, query


def test_distinct_values_are_those_of_the_table(monkeypatch):
    assert lists.distinct(ArchivedEvent.objects.all(), "handler") == []
    for name in ("b", "a", "b", "", "ä", "c"):
        make(handler=name)
    assert lists.distinct(ArchivedEvent.objects.all(), "handler") == ["", "a", "b", "c", "ä"]
    monkeypatch.setattr(lists, "VALUES", 3)
    assert lists.distinct(ArchivedEvent.objects.all(), "handler") == ["", "a", "b"]


def test_search_finds_ids_in_any_state(ada):
    row = make(State.SUCCEEDED, event_id="order-77", correlation_id="basket-9")
    replayed = add_replay(row)
    make(event_id="Order-77")
    make(event_id="order-8", correlation_id="order")
    for term in ("order-77", "order-7", "basket-9", "bask", str(row.pk), row.pk.hex):
        assert row.pk in ids_in(ada.get(url("changelist"), {"q": term})), term
    assert ids_in(ada.get(url("changelist"), {"q": str(replayed.pk)})) == {row.pk}
    assert ids_in(ada.get(url("changelist"), {"q": "order-7"})) == {row.pk}
    for term in ("rder-77", "%", "_rder-77", "TaxError", str(uuid4())):
        assert ids_in(ada.get(url("changelist"), {"q": term})) == set(), term
    assert ids_in(ada.get(url("changelist"), {"q": "order-77", "state": "archived"})) == set()


def test_the_list_counts_to_its_cap(ada, monkeypatch):
    monkeypatch.setattr(lists, "CAP", 3)
    for _ in range(5):
        make()
    response = ada.get(url("changelist"))
    assert response.context["cl"].result_count == 3
    assert "There are more than" in page(response).words
    ArchivedEvent.objects.filter(
        pk__in=list(ArchivedEvent.objects.values_list("pk", flat=True)[:2])
    ).delete()
    assert "There are more than" not in page(ada.get(url("changelist"))).words


# -- detail


def test_detail_page_shows_the_event(ada):
    row = make(error="no queue is bound", causation_id="cause-1", replays=1)
    made = add_replay(row, state=Replay.State.RETURNED, error="no queue is bound")
    words = page(ada.get(url("change", row.pk))).words
    for word in (
        "no queue is bound",
        "billing.errors.TaxError",
        "ask the tax office",
        "attempt 3 failed, and it was the last one",
        "rate = tax.rate(country)",
        "replay 1 requested by ada",
        '"order_id": 7',
        "traceparent",
        "cause-1",
        "billing:delay.1s",
        str(made.pk),
        row.task_id,
    ):
        assert word in words, word
    html = ada.get(url("change", row.pk)).content.decode()
    assert f"?q={row.event_id}" in html
    assert "?q=basket-5" in html
    assert "?q=cause-1" in html
    title = f"shop.order.created for send_invoice ({row.event_id[:8]}…)"
    assert ada.get(url("change", row.pk)).context["title"] == title


@pytest.mark.parametrize("state", list(State))
def test_detail_page_explains_the_state(ada, state):
    """And refreshes itself while a replay is in progress."""
    response = ada.get(url("change", make(state).pk))
    meaning, remedy = map(str, STATES[state])
    words = page(response).words
    assert meaning in words
    assert remedy in words
    assert ("live.js" in response.content.decode()) == (state in (State.QUEUED, State.REPLAYING))


def test_an_event_that_cannot_be_replayed_says_why(ada):
    row = make(handler="gone", group=None)  # as an event of a backfill has none
    found = page(ada.get(url("change", row.pk)))
    assert "there is no handler 'gone'" in found.words
    assert "Replay…" not in found.words
    assert "Discard…" in found.words


def test_task_results_are_linked_with_permission(ada):
    row = make()
    made = add_replay(row)
    results = [
        TaskResult.objects.create(task_id=task_id, status=status)
        for task_id, status in ((row.task_id, "FAILURE"), (made.task_id, "SUCCESS"))
    ]
    links = [reverse("admin:django_celery_results_taskresult_change", args=[r.pk]) for r in results]
    before = ada.get(url("change", row.pk)).content.decode()
    assert not [link for link in links if link in before]
    boss = user(*PERMISSIONS, name="boss")
    boss.user_permissions.add(Permission.objects.get(codename="view_taskresult"))
    html = client_of(boss).get(url("change", row.pk)).content.decode()
    assert [link for link in links if link in html] == links
    # The project's own site does not show them.
    elsewhere = client_of(boss).get(url("change", row.pk, site="office")).content.decode()
    assert row.task_id in elsewhere
    assert not [link for link in links if link in elsewhere]


def test_a_page_takes_the_context_of_a_subclass(rf):
    request = rf.get("/")
    request.user = user(*PERMISSIONS)
    pages = ArchivedEventAdmin(ArchivedEvent, site)
    shown: Any = pages.change_view(request, str(make().pk), extra_context={"title": "Mine"})
    assert shown.context_data["title"] == "Mine"


# -- payload


def test_the_raw_body_is_a_file_byte_for_byte(ada):
    row = make(body=bytes(range(256)) * 10)
    response = ada.get(url("payload", row.pk))
    assert response.content == bytes(range(256)) * 10
    assert response["Content-Type"] == "application/octet-stream"
    assert response["Content-Disposition"] == f'attachment; filename="{row.pk}.bin"'
    assert response["X-Content-Type-Options"] == "nosniff"
    missing = ada.get(url("payload", uuid4()), follow=True)
    assert "There is no archived event" in said(missing)[0]


def test_large_body_is_cut(ada):
    body = b'[[], {"x": "' + b"\xc3\xa4" * (2 * formatting.SHOWN) + b'"}, {}]'
    row = make(body=body)
    response = ada.get(url("change", row.pk))
    assert "The first 256" in page(response).words
    assert len(response.content) < 2 * formatting.SHOWN
    assert ada.get(url("payload", row.pk)).content == body


# -- permissions


def test_every_permission_is_documented_and_asked():
    docs = "".join(path.read_text() for path in Path("docs").glob("*.md"))
    for model in (ArchivedEvent, OutboxEvent, FailureGroup):
        pages, meta = site.get_model_admin(model), model._meta
        names = [codename.removesuffix(f"_{meta.model_name}") for codename, _ in meta.permissions]
        actions = [action.permission for action in getattr(pages, "row_actions", {}).values()]
        assert set(actions) <= set(names)
        for name in names:
            assert callable(getattr(pages, f"has_{name}_permission"))
            assert f"`{name}_{meta.model_name}`" in docs


def decided(row: ArchivedEvent) -> bool:
    row.refresh_from_db()
    return row.version != 0 or row.state == State.QUEUED


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("decision", DECISIONS)
def test_each_action_needs_its_permission(decision, allowed, broker):
    """With `view`, its own permission is enough, and all others together are not."""
    row = overdue() if BEFORE[decision] == State.REPLAYING else make(BEFORE[decision])
    right = RIGHTS.get(decision, decision)
    others = [each for each in PERMISSIONS if each not in ("view", right)]
    somebody = client_of(user("view", *([right] if allowed else others)))
    # The list's action.
    html = somebody.get(url("changelist"), {"state": "all"}).content.decode()
    assert (f'value="{decision}_selected"' in html) == (allowed and decision in LISTED)
    # The button.
    html = somebody.get(url("change", row.pk)).content.decode()
    assert (url(decision) in html) == allowed
    # The action's post, the page that asks, the post that does it.
    if decision in LISTED:
        listed = url("changelist") + "?state=all"
        asked = somebody.post(listed, select([row], decision), follow=True)
        assert ("seen" in page(asked).fields) == allowed
    assert somebody.get(url(decision), {"seen": frozen(row)}).status_code == (
        200 if allowed else 403
    )
    done = somebody.post(url(decision), {"seen": frozen(row), "reason": "because"})
    assert done.status_code == (302 if allowed else 403)
    assert decided(row) == allowed
    assert len(broker.messages) == (1 if allowed and decision in {"replay", "force"} else 0)


def test_strangers_are_asked_to_log_in(client):
    row = make()
    for name in DECISIONS:
        response = client.post(url(name), {"seen": frozen(row), "reason": "x"})
        assert response.status_code == 302
        assert "/login/" in response["Location"]
    assert not decided(row)


# -- confirmation


def test_confirmation_shows_routes_and_skipped_events(ada):
    rows = [make(), make(handler="book"), make(handler="send_bill"), make(handler="gone")]
    response = ada.post(url("changelist"), select(rows, "replay"))
    found = page(response)
    for word in (
        "Replay 3 events?",
        "3 of 4 can be processed",
        "billing.send_invoice",
        "billing.book",
        "billing:replay",
        "archived as send_bill",
        "there is no handler 'gone'",
        "Delivery is at least once",
    ):
        assert word in found.words, word
    assert action_pages.decode_selection(found.fields["seen"]) == seen(*rows[:3])
    assert "may be on" not in found.words
    assert "succeeded" not in found.words


def test_confirmation_warns_of_duplicates(ada):
    row = make(unconfirmed=True, replays=1)
    add_replay(row, state=Replay.State.SUCCEEDED)
    words = page(ada.get(url("replay"), {"seen": frozen(row)})).words
    assert "1 of 1 may already be published" in words
    assert "1 of 1 already has a successful replay" in words
    late = overdue()
    words = page(ada.get(url("force"), {"seen": frozen(late)})).words
    assert "expect the handler to run twice" in words
    for word in ("manage.py events_status", "events_mirror", "graveyard", "both would run"):
        assert word in words, word
        assert word in page(ada.get(url("change", late.pk))).words, word
    killer = make(reason="poison")
    words = page(ada.get(url("replay"), {"seen": frozen(killer, make())})).words
    assert "1 of 2 is poison: it killed its worker process repeatedly" in words
    assert "billing.errors.TaxError: there is no tax rate for 'XX'" in words
    fresh = make(State.REPLAYING, state_since=datetime.now(UTC))
    found = page(ada.get(url("force"), {"seen": frozen(fresh)}))
    assert "its replay is not overdue" in found.words
    assert "The event cannot be processed." in found.words
    assert "seen" not in found.fields


def test_too_large_selection_names_the_command(ada, monkeypatch):
    rows = [make() for _ in range(4)]
    monkeypatch.setattr(ArchivedEventAdmin, "limit", 3)
    response = ada.post(
        url("changelist"), select(rows[:1], "replay", select_across="1"), follow=True
    )
    assert "<code>manage.py events_replay --background</code>" in said(response)[0]


def test_forged_forms_name_no_events(ada, broker):
    long = ",".join(f"{number:032x}:1" for number in range(2_001))
    pairs = (f"{NOBODY.hex}:99999999999", f"{NOBODY}:1", f"{NOBODY.hex}:-1", long)
    for wrong in ("", "nonsense", ":", ",", *pairs):
        for response in (
            ada.get(url("replay"), {"seen": wrong[:2_000]}, follow=True),
            ada.post(url("replay"), {"seen": wrong}, follow=True),
        ):
            assert "names no events" in said(response)[0], wrong[:80]
    assert not broker.messages
    row = make()
    for pk in ("", "x", "'"):
        form = {**select([row], "discard"), "_selected_action": [pk]}
        assert (
            "Some event ids are invalid" in said(ada.post(url("changelist"), form, follow=True))[0]
        )
    for across in ("\N{SUPERSCRIPT TWO}", "x", "-1", "1"):
        form = select([row], "discard", select_across=across)
        assert "Discard 1 event?" in page(ada.post(url("changelist"), form)).words


def test_a_discard_needs_a_reason(ada):
    row = make()
    fields = page(ada.get(url("discard"), {"seen": frozen(row)})).fields
    for reason in ("", "   ", "x\0y"):
        response = ada.post(url("discard"), {**fields, "reason": reason})
        assert action_pages.decode_selection(page(response).fields["seen"]) == seen(row)
        assert not decided(row)
    response = ada.post(url("discard"), {**fields, "reason": "a test order"}, follow=True)
    assert said(response) == ["1 event discarded."]
    row.refresh_from_db()
    assert row.state == State.DISCARDED
    action = ArchiveAction.objects.get()
    assert (action.action, action.by, action.reason) == ("discard", "ada", "a test order")
    words = page(ada.get(url("change", row.pk))).words
    assert "discarded by ada a test order" in words


@pytest.mark.django_db(transaction=True)
def test_a_project_with_atomic_requests_can_decide(ada, broker, monkeypatch):
    row = make()
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    assert ada.get(url("change", row.pk)).status_code == 200
    response = ada.post(url("replay"), {"seen": frozen(row), "reason": ""}, follow=True)
    assert "1 event published" in said(response)[0]
    assert len(broker.messages) == 1


@pytest.mark.parametrize("chunk", [200, 5])
def test_identical_failures_are_reported_once(ada, broker, monkeypatch, chunk):
    """The errors in logs name each event; those of rows and messages do not."""
    why = Reason.of("no connection to RabbitMQ")
    monkeypatch.setattr(replay, "CHUNK", chunk)
    rows = [make() for _ in range(7)]
    monkeypatch.setattr(
        broker,
        "publish",
        lambda messages, mandatory: unavailable_errors(messages, why),
    )
    response = ada.post(url("replay"), {"seen": frozen(*rows), "reason": ""}, follow=True)
    told = ["7 events not published: no connection to RabbitMQ"]
    if chunk == 5:
        told = [
            "5 events not published: no connection to RabbitMQ",
            "2 events not processed. Stopped: no connection to RabbitMQ",
        ]
    assert said(response) == told
    errors = [row.error for row in ArchivedEvent.objects.exclude(error="")]
    assert errors == [why] * min(chunk, 7)


def test_reasons_that_are_many_are_counted(ada, broker):
    rows = [make() for _ in range(9)]
    broker.errors = [UnroutableError(f"nobody {number}") for number in (1, 1, 2, 3, 4, 5, 6, 7, 7)]
    response = ada.post(url("replay"), {"seen": frozen(*rows), "reason": ""}, follow=True)
    assert len(said(response)) == 6
    last = "2 more not shown"
    assert said(response)[-1] == last


@pytest.mark.parametrize("use_tz", [True, False])
def test_times_are_in_the_time_zone_of_the_project(settings, use_tz):
    """Two hours that look the same on that clock are told apart in the data, not on the page."""
    settings.USE_TZ = use_tz
    settings.TIME_ZONE = "America/New_York"
    at = datetime(2026, 11, 1, 5, 30, tzinfo=UTC)
    row = make(first_failed_at=at, last_failed_at=at + timedelta(hours=1))
    row.refresh_from_db()
    assert (row.first_failed_at, row.last_failed_at) == (at, at + timedelta(hours=1))
    office = client_of(user(*PERMISSIONS))
    page = Page(office.get(url("change", row.pk)).content.decode())
    assert "last Nov. 1, 2026, 1:30 a.m." in page.words
    assert "first Nov. 1, 2026, 1:30 a.m." in page.words
    assert "Times are in America/New_York." in page.words


def test_late_failures_do_not_hide_the_current_one(ada):
    row = make()
    for second in range(1, 30):
        add_failure(row, failed_at=row.last_failed_at + timedelta(seconds=second), late=True)
    page = Page(ada.get(url("change", row.pk)).content.decode())
    assert "ask the tax office" in page.words
    assert "Older failures are not shown" in page.words


@ONE
def test_pages_ask_no_replica(archive_database, broker):
    big = make(body=b'[[], {"text": "%s"}, {}]' % (b"x" * formatting.SHOWN))
    failure_groups.rebuild()
    group, waiting = FailureGroup.objects.get(), make_outbox()
    batch = batch_states.freeze(tables.rows(), by="ada", title="one")
    pages = "admin:django_amqp_events_"
    with routed_by(Replicas()):
        root = client_of(User.objects.create_superuser("root"))
        assert root.get(url("payload", big.pk)).content == big.body
        address = reverse(f"{pages}outboxevent_payload", args=[waiting.pk])
        assert root.get(address).content == waiting.body
        assert str(group) in page(root.get(url("change", big.pk))).words
        address = reverse(f"{pages}failuregroup_change", args=[group.pk])
        assert big.detail in page(root.get(address)).words
        address = reverse(f"{pages}replaybatch_start", args=[batch.pk])
        for word in ("Started", "It is running now"):
            assert word in said(root.post(address, {"reason": "so", "version": 0}))[-1]
