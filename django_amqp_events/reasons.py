"""Reasons: why an event, a batch or a payload was left as it is, as a code with parameters.

The service code returns codes; logs, rows, commands and tests read them in English
(:meth:`Reason.__str__`), pages in the language of the request (:meth:`Reason.translated`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.utils.translation import gettext, override


def _(text: str) -> str:
    """Mark a text for ``makemessages``. Django's gettext_noop needs settings at import."""
    return text


#: The text of each code, with a named placeholder for each parameter.
TEXTS: Final[Mapping[str, str]] = {
    # An error of the broker, the database or a library, in its own words.
    "error": "%(error)s",
    "interrupted": "interrupted",
    "filtered": "it does not match the filters",
    "overdue": "its replay is overdue; --force replays it again, and it may be handled twice",
    # -- replay
    "backend": _(
        "a replay needs RabbitMQ, but AMQP_EVENTS['BACKEND'] is %(backend)s; nothing was published"
    ),
    "body-too-large": _(
        "the body has %(size)s bytes and MAX_BODY is %(most)s; raise MAX_BODY here "
        "and in the workers"
    ),
    "body-too-large-for-page": _(
        "the body has %(size)s bytes, too many for a page; use `manage.py "
        "events_replay --edit %(pk)s --payload FILE`"
    ),
    "body-unreadable": _(
        "the body is not a valid payload, so a replay would fail again; discard the event"
    ),
    "changed": _("another user or tab changed it first; it is %(state)s now"),
    "changed-by": _("%(changed)s (last decision: %(what)s by %(who)s, %(at)s)"),
    "database-locked": _(
        "another process has locked the database (%(error)s); the mirror publishes queued replays "
        "again under the same replay id"
    ),
    "database-unreachable": _(
        "the database is unreachable (%(error)s); once it is back, the mirror publishes queued "
        "replays again under the same replay id"
    ),
    "deleted": _("the event no longer exists"),
    "forbidden": _("you have no permission for this event"),
    "in-transaction": _(
        "a replay must commit its claim before it publishes, but a transaction is open "
        "on the database %(database)s (ATOMIC_REQUESTS, transaction.atomic or "
        "AUTOCOMMIT off). Decorate the view with "
        "django.db.transaction.non_atomic_requests, or replay after the transaction; "
        "nothing was published"
    ),
    "not-overdue": _("its replay is not overdue and may still be waiting for a retry"),
    "other-service": _(
        "it belongs to the service %(service)s; replay it in a process of that service"
    ),
    "state": _("it is %(state)s"),
    "unconfirmed": _(
        "RabbitMQ has not confirmed its last replay, which may still run; replay it unedited first"
    ),
    "unknown-event": _("no handler matches event %(name)s on queue %(queue)s"),
    "unknown-handler": _(
        'there is no handler %(name)s; if it was renamed, add {"%(old)s": "new '
        'name"} to AMQP_EVENTS["RENAMED_HANDLERS"]; if only workers import its '
        "module, add the module to AUTODISCOVER"
    ),
    # -- editing
    "contract": _("The event's contract rejects it: %(error)s."),
    "contract-own": _(
        "%(refused)s It rejects the original payload too, perhaps because it expects Python types "
        "(Decimal, date) instead of text."
    ),
    "editing-off": _("editing needs AMQP_EVENTS['EDITING'] to be True; nothing was published"),
    "json": _("This is not valid JSON: %(error)s, in line %(line)s, column %(column)s."),
    "json-bool": _(
        "This is true or false. The payload must be a JSON object with the arguments by name."
    ),
    "json-constant": _("%(text)s is not valid JSON. Write a number, or null."),
    "json-list": _("This is a list. The payload must be a JSON object with the arguments by name."),
    "json-text": _(
        "This is a string. The payload must be a JSON object with the arguments by name."
    ),
    "json-twice": _("The name %(name)s appears twice. Remove one of them."),
    "json-unreadable": _("This is not valid JSON: %(error)s."),
    "json-value": _(
        "This is a number or null. The payload must be a JSON object with the arguments by name."
    ),
    "not-taken": _("The handler %(handler)s does not take %(names)s, which will be left out."),
    "own-payload": _("This is the original payload. To publish it again, replay the event."),
    "payload-too-large": _("The payload has %(size)s bytes, more than MAX_BODY (%(most)s)."),
    "redaction-failed": _(
        "the redaction hook %(hook)s failed with %(error)s; the payload is hidden"
    ),
    # -- alerts
    "alert-broker-alarm": _(
        "%(alarms)s: RabbitMQ accepts no events. Free memory or disk, or let consumers empty the "
        "queues."
    ),
    "alert-broker-away": _("%(error)s. Events wait in the outbox."),
    "alert-group": _("%(what)s in %(frame)s"),
    "alert-group-unknown-frame": _("%(what)s in an unknown function"),
    "alert-growth": _("More than %(most)s events were archived within an hour."),
    "alert-mirror-lag": _(
        "The oldest message in the archive queue is %(age)s old. Check the log of events_mirror, "
        "or start another one."
    ),
    "alert-outbox-lag": _(
        "The oldest event in the outbox of database %(database)s is %(age)s old: %(meaning)s"
    ),
    "alert-stale": _("Last collected: %(at)s. Start events_mirror or events_worker."),
    "alert-stale-never": _("Never collected. Start events_mirror or events_worker."),
    # -- outbox
    "outbox-changed": _("it changed meanwhile; check it again"),
    "outbox-discarded": _("it is discarded"),
    "outbox-due": _("it is due, and the next relay publishes it"),
    "outbox-failed": _("publishing failed, and a relay tries again"),
    "outbox-held": _("RabbitMQ has not confirmed it yet"),
    "outbox-overdue": _("it is due, but no relay publishes it; run events_relay"),
    "outbox-published": _("it has been published and has left the outbox"),
}


