"""Who sees what: every URL of the admin, and whatever else shows events, with four users."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core import mail
from django.core.management import call_command
from django.db.models import CharField, QuerySet, TextField
from django.test import Client, override_settings
from django.urls import URLPattern, URLResolver, path, reverse

from django_amqp_events import admin as pages
from django_amqp_events import conf
from django_amqp_events.admin.action_pages import encode_selection
from django_amqp_events.archive import search_values, tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.models import (
    Alert,
    ArchiveAction,
    ArchivedEvent,
    Dashboard,
    FailureGroup,
    GroupAction,
    OutboxEvent,
    Replay,
    ReplayBatch,
    SearchValue,
    State,
)
from django_amqp_events.monitor import alerts
from tests.archive_rows import add_replay, add_revision, make_inbox, make_outbox, seen
from tests.conftest import slow
from tests.roles import roles
from tests.unit.monitor.test_alerts import ADMINS

from .admin_world import (
    EVENTS,
    LISTED,
    Page,
    client_of,
    document,
    make,
    overdue,
    said,
    select,
    staff,
)
from .test_dashboard import alert, snapshot

pytestmark = pytest.mark.django_db

SECRET = "4242424242424242"
BASE = "/admin/django_amqp_events"
#: The ids of the events on the pages below that no user may see.
HIDDEN = "hidden-0001"
MARK = "HiddenMark"
HOSTILE = "<script>alert(1)</script>\" onclick='x' \u202e\x07\u2066</pre><style>*{}</style>"
PAYLOAD = {"order_id": 7, "card": SECRET}
BODY = json.dumps([[], PAYLOAD, {}]).encode()
_RIGHTS = {
    "archivedevent": "view view_payload replay force discard restore bulk_replay edit",
    "outboxevent": "view view_payload discard restore",
    "failuregroup": "view assign",
    "inboxentry": "view",
    "replaybatch": "view",
    "dashboard": "view",
}
RIGHTS = [f"{each}_{model}" for model, names in _RIGHTS.items() for each in names.split()]
SETTINGS = {
    **EVENTS,
    "EDITING": True,
    "REDACT": f"{__name__}.redact",
    "EVENTS": {"shop.order.created": {"SEARCH": ["order_id", "card"]}},
    "ALERTS": {"MAIL": True},
}


def redact(_name: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    return {key: "***" if key == "card" else value for key, value in payload.items()}


class ByRow:
    """Pages of a project that hides some rows."""

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        rows = super().get_queryset(request)  # type: ignore[misc]
        names = {each.name for each in rows.model._meta.fields}
        hidden = names & {"event_id", "assignee", "created_by"}
        return rows.exclude(**dict.fromkeys(hidden, HIDDEN))  # type: ignore[no-any-return]


narrow = admin.AdminSite(name="admin")
for _model in (ArchivedEvent, OutboxEvent, FailureGroup, ReplayBatch):
    _base = getattr(pages, f"{_model.__name__}Admin")
    narrow.register(_model, type(f"Narrow{_base.__name__}", (ByRow, _base), {}))
narrow.register(Dashboard, pages.DashboardAdmin)
ops = admin.AdminSite(name="ops")
pages.register(ops)
urlpatterns = [path("admin/", narrow.urls), path("ops/", ops.urls)]


@cache
def routes(site: admin.AdminSite) -> list[str]:
    """Return the routes of our models' pages, with their parameters."""

    def below(prefix: str, found: Any) -> Iterator[str]:
        for each in found:
            route = prefix + str(each.pattern)
            if isinstance(each, URLResolver):
                yield from below(route, each.url_patterns)
            elif isinstance(each, URLPattern) and "django_amqp_events/" in route:
                yield route

    return sorted(set(below("/admin/", site.get_urls())))


def address_of(route: str, pk: object) -> str:
    """Return the URL of a route for a row."""
    return re.sub(r"<(?:\w+:)?(\w+)>", lambda m: "1" if m[1] == "number" else str(pk), route)


