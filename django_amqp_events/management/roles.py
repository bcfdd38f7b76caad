"""Roles: groups of Django's auth with the permissions of the console.

The models declare the permissions; this module says which role has them. ``admin/`` asks for each.
"""

from __future__ import annotations

from typing import Any, Final

from django.apps import apps
from django.contrib.auth import get_permission_codename

_APP: Final = "django_amqp_events"
#: Permissions of each role, without the model in their codename; each also has those of the roles
#: before it.
ROLES: Final = {
    "viewer": {"view"},
    "operator": {
        "view_payload", "replay", "bulk_replay", "publish", "discard", "restore", "assign",
    },
    "manager": {"view_raw", "edit", "export", "force"},
}  # fmt: skip


def declared() -> dict[str, str]:
    """Return the codenames of the permissions that our models declare, and their names in ROLES."""
    names = {}
    for model in apps.get_app_config(_APP).get_models():
        meta: Any = model._meta  # noqa: SLF001 - Django's public _meta
        for name in meta.default_permissions:
            names[get_permission_codename(name, meta)] = name
        for codename, _label in meta.permissions:
            names[codename] = codename.removesuffix(f"_{meta.model_name}")
    return names


def make_groups() -> dict[str, tuple[Any, list[str]]]:
    """Make a group for each role, or give it the role's permissions again; keep its members.

    Permissions of other apps stay as they are.

    Returns:
        the group and the codenames of each role.
    """
    from django.contrib.auth.models import Group, Permission

    ours = Permission.objects.filter(content_type__app_label=_APP)
    made, allowed = {}, set[str]()
    for role, names in ROLES.items():
        allowed |= {codename for codename, name in declared().items() if name in names}
        group, _ = Group.objects.get_or_create(name=f"AMQP events: {role}")
        group.permissions.remove(*ours.exclude(codename__in=allowed))
        group.permissions.add(*ours.filter(codename__in=allowed))
        made[role] = group, sorted(allowed)
    return made