class Reason:
    """A code and its parameters; two are equal if both are.

    Args:
        code: a key of :data:`TEXTS`.
        params: values of the text's placeholders; may be reasons or lazy texts themselves.
    """

    __slots__ = ("code", "params")

    def __init__(self, code: str, **params: object) -> None:
        self.code = code
        self.params = params
        TEXTS[code]

    @classmethod
    def of(cls, error: BaseException | Reason | str) -> Reason:
        """Return the reason that an error was raised with, or its own words as one."""
        if isinstance(error, BaseException) and len(error.args) == 1:
            [error] = error.args
        return error if isinstance(error, Reason) else cls("error", error=str(error))

    @classmethod
    def from_json(cls, stored: Mapping[str, object]) -> Reason:
        """Return the reason of :meth:`as_json`; a code of a newer version stands for itself."""
        params = dict(stored)
        code = str(params.pop("code"))
        return cls(code, **params) if code in TEXTS else cls("error", error=f"{code}: {params}")

    def as_json(self) -> dict[str, object]:
        """Return code and parameters, as rows store them; lazy texts in English."""
        with override(None):
            plain = {
                name: value if isinstance(value, (int, float)) else str(value)
                for name, value in self.params.items()
            }
        return {"code": self.code, **plain}

    def __str__(self) -> str:
        with override(None):
            return TEXTS[self.code] % {name: str(value) for name, value in self.params.items()}

    def translated(self) -> str:
        """Return the text in the active language."""
        params = {name: translated(value) for name, value in self.params.items()}
        return gettext(TEXTS[self.code]) % params

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reason) and (self.code, str(self)) == (other.code, str(other))

    def __hash__(self) -> int:
        return hash((self.code, str(self)))

    def __repr__(self) -> str:
        return f"<Reason {self.code}: {self}>"


def translated(value: Any) -> str:
    """Return a reason, or an error raised with one, in the active language; others as text."""
    if isinstance(value, BaseException):
        value = Reason.of(value)
    return value.translated() if isinstance(value, Reason) else str(value)


def stored(text: str) -> str:
    """Translate the text of a row, if it is one of ours that has no parameters."""
    return gettext(text) if text else ""