def addresses(site: admin.AdminSite) -> list[str]:
    """Return every URL, with each row where one is named."""
    ids: dict[str, list[Any]] = {
        model._meta.model_name or "": [row.pk for row in model._default_manager.all()]
        for model in (ArchivedEvent, OutboxEvent, FailureGroup, ReplayBatch)
    }
    found = [
        address_of(route, pk)
        for route in routes(site)
        for pk in (ids.get(route.split("/")[3], [uuid4()]) if "<" in route else [None])
    ]
    assert len(found) > 40
    return found


def read(response: Any) -> str:
    body: bytes = b"".join(response) if response.streaming else response.content
    return body.decode("utf-8", "replace") + str(response.headers)


def selections() -> dict[str, str]:
    archived = encode_selection(seen(*ArchivedEvent.objects.all()))
    waiting = encode_selection({row.pk: 0 for row in OutboxEvent.objects.all()})
    return {"archivedevent": archived, "outboxevent": waiting}


def everything(client: Client, site: admin.AdminSite, *, post: bool) -> Iterator[tuple[str, Any]]:
    """Yield the answers of every URL to a person who tries all of them."""
    for address in addresses(site):
        model = address.split("/")[3]
        data = {"seen": selections().get(model, ""), "reason": "so", "q": "17", "step": "review"}
        data |= {"payload": json.dumps({"order_id": 8}), "edits": "0", "rate": "", "canary": ""}
        yield address, client.get(address)
        if "/decide/" in address:
            yield address, client.get(address, data)
        if post:
            yield address, client.post(address, data, follow=True)


def world() -> ArchivedEvent:
    """Make rows of every kind that have the secret; return the first."""
    rows = [
        make(body=BODY),
        make(body=b'[[], {"card": "' + SECRET.encode()),
        make(body=b"\xff" + SECRET.encode()),
        overdue(body=BODY),
    ]
    first = rows[0]
    revision = add_revision(first, body=json.dumps({**PAYLOAD, "order_id": 9}).encode())
    search_values.store(
        (
            value
            for row in rows
            for value in search_values.in_event(row, [revision] * (row == first))
        ),
        using=tables.database(),
    )
    failure_groups.rebuild()
    make_outbox(body=BODY, attempts=1)
    make_outbox(body=b'[[], {"card": "' + SECRET.encode())
    make_inbox(first.event_id)
    batch_states.freeze(ArchivedEvent.objects.all(), by="ada", title="all")
    return first


def person(kind: str) -> User:
    if kind == "root":
        return User.objects.create_superuser(kind)
    rights = {
        "reader": RIGHTS,
        "viewer": [each for each in RIGHTS if "payload" not in each],
        "stranger": [],
    }[kind]
    return staff(*rights, name=kind)


@pytest.mark.parametrize("kind", ["viewer", *slow("root", "reader", "stranger")])
def test_a_redacted_value_is_nowhere(kind: str, broker: Any, caplog: Any) -> None:
    """Except where a user with the permission for raw bodies asks for them."""
    caplog.set_level("DEBUG")
    with override_settings(AMQP_EVENTS=SETTINGS, ADMINS=ADMINS):
        first = world()
        client = client_of(person(kind))
        found = {
            address
            for address, response in everything(client, admin.site, post=kind != "root")
            if SECRET in read(response)
        }
        for query in (SECRET, f"card={SECRET}", f"card={SECRET[:4]}*"):
            for name in ("archivedevent_changelist", "outboxevent_changelist"):
                response = client.get(reverse(f"admin:django_amqp_events_{name}"), {"q": query})
                if response.status_code == 200:
                    assert not response.context["cl"].result_list
        said = io.StringIO()
        call_command("events_archive", "export", stdout=said, stderr=said)
        call_command("events_find", first.event_id, stdout=said, stderr=said)
        call_command("events_catalogue", stdout=said, stderr=said)
        # When the first one failed, its group was new.
        then = datetime.now(UTC) - timedelta(hours=3)
        own = conf.get_settings()
        alerts.update_alerts(alerts.evaluate_groups(own, then), now=then, settings=own)
    told = " ".join(LogEntry.objects.values_list("change_message", flat=True))
    told += " ".join(ArchiveAction.objects.values_list("reason", flat=True))
    told += " ".join(f"{each.subject} {each.body}" for each in mail.outbox)
    assert mail.outbox
    assert SECRET not in said.getvalue() + caplog.text + told
    base = BASE
    raw = {f"{base}/archivedevent/{first.pk}/{each}/" for each in ("payload", "edit", "change")}
    raw |= {
        f"{base}/outboxevent/{row.pk}/{each}/"
        for row in OutboxEvent.objects.all()
        for each in ("payload", "change")
    }
    if kind == "root":
        assert raw <= found
    else:
        assert found == set()


