"""With autocommit off, everything that relies on a commit refuses before it acks or publishes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connections

from django_amqp_events import ConfigurationError, handler
from django_amqp_events.archive import retention
from django_amqp_events.conf import get_settings
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.models import InboxEntry, State
from django_amqp_events.publish.outbox_rows import insert, rows
from django_amqp_events.publish.relay import Relay
from django_amqp_events.testing import override_events
from django_amqp_events.worker import inbox
from tests.celery_app import app
from tests.conftest import Database
from tests.event_messages import published
from tests.integration.archiving import store

ALIAS = "archive"
REFUSED = "autocommit is off on the database 'archive'"


@pytest.fixture
def manual(archive_database: Database) -> Iterator[None]:
    with override_events(SERVICE="billing", AUTODISCOVER=[], DATABASE=ALIAS):
        message = published("a.b", event_id="1", service="billing")
        insert([message], alias=ALIAS, service="billing", held=False)
        archive_database.close()
        connections[ALIAS].settings_dict["AUTOCOMMIT"] = False
        yield
        archive_database.close()


@pytest.mark.usefixtures("manual")
def test_waiting_publishes_fail_with_the_commit() -> None:
    @handler("a.b", name="t.never", once=True)
    def never() -> None: ...

    called: list[str] = []
    event = ReceivedEvent(id="1", name="a.b", service="shop")
    known = get_registry().handlers["t.never"]
    with pytest.raises(ConfigurationError, match=REFUSED):
        inbox.once(known, event, lambda: called.append("never"))
    assert not called
    with pytest.raises(ConfigurationError, match=REFUSED):
        store([])
    with pytest.raises(ConfigurationError, match=REFUSED):
        # It would never end, so the broker is not even asked.
        Relay(app=app, settings=get_settings(), alias=ALIAS).run(until_empty=True)
    for name in ("outbox", "inbox", State.SUCCEEDED):
        with pytest.raises(ConfigurationError, match=REFUSED):
            retention.prune({name: 31 * 86400}, service="billing")
    assert rows(ALIAS).count() == 1
    assert not InboxEntry.objects.using(ALIAS).exists()
