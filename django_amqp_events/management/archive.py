"""The base of the commands about archived events."""

from __future__ import annotations

import getpass
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError
from django.utils import timezone

from django_amqp_events import conf
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.base import BrokerCommand
from django_amqp_events.management.processes import stop_signals

#: Seconds between lines of progress.
PROGRESS: Final = 5.0
#: Version of what ``--format json`` prints.
FORMAT: Final = 1

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


class ArchiveCommand(BrokerCommand):
    """A command about archived events: ends cleanly at Ctrl-C, and says how far it came.

    In JSON the one document is on stdout, and what is told meanwhile on stderr.
    """

    json = False
    stopping = False
    _told = 0.0
    verbosity = 1

    def prepare(self, options: dict[str, Any]) -> None:
        """Read the options that all of them have."""
        self.json = options["format"] == "json"
        self.stopping = False
        self.verbosity = options["verbosity"]
        self._told = time.monotonic()

    def stopped(self) -> bool:
        """Return True if the command was asked to stop."""
        return self.stopping

    def tell(self, text: str, level: int = 1) -> None:
        """Write a line for a person."""
        if self.verbosity >= level:
            out = self.stderr if self.json else self.stdout
            out.write(text, self.style.NOTICE if self.json else None)
            out.flush()

    def progress(self, text: str) -> None:
        """Write how far it is, now and then."""
        if time.monotonic() >= self._told + PROGRESS:
            self._told = time.monotonic()
            self.tell(text)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C or SIGTERM end the current work, and the second one the command.

        Errors of the broker, the database and the settings become one sentence and exit code 2.
        """

        def stop() -> None:
            if self.stopping:
                raise KeyboardInterrupt
            self.stopping = True
            self.tell("stopping after what is in hand; once more to stop at once", 0)

        try:
            with stop_signals(stop):
                yield
        except (AmqpEventsError, ImproperlyConfigured) as exc:
            raise CommandError(str(exc), returncode=2) from exc
        except (DatabaseError, InterfaceError) as exc:
            text = str(exc).strip().partition("\n")[0]
            missing = "no such table" in text or "does not exist" in text
            raise CommandError(
                f"the database cannot be used ({type(exc).__name__}: {text}); "
                + ("run `manage.py migrate`" if missing else "nothing of the work in hand is half"),
                returncode=2,
            ) from exc


def wrong(text: str) -> CommandError:
    """Return the error of an argument."""
    return CommandError(text, returncode=2)


def seconds(text: str) -> float | None:
    """Read an age such as ``90s``, ``2h``, ``1d12h``; ``None`` where it is none."""
    text = text.strip().lower()
    if not text or _AGE.sub("", text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _AGE.findall(text))


def age(option: str, text: str) -> float:
    """Read the age that an option gives.

    Raises:
        CommandError: it is none, or longer than time.
    """
    found = seconds(text)
    if found is None or found > timedelta(days=36_500).total_seconds():
        raise wrong(f"{option} is {text!r}; it is an age such as 90s, 45m, 12h, 30d, 8w, 1d12h")
    return found


def service(option: str, text: str) -> str:
    """Read the name of a service that an option gives.

    Raises:
        CommandError: no service can have it.
    """
    if not conf.SERVICE.fullmatch(text):
        raise wrong(f"{option} is {text!r:.80}; a service's name is letters, digits, - and _")
    return text


def moment(option: str, text: str, now: datetime) -> datetime:
    """Read the time that an option gives: ISO 8601, in the project's time zone, or an age.

    Raises:
        CommandError: it is neither.
    """
    if seconds(text) is not None:
        return now - timedelta(seconds=age(option, text))
    try:
        found = datetime.fromisoformat(text.strip())
        if found.tzinfo is None:
            found = timezone.make_aware(found)
        # At once: what has no time in UTC cannot be compared.
        return found.astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise wrong(
            f"{option} is {text!r}; it is a time such as 2026-11-20, 2026-11-20T13:30 or "
            f"2026-11-20T13:30+01:00, or an age such as 45m, 2h, 3d"
        ) from exc


def who(command: str) -> str:
    """Return the user who runs a command, for the audit."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):
        # A container's user may have no name.
        user = str(os.getuid())
    return f"{command} ({user}@{socket.gethostname()})"


def number(count: int, noun: str) -> str:
    """Write a count: ``1 event``, ``2 events``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