def test_a_form_of_another_site_is_refused(broker: Any) -> None:
    """Of each URL that takes a form."""
    with override_settings(AMQP_EVENTS=SETTINGS):
        world()
        root = User.objects.create_superuser("root")
        careful, careless = client_of(root, enforce_csrf_checks=True), client_of(root)
        for address in addresses(admin.site):
            assert careful.post(address, {"seen": "", "reason": "so"}).status_code == 403, address
        assert careless.post(f"{BASE}/archivedevent/decide/replay/").status_code == 302
    assert not broker.messages


def test_pages_on_a_site_of_the_projects_own_stay_on_it(broker: Any) -> None:
    with override_settings(AMQP_EVENTS=SETTINGS, ROOT_URLCONF=__name__):
        world()
        client = client_of(User.objects.create_superuser("root"))
        for address in addresses(ops):
            there = address.replace("/admin/", "/ops/", 1)
            data = {"seen": selections().get(address.split("/")[3], ""), "reason": "so", "q": "17"}
            asked = data if "/decide/" in there else {"q": "17"}
            for response in (client.get(there, asked), client.post(there, data)):
                assert response.status_code in (200, 302, 403), there
                assert "/admin/django_amqp_events" not in read(response), there


def hostile_world() -> list[ArchivedEvent]:
    """Make rows of every kind with HOSTILE in each of their texts."""
    failure = document(
        reason=HOSTILE,
        exception={"type": HOSTILE, "message": HOSTILE},
        traceback=HOSTILE,
        frames=[dict.fromkeys(("file", "line", "function", "module"), HOSTILE)],
        history=[dict.fromkeys(("attempt", "worker", "exception", "message"), HOSTILE)],
        deaths=[dict.fromkeys(("queue", "reason", "count"), HOSTILE)],
        cut=[HOSTILE],
    )
    event: dict[str, Any] = {
        "failure": failure, "handler": HOSTILE, "exception": HOSTILE, "name": HOSTILE,
        "headers": {HOSTILE: HOSTILE, "t": {HOSTILE: [HOSTILE]}},
        "body": json.dumps([[], {HOSTILE: HOSTILE}, {}]).encode(),
    }  # fmt: skip
    rows = [make(**event), make(State.DISCARDED, **event), overdue(**event)]
    add_replay(rows[0], 7)
    world()
    envelope = {"headers": {HOSTILE: HOSTILE}, "properties": {HOSTILE: [HOSTILE]}}
    make_outbox(envelope=json.dumps(envelope), body=event["body"], discarded_at=datetime.now(UTC))
    ArchiveAction.objects.create(event=rows[0], at=datetime.now(UTC), action="discard")
    for group in FailureGroup.objects.all():
        GroupAction.objects.create(group=group, at=datetime.now(UTC), action="note")
    alert(HOSTILE[:32], HOSTILE, HOSTILE)
    queue = {"role": "handler", "severity": "error", "meaning": HOSTILE, "ready": 1}
    error = f"{HOSTILE}\ud800"
    snapshot(queues={error: queue}, broker={"error": error, "away": 9.0})
    # Documents are above, names of one's own are settings.
    others = {"document", "envelope", "claim", "service"}
    for model in apps.get_app_config("django_amqp_events").get_models():
        texts = {
            each.name: HOSTILE[: each.max_length]
            for each in model._meta.fields
            if isinstance(each, CharField | TextField) and not each.choices
        }
        changed = {name: text for name, text in texts.items() if name not in others}
        if changed and model not in (SearchValue, Alert):
            QuerySet(model).update(**changed)
    # What a form has as it is.
    plain = HOSTILE.translate(dict.fromkeys(map(ord, "\u202e\u2066\x07")))
    FailureGroup.objects.update(ticket=f"javascript:{plain}", note=plain, assignee=plain)
    return list(ArchivedEvent.objects.all())


