"""Make a group of users for each role of the console, and print what it may do.

Roles: viewer, operator, manager; each may do what the ones before it may. Run
the command again after an upgrade: the groups keep their members, and get the
permissions of the new version. Permissions of this app that were added to or
removed from these groups by hand are reset; make a group of your own for those.

exit codes:
  0  done
  2  wrong arguments or settings, no such user, or the database is unreachable
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.exceptions import ObjectDoesNotExist

from django_amqp_events.management import roles
from django_amqp_events.management.base import ReportCommand


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--add",
            nargs=2,
            metavar=("ROLE", "USER"),
            action="append",
            default=[],
            help="Add a user, by login name, to the group of a role; repeatable.",
        )
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        if not apps.is_installed("django.contrib.auth"):
            raise self.wrong("'django.contrib.auth' is not in INSTALLED_APPS")
        for role, _login in options["add"]:
            if role not in roles.ROLES:
                raise self.wrong(f"{role!r} is no role; choose one of {', '.join(roles.ROLES)}")
        users = [(role, self._user(login)) for role, login in options["add"]]
        made = roles.make_groups()
        for role, user in users:
            user.groups.add(made[role][0])

        def show() -> None:
            for role, (group, codenames) in made.items():
                self.tell(f"{role}: group “{group}”")
                for codename in codenames:
                    self.tell(f"  {codename}")

        document = [
            {"role": role, "group": group.name, "permissions": codenames}
            for role, (group, codenames) in made.items()
        ]
        return self.finish(0, {"roles": document}, show)

    def _user(self, login: str) -> Any:
        users: Any = get_user_model()
        try:
            return users._default_manager.get(**{users.USERNAME_FIELD: login})  # noqa: SLF001
        except (ObjectDoesNotExist, ValueError) as exc:
            raise self.wrong(f"there is no user {login!r}") from exc
