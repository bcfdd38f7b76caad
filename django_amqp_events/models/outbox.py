"""The outbox: events not published yet."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from .base import LENGTH, Moment
from .text import visible


class OutboxEvent(models.Model):
    """A committed event that RabbitMQ has not confirmed; deleted when it has.

    Rows are made, taken and deleted by :mod:`django_amqp_events.publish.outbox_rows` alone.

    Attributes:
        id: begins with the time, so that its order is roughly that of publishing.
        service: who publishes it; its relays take no row of others.
        name, exchange, body, envelope: the message as it goes on the wire. ``envelope`` is JSON
            of headers and properties.
        size: bytes of the body.
        created_at: when it was published, by the database's clock.
        due_at: from when on a relay may take it, by the database's clock.
        claim: the relay that has it in hand; none while its own process has.
        attempts: publishes that failed. One that was not even begun does not count.
        error: why the last one failed.
        discarded_at: when somebody gave it up; no relay takes it, and it stays until
            ``events_prune`` finds it old.
        discarded_by, discard_reason: who, and why.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    service = models.CharField(max_length=LENGTH)
    event_id = models.CharField(_("event id"), max_length=LENGTH)
    name = models.CharField(_("event"), max_length=LENGTH)
    exchange = models.CharField(max_length=LENGTH)
    envelope = models.TextField()
    body = models.BinaryField()
    size = models.PositiveIntegerField(_("bytes"))
    created_at = Moment(_("published"))
    due_at = Moment(_("due"))
    claim = models.UUIDField(null=True, blank=True, editable=False)
    attempts = models.PositiveIntegerField(default=0)
    error = models.TextField(blank=True)
    discarded_at = Moment(_("discarded"), null=True, blank=True)
    # The database's defaults: an INSERT of a process that is older than these columns goes on.
    discarded_by = models.CharField(max_length=LENGTH, blank=True, db_default="")
    discard_reason = models.TextField(blank=True, db_default="")

    class Meta:
        verbose_name = _("outbox event")
        verbose_name_plural = _("outbox")
        ordering: ClassVar = ["pk"]
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("view_payload_outboxevent", "Can view payload and headers of outbox events"),
            ("publish_outboxevent", "Can publish outbox events now"),
            ("discard_outboxevent", "Can discard outbox events"),
            ("restore_outboxevent", "Can restore discarded events of the outbox"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["service", "due_at", "id"], name="amqp_outbox_due"),
            # Partial: they cost an event that is published at once nothing.
            models.Index(
                fields=["id"], name="amqp_outbox_failed", condition=models.Q(attempts__gt=0)
            ),
            models.Index(
                fields=["service", "discarded_at"],
                name="amqp_outbox_discarded",
                condition=models.Q(discarded_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return visible(f"{self.name} ({self.event_id})")
