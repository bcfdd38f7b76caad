"""``events_find`` without a broker; tests/integration/management has one."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from django_amqp_events.models import InboxEntry
from tests.archive_rows import NOW
from tests.commands import run_command

from ..admin import admin_world as world


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("superseded", [True, False])
def test_an_event_that_a_newer_one_has_superseded(settings: Any, superseded: bool) -> None:
    settings.AMQP_EVENTS = world.EVENTS
    InboxEntry.objects.create(
        id=uuid4(), service="billing", handler="book", source="shop", event_id="order-1",
        name="shop.order.created", handled_at=NOW, superseded=superseded,
    )  # fmt: skip
    code, out, _ = run_command("events_find", "order-1")
    assert code == 0
    state = "superseded by a newer event" if superseded else "handled"
    assert f"inbox    billing book, {state} 20" in out
