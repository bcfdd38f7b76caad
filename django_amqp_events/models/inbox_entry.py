"""The inbox: events that handlers with ``once`` have handled, and their newest versions."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..message.text import visible
from .base import LENGTH, Moment


class InboxEntry(models.Model):
    """An event that a handler with ``once`` has handled, in the transaction of its effects.

    Attributes:
        id: derived from service, handler, source, event id and name
            (:func:`django_amqp_events.worker.inbox.inbox_key`); its uniqueness is the guarantee.
        superseded: the handler did not run, since a newer event of the same thing was handled.
    """

    id = models.UUIDField(primary_key=True)
    service = models.CharField(max_length=LENGTH)
    handler = models.CharField(max_length=LENGTH)
    source = models.CharField(max_length=LENGTH)
    event_id = models.CharField(max_length=LENGTH)
    name = models.CharField(max_length=LENGTH)
    handled_at = Moment()
    superseded = models.BooleanField(default=False)

    class Meta:
        verbose_name = _("inbox entry")
        verbose_name_plural = _("inbox")
        ordering: ClassVar = ["-handled_at", "pk"]
        default_permissions = ("view",)
        indexes: ClassVar = [
            models.Index(fields=["service", "handled_at"], name="amqp_inbox_handled"),
            # For equal ids, and in PostgreSQL for prefixes, in any collation.
            models.Index(
                fields=["event_id"], name="amqp_inbox_event_id", opclasses=["varchar_pattern_ops"]
            ),
        ]

    def __str__(self) -> str:
        return visible(f"{self.name} ({self.event_id}) by {self.handler}")


class LatestVersion(models.Model):
    """The newest version of a thing that a handler with ``newest`` has handled.

    Attributes:
        id: derived from service, handler, its paths and the thing.
        version: an integer, or microseconds since 1970 (*is_time*).
    """

    id = models.UUIDField(primary_key=True)
    service = models.CharField(max_length=LENGTH)
    handler = models.CharField(max_length=LENGTH)
    thing = models.CharField(max_length=LENGTH)
    version = models.BigIntegerField()
    is_time = models.BooleanField()
    event_id = models.CharField(max_length=LENGTH)
    handled_at = Moment()

    class Meta:
        default_permissions = ()
        indexes: ClassVar = [
            models.Index(fields=["service", "handled_at"], name="amqp_latest_handled"),
        ]

    def __str__(self) -> str:
        return visible(f"{self.thing} of {self.handler}: {self.version}")
