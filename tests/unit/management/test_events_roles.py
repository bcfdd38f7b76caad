"""Roles: groups with permissions that the models declare."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from django.contrib.auth.models import Group, Permission, User

from django_amqp_events.admin.action_pages import Action
from django_amqp_events.admin.archived_event_pages import ArchivedEventAdmin
from django_amqp_events.admin.outbox_pages import OutboxEventAdmin
from django_amqp_events.management import roles
from tests.commands import run_command

pytestmark = pytest.mark.django_db


def of(role: str) -> set[str]:
    found = Group.objects.get(name=f"AMQP events: {role}").permissions
    return set(found.values_list("codename", flat=True))


def test_each_permission_belongs_to_one_role() -> None:
    """So a new one needs a decision."""
    names = Counter(name for names in roles.ROLES.values() for name in names)
    assert set(names.values()) == {1}
    assert set(names) == set(roles.declared().values())
    stored = Permission.objects.filter(content_type__app_label="django_amqp_events")
    assert roles.declared().keys() == set(stored.values_list("codename", flat=True))
    for pages in (ArchivedEventAdmin, OutboxEventAdmin):
        actions: list[Action] = list(pages.row_actions.values())
        assert {each.permission for each in actions} <= set(names)


def test_groups_are_made_and_repaired_and_keep_their_members() -> None:
    User.objects.create_user("ada")
    code, out, _ = run_command("events_roles", "--add", "operator", "ada")
    assert code == 0
    assert all(codename in out for codename in roles.declared())
    viewer, operator, manager = map(of, roles.ROLES)
    assert viewer < operator < manager == roles.declared().keys()
    assert "view_payload_archivedevent" not in viewer
    assert operator & {"edit_archivedevent", "export_archivedevent"} == set()
    ada = User.objects.get()
    assert ada.has_perm("django_amqp_events.discard_outboxevent")
    assert not ada.has_perm("django_amqp_events.force_archivedevent")

    # An older version: a permission is missing, another has gone; and people added one.
    group = ada.groups.get()
    group.permissions.remove(Permission.objects.get(codename="replay_archivedevent"))
    [kind] = {each.content_type for each in group.permissions.filter(codename="view_inboxentry")}
    old = Permission.objects.create(codename="burn", name="Can burn", content_type=kind)
    group.permissions.add(old, Permission.objects.get(codename="add_user"))
    code, out, _ = run_command("events_roles", "--format", "json")
    found = {each["role"]: each for each in json.loads(out)["roles"]}
    assert (code, set(found["operator"]["permissions"])) == (0, operator)
    assert of("operator") == operator | {"add_user"}
    assert list(group.user_set.all()) == [ada]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--add", "king", "ada"], "viewer, operator, manager"),
        (["--add", "viewer", "nobody"], "no user 'nobody'"),
        (["--add", "viewer"], "expected 2 arguments"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str) -> None:
    code, _, err = run_command("events_roles", *arguments)
    assert (code, said in err) == (2, True), err
    assert not Group.objects.exists()
