"""The outbox: events not published yet."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..message.text import visible
from .base import LENGTH, Moment, PartialIndex, ReasonField


class OutboxEvent(models.Model):
    """A committed event that RabbitMQ has not confirmed; deleted when it has.

    Only :mod:`django_amqp_events.publish` changes rows. Times are by the database's clock.

    Attributes:
        id: begins with the time, so its order is roughly that of publishing.
        envelope: headers and properties, JSON.
        size: bytes of the body.
        due_at: from when a relay may lease it.
        claim: a relay's token of its lease, or :data:`~.outbox_rows.PUBLISHER`; ``None`` without a
            lease.
        attempts: publishes that failed after they began.
        error: why the last one failed.
        discarded_at: relays ignore it from then on, and ``events_prune`` deletes it.
    """

    #: Columns that are read only where they are shown or published.
    LARGE: ClassVar = ("body", "envelope")

    id = models.UUIDField(primary_key=True)
    service = models.CharField(max_length=LENGTH)
    event_id = models.CharField(max_length=LENGTH)
    name = models.CharField(max_length=LENGTH)
    exchange = models.CharField(max_length=LENGTH)
    envelope = models.TextField()
    body = models.BinaryField()
    size = models.PositiveIntegerField()
    created_at = Moment()
    due_at = Moment()
    claim = models.CharField(max_length=80, null=True)  # noqa: DJ001
    attempts = models.PositiveIntegerField(default=0)
    error = ReasonField()
    discarded_at = Moment(null=True)
    discarded_by = models.CharField(max_length=LENGTH)
    discard_reason = models.TextField()

    class Meta:
        verbose_name = _("outbox event")
        verbose_name_plural = _("outbox")
        ordering: ClassVar = ["pk"]
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("view_payload_outboxevent", "Can view payload and headers of outbox events"),
            ("discard_outboxevent", "Can discard outbox events"),
            ("restore_outboxevent", "Can restore discarded events of the outbox"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["service", "due_at", "id"], name="amqp_outbox_due"),
            # Partial: events that are published at once are in neither.
            PartialIndex(fields=["id"], name="amqp_outbox_failed", where={"attempts__gt": 0}),
            PartialIndex(
                fields=["service", "discarded_at"],
                name="amqp_outbox_discarded",
                where={"discarded_at__isnull": False},
            ),
        ]

    def __str__(self) -> str:
        return visible(f"{self.name} ({self.event_id})")
