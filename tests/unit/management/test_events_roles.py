"""Roles: groups with permissions that the models declare."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import Group, Permission, User

from django_amqp_events.admin.action_pages import Action
from django_amqp_events.admin.archived_events import ArchivedEventAdmin
from django_amqp_events.admin.outbox import OutboxEventAdmin
from django_amqp_events.management import roles
from tests.commands import run_command

pytestmark = pytest.mark.django_db


def of(role: roles.Role) -> set[str]:
    found = Group.objects.get(name=role.group).permissions
    return set(found.values_list("codename", flat=True))


def test_each_permission_belongs_to_one_role() -> None:
    """So a new one needs a decision."""
    names = Counter(name for role in roles.ROLES for name in role.names)
    assert set(names.values()) == {1}
    assert set(names) == {name for name, _codename, _label in roles.declared()}
    stored = Permission.objects.filter(content_type__app_label="django_amqp_events")
    declared = [(codename, label) for _name, codename, label in roles.declared()]
    assert sorted(declared) == sorted(stored.values_list("codename", "name"))
    for pages in (ArchivedEventAdmin, OutboxEventAdmin):
        actions: list[Action] = list(pages.row_actions.values())
        assert {each.permission for each in actions} <= set(names)


def test_groups_are_made_and_repaired_and_keep_their_members() -> None:
    ada = User.objects.create_user("ada")
    code, out, err = run_command("events_roles", "--add", "operator", "ada")
    assert code == 0
    assert "is_staff" in err
    for _name, codename, label in roles.declared():
        assert codename in out
        assert label in out
    viewer, operator, manager = (of(role) for role in roles.ROLES)
    assert viewer < operator < manager == {codename for _, codename, _ in roles.declared()}
    assert "view_payload_archivedevent" not in viewer
    assert operator & {"edit_archivedevent", "export_archivedevent"} == set()
    ada = User.objects.get()
    assert ada.has_perm("django_amqp_events.discard_outboxevent")
    assert not ada.has_perm("django_amqp_events.force_archivedevent")

    # An older version: a permission is missing, another has gone; and people added one.
    group = ada.groups.get()
    Permission.objects.filter(codename="replay_archivedevent").delete()
    [kind] = {each.content_type for each in group.permissions.filter(codename="view_inboxentry")}
    old = Permission.objects.create(codename="burn", name="Can burn", content_type=kind)
    theirs = Permission.objects.get(codename="add_user")
    group.permissions.add(old, theirs)
    code, out, _ = run_command("events_roles", "--format", "json")
    found: Any = {each["role"]: each for each in json.loads(out)["roles"]}
    assert (code, found["operator"]["removed"]) == (0, ["burn"])
    assert found["operator"]["added"] == found["manager"]["added"] == ["replay_archivedevent"]
    assert not any(each["created"] for each in found.values())
    assert of(roles.ROLES[1]) == operator | {"add_user"}
    assert list(group.user_set.all()) == [ada]
    code, out, _ = run_command("events_roles")
    assert (code, out.count("unchanged")) == (0, 3)


def test_a_member_who_does_not_get_the_permissions(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    User.objects.create_user("ada", is_staff=True)
    User.objects.create_user("bob", is_staff=True, is_active=False)
    User.objects.create_superuser("root")
    no_backend = "ada does not get the permissions of the group “AMQP events: viewer”"
    for backend, said in (("ModelBackend", ""), ("BaseBackend", no_backend)):
        settings.AUTHENTICATION_BACKENDS = [f"django.contrib.auth.backends.{backend}"]
        code, _, err = run_command("events_roles", "--add", "viewer", "ada")
        assert (code, bool(err)) == (0, bool(said)), err
        assert said in err
        assert run_command("events_roles", "--add", "viewer", "root")[2] == ""
        err = run_command("events_roles", "--add", "manager", "bob")[2]
        assert err.strip() == "bob cannot log in: is_active is False"

    def of_model(_self: Any, _permission: str, _object: Any) -> bool:
        raise AssertionError

    def of_backend(_self: Any, _user: Any, _permission: str) -> bool:
        raise AssertionError

    for owner, without_object in ((ModelBackend, of_backend), (User, of_model)):
        settings.AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.ModelBackend"]
        monkeypatch.setattr(owner, "has_perm", without_object)
        code, _, err = run_command("events_roles", "--add", "viewer", "ada")
        assert "cannot use the pages: has_perm(permission), as the admin calls it" in err
        assert (code, "raised TypeError" in err) == (0, True)


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


def test_a_name_that_no_login_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(User, "USERNAME_FIELD", "id")
    code, _, err = run_command("events_roles", "--add", "viewer", "ada")
    assert (code, "no user 'ada'" in err) == (2, True), err
