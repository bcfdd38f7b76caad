"""Reasons: why an event, a batch or a payload was left as it is, as a code with parameters.

The service code returns codes; logs, rows, commands and tests read them in English
(:meth:`Reason.__str__`), pages in the language of the request (:meth:`Reason.translated`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.utils.translation import gettext, override
from django.utils.translation import gettext_noop as _

#: The text of each code, with a named placeholder for each parameter.
TEXTS: Final[Mapping[str, str]] = {
    # An error of the broker, the database or a library, in its own words.
    "error": "%(error)s",
    "interrupted": "somebody stopped it",
    "filtered": "the filters leave it out",
    "overdue": "it is replaying and overdue; --force replays it, and may run it twice",
    # -- replay
    "backend": _(
        "a replay needs RabbitMQ, which its outcome comes back through, and "
        "AMQP_EVENTS['BACKEND'] is %(backend)s; nothing was published"
    ),
    "body-too-large": _(
        "its body has %(size)s bytes, MAX_BODY is %(most)s; raise it first, here and in the workers"
    ),
    "body-too-large-for-page": _(
        "its body has %(size)s bytes, which is too much for a page; use `manage.py "
        "events_replay --edit %(pk)s --payload FILE`"
    ),
    "body-unreadable": _("its body cannot be read, so it would come back as it went; discard it"),
    "changed": _(
        "it has changed since you looked, and is %(state)s now: somebody else, or another "
        "tab, was faster"
    ),
    "changed-by": _("%(changed)s; the last decision: %(what)s by %(who)s, %(at)s"),
    "database-unreachable": _(
        "the database is away (%(error)s); what it could not note stays queued, and the "
        "mirror publishes it again under the same replay id"
    ),
    "deleted": _("there is no such event any more"),
    "in-transaction": _(
        "a replay is published after its claim is committed, and there is a transaction "
        "around it on the database %(database)s: ATOMIC_REQUESTS, transaction.atomic or "
        "AUTOCOMMIT off. Decorate the view with "
        "django.db.transaction.non_atomic_requests, or replay after the transaction; "
        "nothing was published"
    ),
    "not-overdue": _("its replay may be waiting for a retry still; it is not overdue"),
    "other-service": _("it is of the service %(service)s; replay it in a process of that service"),
    "state": _("it is %(state)s"),
    "unconfirmed": _(
        "its last replay was not confirmed and may be on its way, and with another payload both "
        "could run; replay it as it is first, under the same replay id"
    ),
    "unknown-event": _("no handler is known for event %(name)s on the queue %(queue)s"),
    "unknown-handler": _(
        "no handler is named %(name)s here; if it was renamed, put "
        '{"%(old)s": "its name today"} into AMQP_EVENTS["RENAMED_HANDLERS"]; '
        "if its module is imported by workers only, name it in AUTODISCOVER"
    ),
    # -- editing
    "contract": _("The event's contract does not take it: %(error)s."),
    "contract-own": _(
        "%(refused)s Nor does it take the event's own payload: it may want "
        "Python's types (Decimal, date) where a payload has text."
    ),
    "editing-off": _(
        "archived events can be edited only where AMQP_EVENTS['EDITING'] is True; nothing was "
        "published"
    ),
    "json": _("This is no JSON: %(error)s, in line %(line)s, column %(column)s."),
    "json-bool": _(
        "This is true or false; a payload is a JSON object: the arguments by name, in braces."
    ),
    "json-constant": _("%(text)s is no JSON; write a number, or null."),
    "json-list": _("This is a list; a payload is a JSON object: the arguments by name, in braces."),
    "json-text": _("This is a text; a payload is a JSON object: the arguments by name, in braces."),
    "json-twice": _("The name %(name)s is there twice; one of them would be lost."),
    "json-unreadable": _("This cannot be read as JSON: %(error)s."),
    "json-value": _(
        "This is a value; a payload is a JSON object: the arguments by name, in braces."
    ),
    "not-taken": _("The handler %(handler)s does not take %(names)s: it is left out."),
    "own-payload": _("It is the event's own payload; to publish that again, replay it."),
    "payload-too-large": _("It takes %(size)s bytes; MAX_BODY is %(most)s."),
    "redaction-failed": _(
        "the redaction hook %(hook)s failed (%(error)s), so the payload is hidden"
    ),
    # -- outbox
    "outbox-discarded": _("it is discarded"),
    "outbox-due": _("it is due already, and the next relay takes it"),
    "outbox-failed": _("it is not discarded, and is tried again by a relay"),
    "outbox-held": _("its process or a relay has it in hand, and waits for RabbitMQ's confirm"),
    "outbox-overdue": _("it is due already, but no relay takes it: run events_relay"),
    "outbox-published": _("it is not in the outbox any more: it has been published"),
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
    def of(cls, error: BaseException | str) -> Reason:
        """Return the reason that an error was raised with, or its own words as one."""
        if isinstance(error, BaseException) and len(error.args) == 1:
            [error] = error.args
        return error if isinstance(error, Reason) else cls("error", error=str(error))

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
