"""``events_mirror`` as a person starts it: what it says, how it ends, what it takes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from django_amqp_events.message.types import Message
from django_amqp_events.models import ArchivedEvent

from ..archiving import archived, publish, received
from ..conftest import wait_until
from ..processes import mirrors

ARCHIVE = "billing:archive"
SQLITE = pytest.mark.parametrize("archive_database", ["sqlite"], indirect=True)


@pytest.fixture
def processes(billing, archive_database, tmp_path):
    with mirrors(billing.vhost, archive_database, tmp_path) as starter:
        yield starter


@SQLITE
def test_until_empty_reports_its_counts(billing, processes):
    assert processes.empty().splitlines()[-1] == "events_mirror: stopped; nothing in all"
    message = archived(received("1"))
    publish(billing, *(archived(received(f"{n}")) for n in range(2, 41)), message, message)
    said = processes.empty("--batch-size", "7").splitlines()
    assert said[0] == f"events_mirror: mirroring {ARCHIVE}"
    assert said[-1] == "events_mirror: stopped; 40 new events, 1 known already in all"


@SQLITE
def test_sigterm_ends_it_with_everything_acked(billing, processes):
    """A socket that is closed with messages unread would take the last acks with it."""
    running = processes.start("--batch-size", "2")
    publish(billing, *(archived(received(f"{n}")) for n in range(600)))
    wait_until(lambda: ArchivedEvent.objects.count() > 100, "it is at work", 60)
    assert running.stop() == 0
    stored = ArchivedEvent.objects.count()
    [total] = re.findall(r"stopped; (\d+) new events in all", running.said)
    assert int(total) == stored
    wait_until(lambda: billing.ready(ARCHIVE) == 600 - stored, "what it had is acked")
    assert "known" not in processes.empty()


@pytest.mark.slow
@SQLITE
def test_large_messages_do_not_fill_the_memory(billing, processes):
    """500 MiB pass through; a batch ends at 32 MiB."""
    size = 5 * 1024 * 1024
    for n in range(0, 100, 4):
        publish(
            billing,
            *(
                Message(
                    exchange=ARCHIVE,
                    routing_key="large",
                    body=os.urandom(1024) * (size // 1024),
                    headers={"event-id": f"{n + m}"},
                    properties={"delivery_mode": 2},
                )
                for m in range(4)
            ),
        )
    running = processes.start()
    wait_until(lambda: ArchivedEvent.objects.count() == 100, "all are stored", 100)
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) // 1024
    assert peak < 400, f"{peak} MiB at the most"
    assert running.stop() == 0
