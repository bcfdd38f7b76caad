"""The audit on PostgreSQL: the application's user adds to it and cannot change it.

The statements are those of docs/audit.md, run as they stand there.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, ProgrammingError, connections, transaction

from django_amqp_events.archive import replay, retention, states
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    Replay,
    Revision,
    State,
)
from tests.conftest import POSTGRESQL, Database

from ..archiving import (
    archived,
    mirror_all,
    outcome,
    publish,
    received,
)

ROOT = Path(__file__).resolve().parents[3]
QUEUE = "billing.send_invoice"

pytestmark = POSTGRESQL


def statements(role: str) -> list[str]:
    page = (ROOT / "docs" / "audit.md").read_text()
    [block] = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    lines = [line for line in block.splitlines() if not line.startswith("--")]
    return [
        each.strip()
        for each in "\n".join(lines).replace("app_user", role).split(";")
        if each.strip()
    ]


@pytest.fixture
def restricted(archive_database: Database) -> Iterator[str]:
    """The archive's connection is that of a user with the rights of docs/audit.md."""
    role = f"app_{secrets.token_hex(6)}"
    connection = connections[archive_database.alias]
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role} LOGIN")
        cursor.execute(f"GRANT USAGE ON SCHEMA public TO {role}")
        cursor.execute(
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"
        )
        cursor.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}")
        for each in statements(role):
            cursor.execute(each)
    owner = connection.settings_dict["USER"]
    connection.close()
    connection.settings_dict["USER"] = role
    yield role
    connection.close()
    connection.settings_dict["USER"] = owner
    with connection.cursor() as cursor:
        cursor.execute(f"DROP OWNED BY {role}")
        cursor.execute(f"DROP ROLE {role}")
    connection.close()


def seen() -> dict[Any, int]:
    return dict(ArchivedEvent.objects.values_list("pk", "version"))


def decide() -> ArchivedEvent:
    """Mirror, edit, fail again, replay, succeed: all that the application does."""
    now = datetime.now(UTC)
    [pk] = seen()
    states.discard(seen(), by="ada", reason="a test", now=now)
    states.restore(seen(), by="ada", reason="", now=now)
    report = replay.edit(pk, seen()[pk], {"order_id": 8}, by="ada", reason="wrong number")
    assert report.published == [pk], report
    return ArchivedEvent.objects.get()


def test_application_cannot_change_its_audit_rows(
    service, fresh_vhost, archive_database: Database, restricted: str
) -> None:
    billing = service(
        fresh_vhost,
        HANDLERS={"send_invoice": ["shop.#"]},
        EDITING=True,
        RETENTION={"SUCCEEDED": 0.001},
    )
    billing.declare()
    publish(billing, archived(received("order-1")))
    mirror_all(billing)
    row = decide()
    message = billing.take(QUEUE)
    made = Replay.objects.get()
    again = received("order-1", body=bytes(message.body, "utf-8"))
    publish(billing, archived(again, replay_id=str(made.pk)))
    mirror_all(billing)
    assert replay.replay(seen(), by="bob").published == [row.pk]
    publish(billing, outcome(row, str(Replay.objects.get(number=2).pk)))
    mirror_all(billing)
    assert ArchivedEvent.objects.get().state == State.SUCCEEDED
    actions = ["discard", "restore", "edit", "replay"]
    assert list(ArchiveAction.objects.values_list("action", flat=True)) == actions
    for statement in (
        "UPDATE django_amqp_events_archiveaction SET by = 'nobody'",
        "DELETE FROM django_amqp_events_archiveaction",
        "TRUNCATE django_amqp_events_archiveaction",
        "UPDATE django_amqp_events_revision SET body = ''",
        "DELETE FROM django_amqp_events_revision",
        "DELETE FROM django_amqp_events_archivedevent",
    ):
        with (
            pytest.raises(DatabaseError) as raised,
            transaction.atomic(using=archive_database.alias),
            connections[archive_database.alias].cursor() as cursor,
        ):
            cursor.execute(statement)
        assert "permission denied" in str(raised.value), statement
    assert ArchiveAction.objects.count() == 4
    assert bytes(Revision.objects.get().body) == b'[[],{"order_id":8},{}]'
    # To delete what is old needs the owner.
    with pytest.raises(ProgrammingError, match="permission denied"):
        retention.prune({State.SUCCEEDED: 1e-6}, service="billing")
    assert ArchivedEvent.objects.count() == 1
    code, _, err = billing.command("events_prune")
    assert code == 2
    assert "permission denied" in err
