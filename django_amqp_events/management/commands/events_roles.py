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

from django_amqp_events.management import roles
from django_amqp_events.management.base import ReportCommand
from django_amqp_events.message.text import counted
from django_amqp_events.models import clean, visible

_ROLES = {role.name: role for role in roles.ROLES}


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--add",
            nargs=2,
            type=clean,
            metavar=("ROLE", "USER"),
            action="append",
            default=[],
            help="Add a user, by login name, to the group of a role; repeatable.",
        )
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        for name, _login in options["add"]:
            if name not in _ROLES:
                raise self.wrong(f"{name!r} is no role; choose one of {', '.join(_ROLES)}")
        users = [(_ROLES[name], roles.find_user(login)) for name, login in options["add"]]
        made = roles.make_groups()
        for role, user in users:
            roles.add_member(role, user)
            warnings = [roles.refusal(role, user)]
            if not getattr(user, "is_staff", True):
                warnings.append("cannot log in to Django's own admin site: is_staff is False")
            for text in filter(None, warnings):
                said = visible(f"{user.get_username()} {text}")
                self.stderr.write(said, self.style.WARNING)
        members = [{"role": role.name, "user": user.get_username()} for role, user in users]

        def show() -> None:
            for changed in made:
                self._show(changed)
            for member in members:
                self.tell(visible(f"{member['user']}: {member['role']}"))

        document = {
            "roles": [
                {
                    "role": changed.role.name,
                    "group": changed.role.group,
                    "created": changed.created,
                    "permissions": list(changed.permissions),
                    "added": changed.added,
                    "removed": changed.removed,
                }
                for changed in made
            ],
            "members": members,
        }
        return self.finish(0, document, show)

    def _show(self, made: roles.Made) -> None:
        changes = [
            f"{counted(len(names), 'permission')} {verb}"
            for names, verb in ((made.added, "added"), (made.removed, "removed"))
            if names
        ]
        state = "created" if made.created else ", ".join(changes) or "unchanged"
        self.tell(f"{made.role.name}: {made.role.about}")
        self.tell(f"  group “{made.role.group}” {state}")
        for codename, label in made.permissions.items():
            self.tell(f"    {codename:<28} {label}")
