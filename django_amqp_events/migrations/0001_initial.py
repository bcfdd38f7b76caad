import uuid

import django.db.models.deletion
from django.db import migrations, models

from django_amqp_events.migrations import _databases
from django_amqp_events.models.base import PartialIndex


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.RunPython(_databases.collate, migrations.RunPython.noop),
        migrations.CreateModel(
            name="Alert",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("kind", models.CharField(max_length=32)),
                ("key", models.CharField(max_length=255)),
                ("since", models.DateTimeField()),
                ("last", models.DateTimeField()),
                ("ended", models.DateTimeField(null=True)),
                ("open", models.BooleanField(default=True, null=True)),
                ("details", models.TextField()),
            ],
            options={
                "ordering": ["-since", "-pk"],
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("service", "kind", "key", "open"),
                        name="amqp_alert_open",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="FailureGroup",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("handler", models.CharField(max_length=255)),
                ("exception", models.CharField(max_length=255)),
                ("frame", models.CharField(max_length=255)),
                ("reason", models.CharField(max_length=32)),
                ("first_seen", models.DateTimeField()),
                ("note", models.TextField()),
                ("assignee", models.CharField(max_length=255)),
                ("ticket", models.CharField(max_length=255)),
                ("edits", models.PositiveIntegerField(default=0)),
            ],
            options={
                "verbose_name": "failure group",
                "verbose_name_plural": "failure groups",
                "permissions": [
                    ("assign_failuregroup", "Can write note, assignee and ticket of failure groups")
                ],
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="ArchivedEvent",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("handler", models.CharField(max_length=255)),
                ("queue", models.CharField(max_length=255)),
                ("name", models.CharField(max_length=255)),
                ("event_id", models.CharField(max_length=255)),
                ("source", models.CharField(max_length=255)),
                ("correlation_id", models.CharField(max_length=255)),
                ("causation_id", models.CharField(max_length=255)),
                ("published_at", models.DateTimeField(null=True)),
                ("first_failed_at", models.DateTimeField()),
                ("last_failed_at", models.DateTimeField()),
                ("mirrored_at", models.DateTimeField()),
                ("state", models.CharField(default="archived", max_length=16)),
                ("state_since", models.DateTimeField()),
                ("version", models.PositiveIntegerField(default=0)),
                ("reason", models.CharField(max_length=32)),
                ("detail", models.TextField()),
                ("exception", models.CharField(max_length=255)),
                ("message", models.CharField(max_length=255)),
                ("location", models.CharField(max_length=255)),
                ("attempts", models.PositiveIntegerField(default=1)),
                ("replays", models.PositiveIntegerField(default=0)),
                ("unconfirmed", models.BooleanField(default=False)),
                ("error", models.TextField()),
                ("body", models.BinaryField()),
                ("body_size", models.PositiveIntegerField()),
                ("headers_raw", models.BinaryField()),
                ("content_type", models.CharField(max_length=255)),
                ("content_encoding", models.CharField(max_length=255)),
                (
                    "group",
                    models.ForeignKey(
                        db_index=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="event_set",
                        to="django_amqp_events.failuregroup",
                    ),
                ),
            ],
            options={
                "verbose_name": "archived event",
                "verbose_name_plural": "archived events",
                "ordering": ["-last_failed_at", "-pk"],
                "permissions": [
                    (
                        "view_payload_archivedevent",
                        "Can view payload and headers of archived events",
                    ),
                    ("replay_archivedevent", "Can replay archived events"),
                    ("discard_archivedevent", "Can discard archived events"),
                    ("restore_archivedevent", "Can restore discarded events"),
                    ("force_archivedevent", "Can force replays of overdue events"),
                    (
                        "bulk_replay_archivedevent",
                        "Can replay archived events in batches",
                    ),
                    (
                        "edit_archivedevent",
                        "Can edit the payload of archived events and replay them",
                    ),
                    ("view_raw_archivedevent", "Can view raw bodies where payloads are redacted"),
                ],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["-last_failed_at", "-id"], name="amqp_events_failed"),
                    models.Index(
                        fields=["state", "-last_failed_at", "-id"], name="amqp_events_state"
                    ),
                    models.Index(
                        fields=["handler", "-last_failed_at", "-id"], name="amqp_events_handler"
                    ),
                    models.Index(
                        fields=["name", "-last_failed_at", "-id"], name="amqp_events_name"
                    ),
                    models.Index(
                        fields=["exception", "-last_failed_at", "-id"], name="amqp_events_exc"
                    ),
                    models.Index(
                        fields=["reason", "-last_failed_at", "-id"], name="amqp_events_reason"
                    ),
                    models.Index(fields=["state", "state_since"], name="amqp_events_since"),
                    models.Index(
                        fields=["event_id"],
                        name="amqp_events_event_id",
                        opclasses=["varchar_pattern_ops"],
                    ),
                    models.Index(
                        fields=["correlation_id"],
                        name="amqp_events_correlation",
                        opclasses=["varchar_pattern_ops"],
                    ),
                    models.Index(
                        fields=["group", "-last_failed_at", "-id"], name="amqp_events_group"
                    ),
                    models.Index(
                        fields=["group", "state", "mirrored_at", "state_since"],
                        name="amqp_events_group_state",
                    ),
                    PartialIndex(
                        where={"state": "archived"},
                        fields=["group", "-last_failed_at", "-id"],
                        name="amqp_events_group_open",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="GroupAction",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField()),
                ("action", models.CharField(max_length=16)),
                ("by", models.CharField(max_length=255)),
                ("text", models.TextField()),
                (
                    "group",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="action_set",
                        to="django_amqp_events.failuregroup",
                    ),
                ),
            ],
            options={
                "ordering": ["at", "pk"],
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="InboxEntry",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("handler", models.CharField(max_length=255)),
                ("source", models.CharField(max_length=255)),
                ("event_id", models.CharField(max_length=255)),
                ("name", models.CharField(max_length=255)),
                ("handled_at", models.DateTimeField()),
                ("superseded", models.BooleanField(default=False)),
            ],
            options={
                "verbose_name": "inbox entry",
                "verbose_name_plural": "inbox",
                "ordering": ["-handled_at", "pk"],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["service", "handled_at"], name="amqp_inbox_handled"),
                    models.Index(
                        fields=["event_id"],
                        name="amqp_inbox_event_id",
                        opclasses=["varchar_pattern_ops"],
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="LatestVersion",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("handler", models.CharField(max_length=255)),
                ("thing", models.CharField(max_length=255)),
                ("version", models.BigIntegerField()),
                ("is_time", models.BooleanField()),
                ("event_id", models.CharField(max_length=255)),
                ("handled_at", models.DateTimeField()),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["service", "handled_at"], name="amqp_latest_handled"),
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxEvent",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("event_id", models.CharField(max_length=255)),
                ("name", models.CharField(max_length=255)),
                ("exchange", models.CharField(max_length=255)),
                ("envelope", models.TextField()),
                ("body", models.BinaryField()),
                ("size", models.PositiveIntegerField()),
                ("created_at", models.DateTimeField()),
                ("due_at", models.DateTimeField()),
                ("claim", models.CharField(max_length=80, null=True)),
                ("attempts", models.PositiveIntegerField(default=0)),
                ("error", models.TextField()),
                ("discarded_at", models.DateTimeField(null=True)),
                ("discarded_by", models.CharField(max_length=255)),
                ("discard_reason", models.TextField()),
            ],
            options={
                "verbose_name": "outbox event",
                "verbose_name_plural": "outbox",
                "ordering": ["pk"],
                "permissions": [
                    ("view_payload_outboxevent", "Can view payload and headers of outbox events"),
                    ("discard_outboxevent", "Can discard outbox events"),
                    ("restore_outboxevent", "Can restore discarded events of the outbox"),
                ],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["service", "due_at", "id"], name="amqp_outbox_due"),
                    PartialIndex(
                        where={"attempts__gt": 0},
                        fields=["id"],
                        name="amqp_outbox_failed",
                    ),
                    PartialIndex(
                        where={"discarded_at__isnull": False},
                        fields=["service", "discarded_at"],
                        name="amqp_outbox_discarded",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="ReplayBatch",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("state", models.CharField(default="draft", max_length=16)),
                ("title", models.TextField()),
                ("group", models.UUIDField(null=True)),
                ("plan", models.JSONField(null=True)),
                ("backfill", models.JSONField(null=True)),
                ("next_offset", models.BigIntegerField(default=0)),
                ("backfill_left", models.JSONField(null=True)),
                ("reason", models.TextField()),
                ("rate", models.FloatField(null=True)),
                ("canary", models.PositiveIntegerField(null=True)),
                ("trusted", models.BooleanField(default=False)),
                ("threshold", models.PositiveSmallIntegerField(null=True)),
                ("note", models.TextField()),
                ("version", models.PositiveIntegerField(default=0)),
                ("created_at", models.DateTimeField()),
                ("created_by", models.CharField(max_length=255)),
                ("started_at", models.DateTimeField(null=True)),
                ("started_by", models.CharField(max_length=255)),
                ("resumed_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("runner", models.UUIDField(null=True)),
                ("leased_until", models.DateTimeField(null=True)),
                ("total", models.PositiveIntegerField(default=0)),
                ("pending", models.PositiveIntegerField(default=0)),
                ("queued", models.PositiveIntegerField(default=0)),
                ("published", models.PositiveIntegerField(default=0)),
                ("succeeded", models.PositiveIntegerField(default=0)),
                ("failed", models.PositiveIntegerField(default=0)),
                ("unconfirmed", models.PositiveIntegerField(default=0)),
                ("returned", models.PositiveIntegerField(default=0)),
                ("skipped", models.PositiveIntegerField(default=0)),
                ("counted_at", models.DateTimeField(null=True)),
            ],
            options={
                "verbose_name": "replay batch",
                "verbose_name_plural": "replay batches",
                "ordering": ["-created_at", "-pk"],
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="Revision",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("number", models.PositiveIntegerField()),
                ("body", models.BinaryField()),
                ("by", models.CharField(max_length=255)),
                ("at", models.DateTimeField()),
                ("reason", models.TextField()),
                (
                    "event",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="revision_set",
                        to="django_amqp_events.archivedevent",
                    ),
                ),
            ],
            options={
                "ordering": ["number"],
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("event", "number"), name="amqp_revision_number"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Replay",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("position", models.PositiveIntegerField(null=True)),
                ("version", models.PositiveIntegerField(default=0)),
                ("number", models.PositiveIntegerField(null=True)),
                ("forced", models.BooleanField(default=False)),
                ("handler", models.CharField(max_length=255)),
                ("state", models.CharField(default="queued", max_length=16)),
                ("requested_at", models.DateTimeField()),
                ("requested_by", models.CharField(max_length=255)),
                ("reason", models.TextField()),
                ("published_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("settled_at", models.DateTimeField(null=True)),
                ("publishes", models.PositiveIntegerField(default=0)),
                ("superseded", models.BooleanField(default=False)),
                ("error", models.TextField()),
                (
                    "event",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="replay_set",
                        to="django_amqp_events.archivedevent",
                    ),
                ),
                (
                    "batch",
                    models.ForeignKey(
                        db_index=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="replay_set",
                        to="django_amqp_events.replaybatch",
                    ),
                ),
                (
                    "revision",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.RESTRICT,
                        related_name="replay_set",
                        to="django_amqp_events.revision",
                    ),
                ),
            ],
            options={
                "ordering": ["number"],
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["batch", "state", "position"], name="amqp_replay_state"),
                    PartialIndex(
                        fields=["batch", "-settled_at"],
                        name="amqp_replay_settled",
                        where={"settled_at__isnull": False},
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("batch", "event"), name="amqp_replay_batch"),
                    models.UniqueConstraint(fields=("event", "number"), name="amqp_replay_number"),
                ],
            },
        ),
        migrations.CreateModel(
            name="ArchivedFailure",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("reason", models.CharField(max_length=32)),
                ("exception", models.CharField(max_length=255)),
                ("message", models.CharField(max_length=255)),
                ("failed_at", models.DateTimeField()),
                ("mirrored_at", models.DateTimeField()),
                ("late", models.BooleanField(default=False)),
                ("document", models.TextField()),
                (
                    "event",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="failure_set",
                        to="django_amqp_events.archivedevent",
                    ),
                ),
                (
                    "replay",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="failure_set",
                        to="django_amqp_events.replay",
                    ),
                ),
            ],
            options={
                "ordering": ["failed_at"],
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["failed_at", "late"], name="amqp_failure_at"),
                ],
            },
        ),
        migrations.CreateModel(
            name="ArchiveAction",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField()),
                ("action", models.CharField(max_length=16)),
                ("by", models.CharField(max_length=255)),
                ("reason", models.TextField()),
                (
                    "event",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="action_set",
                        to="django_amqp_events.archivedevent",
                    ),
                ),
                ("replay_id", models.UUIDField(null=True)),
                ("batch_id", models.UUIDField(null=True)),
                ("group_id", models.UUIDField(null=True)),
            ],
            options={
                "ordering": ["at", "pk"],
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["group_id", "-at", "-id"], name="amqp_action_group"),
                ],
            },
        ),
        migrations.CreateModel(
            name="ReplayBatchAction",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField()),
                ("action", models.CharField(max_length=16)),
                ("by", models.CharField(max_length=255)),
                ("note", models.TextField()),
                (
                    "batch",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="action_set",
                        to="django_amqp_events.replaybatch",
                    ),
                ),
            ],
            options={
                "ordering": ["at", "pk"],
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="SearchValue",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("path", models.CharField(max_length=255)),
                ("value", models.CharField(max_length=255)),
                (
                    "event",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="search_values",
                        to="django_amqp_events.archivedevent",
                    ),
                ),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(
                        fields=["value", "path", "event"],
                        name="amqp_search_value",
                        opclasses=["varchar_pattern_ops", "varchar_pattern_ops", "uuid_ops"],
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("event", "path", "value"), name="amqp_search_unique"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Snapshot",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField()),
                ("service", models.CharField(max_length=255)),
                ("seen", models.BooleanField(default=False)),
                ("open", models.PositiveIntegerField(default=0)),
                ("document", models.TextField()),
            ],
            options={
                "ordering": ["-pk"],
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["service", "-at"], name="amqp_snapshots_at"),
                    models.Index(fields=["service", "-id"], name="amqp_snapshots_id"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Dashboard",
            fields=[],
            options={
                "verbose_name": "dashboard",
                "verbose_name_plural": "dashboard",
                "permissions": [("view_dashboard", "Can view the dashboard")],
                "proxy": True,
                "default_permissions": (),
            },
            bases=("django_amqp_events.snapshot",),
        ),
    ]