def test_hostile_words_are_shown_as_words_on_every_page(broker: Any) -> None:
    """And each page passes a strict policy."""
    with override_settings(AMQP_EVENTS={**SETTINGS, "REDACT": ""}):
        rows = hostile_world()
        client = client_of(User.objects.create_superuser("root"))
        archive = f"{BASE}/archivedevent"
        form = {"version": "0", "step": "review", "payload": "{" + HOSTILE}
        # Some pages have the words of a request.
        answers = [
            *((archive, client.get(f"{archive}/", {each: HOSTILE})) for each in ("q", "handler")),
            ("edit", client.post(f"{archive}/{rows[0].pk}/edit/", form)),
        ]
        answers += [
            (archive, client.post(f"{archive}/?state=all", select(rows, each))) for each in LISTED
        ]
        answers += everything(client, admin.site, post=False)
    for address, response in answers:
        if response["Content-Type"].startswith("text/html"):
            html = read(response)
            assert Page(html).violations == [], address
            assert "alert(1)</script>" not in html, address
            if address != archive and "edit" not in address:
                assert not {"\u202e", "\u2066", "\x07"} & {*html}, address


def test_an_id_of_no_row_leads_to_a_list_that_says_so() -> None:
    client = client_of(User.objects.create_superuser("root"))
    for route in (each for each in routes(admin.site) if "<" in each):
        for wrong in (str(uuid4()), "nonsense", "1") if "<path" in route else (str(uuid4()),):
            address = re.sub("<(?!int).*?>", wrong, route).replace("<int:number>", "1")
            assert client.post(address, {"reason": "so"}).status_code in (302, 403), address
            response = client.get(address, follow=True)
            if response.status_code == 200:
                assert re.search("[Tt]here is no|no event|exist", said(response)[0]), address


def test_asking_changes_nothing(broker: Any) -> None:
    with override_settings(AMQP_EVENTS=SETTINGS):
        world()
        models: list[Any] = [ArchivedEvent, OutboxEvent, FailureGroup, ReplayBatch, Replay]
        before = [list(model.objects.order_by("pk").values()) for model in models]
        client = client_of(User.objects.create_superuser("root"))
        for address, response in everything(client, admin.site, post=False):
            refused = "/add/" in address or "/delete/" in address
            assert response.status_code in ((403,) if refused else (200, 302)), address
        for address in addresses(admin.site):
            if address.endswith("/change/") or "/add/" in address or "/delete/" in address:
                assert client.post(address, {"post": "yes", "name": "x"}).status_code == 403
    assert [list(model.objects.order_by("pk").values()) for model in models] == before
    assert not broker.messages


def test_lookups_that_are_no_filters_are_refused() -> None:
    """A value cannot be guessed by them."""
    world()
    client = client_of(User.objects.create_superuser("root"))
    for model in (ArchivedEvent, OutboxEvent, FailureGroup, ReplayBatch):
        address = f"{BASE}/{model._meta.model_name}/"
        names = {each.name for each in model._meta.fields} - {"id", "pk"}
        more = ("failure_set__document", "event_set__body", "search_values__value")
        for name in (*names, *more):
            assert client.get(address, {f"{name}__contains": "x"}).status_code == 400, name


def test_wrong_settings_break_no_page(broker: Any) -> None:
    world()
    snapshot()
    client = client_of(User.objects.create_superuser("root"))
    with override_settings(AMQP_EVENTS={"SERVICE": "a.b", "HANDLERS": 5, "NONSENSE": 1}):
        for address, response in everything(client, admin.site, post=False):
            assert response.status_code in (200, 302, 400, 403), address


