"""Roles: groups of Django's auth with the permissions of the console.

The models declare the permissions; this module says which role has them. ``admin/`` asks for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from django.apps import apps
from django.contrib.auth import get_permission_codename, get_user_model
from django.core.exceptions import FieldDoesNotExist, ObjectDoesNotExist, ValidationError
from django.db import router, transaction

from ..exceptions import ConfigurationError

_APP: Final = "django_amqp_events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a group of people may do.

    Attributes:
        group: the name of the group.
        names: permissions, without the model in their codename, that earlier roles do not have.
    """

    name: str
    group: str
    about: str
    names: frozenset[str]


#: Each role may do what the ones before it may.
ROLES: Final = (
    Role(
        name="viewer",
        group="AMQP events: viewer",
        about="sees lists, pages and the dashboard, but no payloads",
        names=frozenset({"view"}),
    ),
    Role(
        name="operator",
        group="AMQP events: operator",
        about="sees payloads, as redacted; replays, discards and restores; writes notes",
        names=frozenset(
            {"view_payload", "replay", "bulk_replay", "publish", "discard", "restore", "assign"}
        ),
    ),
    Role(
        name="manager",
        group="AMQP events: manager",
        about="sees raw payloads; edits, exports, forces replays of overdue events",
        names=frozenset({"view_raw", "edit", "export", "force"}),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A group as it is now.

    Attributes:
        permissions: labels by codename, of this role and not of the roles before it.
        added, removed: codenames that the group got or lost.
    """

    role: Role
    created: bool
    permissions: Mapping[str, str]
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


def declared() -> Iterator[tuple[str, str, str]]:
    """Yield name, codename and label of each permission that our models declare."""
    for model in apps.get_app_config(_APP).get_models():
        meta: Any = model._meta  # noqa: SLF001 - Django's public _meta
        for name in meta.default_permissions:
            codename = get_permission_codename(name, meta)
            yield name, codename, f"Can {name} {meta.verbose_name_raw}"
        for codename, label in meta.permissions:
            yield codename.removesuffix(f"_{meta.model_name}"), codename, label


def permissions_of(role: Role) -> dict[str, str]:
    """Return labels by codename, of this role and not of the roles before it."""
    return {codename: label for name, codename, label in declared() if name in role.names}


def make_groups() -> list[Made]:
    """Make a group for each role, or give it the role's permissions again; keep its members.

    Permissions of other apps stay as they are.

    Raises:
        ConfigurationError: the project has no groups.
    """
    _require_groups()
    from django.contrib.auth.management import create_permissions
    from django.contrib.auth.models import Group, Permission

    alias = router.db_for_write(Group)
    # Those that an upgrade brought, if `migrate` did not run on this database since.
    create_permissions(apps.get_app_config(_APP), verbosity=0, interactive=False, using=alias)
    ours = Permission.objects.using(alias).filter(content_type__app_label=_APP)
    made, allowed = [], set[str]()
    with transaction.atomic(using=alias):
        for role in ROLES:
            own = permissions_of(role)
            allowed |= set(own)
            group, created = Group.objects.using(alias).get_or_create(name=role.group)
            has = {permission.codename: permission for permission in ours.filter(group=group)}
            added = [
                permission
                for permission in ours.filter(codename__in=allowed)
                if permission.codename not in has
            ]
            removed = [
                permission for codename, permission in has.items() if codename not in allowed
            ]
            group.permissions.add(*added)
            group.permissions.remove(*removed)
            made.append(
                Made(
                    role=role,
                    created=created,
                    permissions=own,
                    added=sorted(permission.codename for permission in added),
                    removed=sorted(permission.codename for permission in removed),
                )
            )
    return made


def find_user(login: str) -> Any:
    """Return the user who logs in by this name.

    Raises:
        ConfigurationError: there is no such user, or users have no groups.
    """
    _require_groups()
    users: Any = get_user_model()
    try:
        users._meta.get_field("groups")  # noqa: SLF001 - Django's public _meta
        rows = users._base_manager.using(router.db_for_write(users))  # noqa: SLF001 - documented
        return rows.get(**{users.USERNAME_FIELD: login})
    except FieldDoesNotExist as exc:
        raise ConfigurationError(
            f"{users.__name__} has no groups; derive it from PermissionsMixin, or let its "
            "has_perm() answer for these permissions"
        ) from exc
    except (ObjectDoesNotExist, ValidationError, ValueError) as exc:
        raise ConfigurationError(f"there is no user {login!r}") from exc


def add_member(role: Role, user: Any) -> None:
    """Add a user to the group of a role, which exists."""
    from django.contrib.auth.models import Group

    user.groups.add(Group.objects.using(router.db_for_write(Group)).get(name=role.group))


def refusal(role: Role, user: Any) -> str:
    """Return why the project does not grant a member the role's own permissions, or ``""``."""
    if not user.is_active:
        return "cannot log in: is_active is False"
    try:
        granted = all(user.has_perm(f"{_APP}.{codename}") for codename in permissions_of(role))
    except Exception as exc:  # noqa: BLE001 - a model or a backend of the project
        return f"cannot use the pages: has_perm(permission), as the admin calls it, raised {exc!r}"
    if granted:
        return ""
    return (
        f"does not get the permissions of the group “{role.group}”: with these settings, no "
        "backend in AUTHENTICATION_BACKENDS grants those of groups. Add "
        "'django.contrib.auth.backends.ModelBackend'"
    )


def _require_groups() -> None:
    if not apps.is_installed("django.contrib.auth"):
        raise ConfigurationError(
            "'django.contrib.auth' is not in INSTALLED_APPS, so there are no groups"
        )
