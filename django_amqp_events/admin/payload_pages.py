"""Payloads: the only place that decides what a user sees of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from django.core.exceptions import ObjectDoesNotExist
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern
from django.utils.translation import gettext as _

from ..archive import redaction
from ..archive.redaction import Sight
from ..reasons import Reason
from ..templatetags.amqp_events import TEXT, text
from . import formatting
from .action_pages import ActionPages
from .base import alias_of, as_file

#: The permission for raw bodies of archive and outbox.
VIEW_RAW: Final = "view_raw_archivedevent"


class PayloadPages(ActionPages):
    """Pages of rows that have a payload."""

    def has_view_raw_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if this user may see bodies as they were published."""
        if not self.allows(request, obj, "view_payload"):
            return False
        return not redaction.has_hook() or self.granted(request, VIEW_RAW)

    def get_urls(self) -> list[URLPattern]:
        view = self.row_view(self.payload_view, "view_payload", "view_raw")
        return [self._path("<uuid:pk>/payload/", view, "payload"), *super().get_urls()]

    def payload_view(self, request: HttpRequest, row: Any) -> HttpResponse:
        """Return the body as it was published, as a file."""
        # A deferred column is read from the database that a router names: a replica.
        try:
            row.refresh_from_db(using=alias_of(row), fields=["body"])
        except ObjectDoesNotExist:  # it is published meanwhile
            return self._missing(request, row.pk)
        return as_file(row.pk, bytes(row.body))

    def sight(self, request: HttpRequest, row: Any) -> Sight:
        """Return what this user sees of the payload of a row."""
        if not self.allows(request, row, "view_payload"):
            return "none"
        return "raw" if self.has_view_raw_permission(request, row) else "redacted"

    def shown_payload(
        self,
        request: HttpRequest,
        row: Any,
        *,
        head: bytes,
        size: int,
        read: Callable[[], Mapping[str, Any] | None],
    ) -> dict[str, Any]:
        """Return what ``payload.html`` shows of a body: redacted if there is a hook.

        Args:
            head: its first bytes.
            size: bytes of all of it.
            read: returns the payload, ``None`` or an exception if it cannot be decoded.
        """
        sight = self.sight(request, row)
        if sight == "none":
            return {"readable": False}
        raw = sight == "raw"
        payload, cut, problem = "", False, ""
        if size > formatting.SHOWN:
            problem = _("The payload is too long to decode here.")
        elif (document := _read(read)) is not None:
            safe = redaction.redact(row.name, document)
            if isinstance(safe, Reason):
                problem = text(safe, TEXT)
            else:
                payload, cut = formatting.pretty(dict(safe))
        else:
            problem = _("The payload cannot be decoded.")
        return {
            "readable": True,
            "payload": payload,
            "payload_cut": cut,
            "problem": problem,
            "redacted": redaction.has_hook(),
            "raw": raw,
            "body": formatting.body(head, size) if raw else None,
        }


def _read(read: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    try:
        return read()
    except Exception:  # noqa: BLE001 - Malformed, invalid headers, or a row changed by hand
        return None
