"""One message is one row and one failure, however often it is copied, read and stored.

A model of the two queues: ``events_recover`` moves messages from one to the archive, mirrors read
that. Each may die at each step, and a message without an ack is delivered again. A message without
an id may then be two rows, but two messages are never one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from django.db import IntegrityError

from django_amqp_events import conf, databases
from django_amqp_events.archive import row_writer
from django_amqp_events.archive.entries import Item, read_entries
from django_amqp_events.archive.recovery import RecoveredCopies
from django_amqp_events.backoff import Backoff
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.message.types import Message, Received
from django_amqp_events.models import ArchivedEvent, ArchivedFailure
from tests.conftest import slow
from tests.integration.archiving import archived, received, store_items, taken

QUEUE = "billing.send_invoice"


def plain(body: bytes, headers: dict[str, Any] | None = None) -> Received:
    return Received(
        queue=QUEUE, exchange="events", routing_key="shop.order.created", body=body,
        headers=headers or {"a": 1}, properties={"content_type": "application/json"},
    )  # fmt: skip


ARCHIVE_MESSAGE = archived(received("1"))
#: Messages of the recovered queue, and whether equal ones are separate events.
KINDS: dict[str, tuple[Received, bool]] = {
    "with an id": (received("1"), False),
    "JSON without an id": (plain(b'{"order_id": 7}'), True),
    "bytes": (plain(b"\xff\x00"), True),
    "unreadable": (replace(plain(b"x"), headers={}, properties={}, unreadable="a time"), True),
    "archive message": (replace(taken(ARCHIVE_MESSAGE), queue=QUEUE), False),
    "archive message without an id": (
        replace(taken(archived(plain(b"\xff"), identified=False, handler=None)), queue=QUEUE),
        True,
    ),
}


class Queue:
    """Delivers its messages in order, and again those that are not acked."""

    def __init__(self, *messages: Received) -> None:
        self.messages = list(messages)

    def deliver(self, count: int) -> list[Received]:
        given = self.messages[:count]
        self.messages[:count] = [replace(message, redelivered=True) for message in given]
        return given

    def ack(self, count: int) -> None:
        del self.messages[:count]


def recover(queue: Queue, archive: Queue, *, batch: int, dies: str = "") -> None:
    copies = RecoveredCopies(conf.get_settings(), get_registry(), QUEUE)
    while given := queue.deliver(batch):
        built = [copies.build(message)[1] for message in given]
        if dies == "before the confirm":
            built = built[:-1]
        archive.messages += [taken(message) for message in built]
        if dies:
            return
        queue.ack(len(given))


def recovered(queue: Queue, archive: Queue, fault: str) -> None:
    if fault in ("before the confirm", "before the ack"):
        recover(queue, archive, batch=len(queue.messages), dies=fault)
        recover(queue, archive, batch=len(queue.messages), dies=fault)
    recover(queue, archive, batch=1 if fault == "one by one" else len(queue.messages))


RECOVERIES = ("none", "before the confirm", "before the ack", "one by one")


def read(messages: Sequence[Received]) -> list[Item]:
    return read_entries(messages, conf.get_settings())


def mirror(archive: Queue) -> None:
    while given := archive.deliver(2):
        store_items(read(given))
        archive.ack(len(given))


def lost_answer(archive: Queue) -> None:
    """The answer to COMMIT is lost: the mirror stores the batch again, at last by halves."""
    while given := archive.deliver(3):
        items = read(given)
        store_items(items)
        store_items(items)
        for item in items:
            store_items([item])
        archive.ack(len(given))


def killed(archive: Queue) -> None:
    """It dies before its ack: all is read again, by another connection."""
    for size in (1, 2, 20):
        store_items(read(archive.deliver(size)))
    mirror(archive)


def two_readers(archive: Queue) -> None:
    """RabbitMQ gives the messages of a mirror that hangs to another one, which is faster."""
    first = read(archive.deliver(20))
    second = read(archive.deliver(20))
    store_items(second)
    store_items(first)
    archive.ack(20)


def two_mirrors(archive: Queue) -> None:
    """Each stores its part while the other one does: both see the rows from before."""
    items = read(archive.deliver(20))
    first, second = items[:1], items[1:] or items
    find = row_writer._find_replays

    def late(*given: Any) -> Any:
        found = find(*given)
        if first:
            other = first.copy()
            first.clear()
            store_items(other)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_writer, "_find_replays", late)
        store_items(second)
    archive.ack(20)


MIRRORS: tuple[Callable[[Queue], None], ...] = (
    mirror, lost_answer, killed, two_readers, two_mirrors,
)  # fmt: skip


@pytest.mark.django_db
@pytest.mark.parametrize(
    "kind",
    ["with an id", "JSON without an id", "archive message without an id"]
    + slow("bytes", "unreadable", "archive message"),
)
def test_a_message_is_one_row_whatever_dies(kind, monkeypatch):
    monkeypatch.setattr(databases, "RETRY_BACKOFF", Backoff(0, 0))
    message, separate = KINDS[kind]
    for count, fault, reading in product((1, 2, 3), RECOVERIES, MIRRORS):
        archive = Queue()
        recovered(Queue(*[message] * count), archive, fault)
        reading(archive)
        rows, failures = ArchivedEvent.objects.count(), ArchivedFailure.objects.count()
        about = (count, fault, reading.__name__)
        copies = {"before the confirm": 3 * count - 2, "before the ack": 3 * count}
        assert rows == failures == (copies.get(fault, count) if separate else 1), about
        # The next message is another one, though it is equal.
        recovered(Queue(message), archive, "none")
        mirror(archive)
        assert ArchivedEvent.objects.count() == (rows + 1 if separate else 1), about
        ArchivedEvent.objects.all().delete()


def test_what_a_worker_archives_is_one_row_if_it_is_published_twice(db):
    """And two are two, since each has its time."""
    one, two = (taken(archived(plain(b"\xff"), identified=False, handler=None)) for _ in range(2))
    for reading in MIRRORS:
        reading(Queue(one, one, two))
        assert ArchivedEvent.objects.count() == ArchivedFailure.objects.count() == 2, reading
        ArchivedEvent.objects.all().delete()


def test_messages_of_nobody_are_each_a_row(db):
    """Published to the archive by hand: nothing tells equal ones apart, nor a second delivery."""
    message = taken(Message(exchange="billing:archive", routing_key="a", body=b"x", headers={},
                            properties={}))  # fmt: skip
    for reading in MIRRORS:
        reading(Queue(message, message, replace(message, properties={"message_id": "1"})))
        rows = ArchivedEvent.objects.count()
        assert rows == ArchivedFailure.objects.count()
        assert rows == 3 or (rows > 3 and reading in (killed, two_readers)), reading
        ArchivedEvent.objects.all().delete()


ANAGRAMS = ({"a": "12"}, {"a": "21"}, {"a": {"b": 1, "c": 2}}, {"a": {"b": 2, "c": 1}})


def test_messages_that_the_database_refuses_are_told_apart_by_what_it_refused(db, monkeypatch):
    real = row_writer.new_row

    def without_headers(entry: Any) -> Any:
        if entry.archived.headers:
            raise IntegrityError("no such character")
        return real(entry)

    monkeypatch.setattr(databases, "RETRY_BACKOFF", Backoff(0, 0))
    monkeypatch.setattr(row_writer, "new_row", without_headers)
    given = [replace(plain(b"{}", headers), exchange="") for headers in ANAGRAMS]
    items = read(given + [taken(archived(received(str(n), body=b"{}"))) for n in range(2)])
    for _ in range(2):
        store_items(items)
        assert ArchivedEvent.objects.count() == ArchivedFailure.objects.count() == 6