def test_a_row_that_a_user_may_not_see_is_nowhere(broker: Any) -> None:
    """Every view and action asks for the row, for a user who may do everything with the others."""
    hidden = make(
        event_id=HIDDEN, message=MARK, body=b'[[], {"order_id": "%s"}, {}]' % MARK.encode()
    )
    late = overdue(event_id=HIDDEN, message=MARK, correlation_id="basket-6")
    other = make(correlation_id="basket-6", exception="billing.errors.Other")
    failure_groups.rebuild()
    waiting = make_outbox(event_id=HIDDEN, attempts=1, error=MARK)
    mine = make_outbox(attempts=1)
    before = _rows(hidden.pk, late.pk, waiting.pk)
    settings = {**SETTINGS, "REDACT": "", "EVENTS": {}}
    with override_settings(AMQP_EVENTS=settings, ROOT_URLCONF=__name__):
        client = client_of(User.objects.create_superuser("root"))
        for _ in range(2):
            for address, response in everything(client, narrow, post=True):
                assert MARK not in read(response), address
                if any(str(each.pk) in address for each in (hidden, late, waiting)):
                    moved = response.status_code == 302 or getattr(response, "redirect_chain", ())
                    assert moved or response.status_code == 403, address
        for query in (HIDDEN, str(hidden.pk), str(waiting.pk)):
            found = client.get("/admin/django_amqp_events/dashboard/find/", {"q": query})
            assert MARK not in read(found)
            assert not found.context.get("located")
        everyone = {"action": "background_selected", "select_across": "1", "index": "0"}
        everyone["_selected_action"] = str(other.pk)
        client.post("/admin/django_amqp_events/archivedevent/?state=all", everyone)
    assert _rows(hidden.pk, late.pk, waiting.pk) == before
    assert Replay.objects.filter(event=hidden).count() == 0
    frozen = set(Replay.objects.exclude(batch=None).values_list("event_id", flat=True))
    assert frozen == {other.pk}
    # The others were changed.
    assert ArchivedEvent.objects.get(pk=other.pk).version > other.version
    assert OutboxEvent.objects.get(pk=mine.pk).due_at != mine.due_at


def test_autocomplete_names_no_row_that_a_user_may_not_see() -> None:
    make(event_id=HIDDEN)
    shown = make()
    # Of a relation to an event, such as a model of a project may have.
    field = {"app_label": "django_amqp_events", "model_name": "revision", "field_name": "event"}
    with override_settings(ROOT_URLCONF=__name__):
        client = client_of(User.objects.create_superuser("root"))
        for term in ("", HIDDEN, shown.event_id):
            document = client.get("/admin/autocomplete/", {**field, "term": term}).json()
            found = {row["id"] for row in document["results"]}
            assert found == (set() if term == HIDDEN else {str(shown.pk)})


@pytest.mark.parametrize("model", ["archivedevent", "failuregroup", "replaybatch", "outboxevent"])
def test_a_refusal_does_not_tell_whether_there_is_a_row(broker: Any, model: str) -> None:
    with override_settings(AMQP_EVENTS=SETTINGS):
        world()
        client = client_of(person("stranger"))
        for pk in (apps.get_model("django_amqp_events", model).objects.all()[0].pk, uuid4()):
            address = reverse(f"admin:django_amqp_events_{model}_change", args=[pk])
            assert client.get(address).status_code == 403


def test_a_refused_page_names_the_permission(broker: Any) -> None:
    with override_settings(AMQP_EVENTS=SETTINGS):
        event = world()
        mallory = client_of(staff("view_archivedevent", name="mallory"))
        for page, permission in (
            ("archivedevent/decide/replay", "replay_archivedevent"),
            (f"archivedevent/{event.pk}/edit", "view_payload_archivedevent"),
            ("replaybatch/backfill", "view_replaybatch"),
            ("replaybatch", "view_replaybatch"),
            ("outboxevent", "view_outboxevent"),
            ("dashboard/find", "view_dashboard"),
        ):
            response = mallory.post(f"{BASE}/{page}/")
            assert response.status_code == 403
            assert f"“{permission}”" in read(response), page


def test_a_manager_opens_the_pages_that_a_superuser_opens(broker: Any) -> None:
    with override_settings(AMQP_EVENTS=SETTINGS):
        world()
        root = client_of(person("root"))
        manager = client_of(staff(*roles()["manager"], name="manager"))
        for address in addresses(admin.site):
            assert manager.get(address).status_code == root.get(address).status_code, address


def _rows(*ids: UUID) -> list[Any]:
    models: list[Any] = [ArchivedEvent, OutboxEvent]
    return [
        row for model in models for row in model.objects.filter(pk__in=ids).order_by("pk").values()
    ]
