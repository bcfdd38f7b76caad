"""The history: its stream, and which events a queue that is bound later has."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import amqp
import pytest

from django_amqp_events.broker import history
from django_amqp_events.broker.history import StreamReader
from django_amqp_events.broker.provisioning import startup
from django_amqp_events.broker.provisioning.binding_records import read_records
from django_amqp_events.exceptions import TopologyError
from tests.acceptance import harness
from tests.conftest import Vhost

from ..conftest import Service, wait_until

HISTORY = {"MAX_AGE": "14d", "MAX_BYTES": "1GB"}
KEY = "shop.order.created"
QUEUE = "billing.late"


@pytest.fixture
def billing(service: Callable[..., Service], fresh_vhost: Vhost) -> Service:
    made = service(fresh_vhost, HISTORY=HISTORY)
    made.declare()
    return made


def ids(made: Service, start: history.Start = "first") -> list[str]:
    queue = made.names.history
    reader = StreamReader(made.app, queue, made.settings, start=start)
    found = [record.received.headers["event-id"] for record in reader.records(wait=2)]
    reader.close()
    return found


def with_handler(service: Callable[..., Service], vhost: Vhost) -> Service:
    return service(vhost, HISTORY=HISTORY, HANDLERS={"late": [KEY]})


@contextmanager
def publishing(made: Service, publishers: int = 2) -> Iterator[list[str]]:
    """Publish events all the time, in threads with connections of their own."""
    published: list[str] = []
    stop = threading.Event()

    def publish(name: int) -> None:
        connection = made.connect()
        channel = connection.channel()
        channel.confirm_select()
        number = 0
        while not stop.is_set():
            event_id = f"{name}-{number}"
            message = message_of(event_id)
            channel.basic_publish_confirm(message, "events", KEY)
            published.append(event_id)
            number += 1
            time.sleep(0.002)

    threads = [threading.Thread(target=publish, args=(name,)) for name in range(publishers)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(published) > 50, "events are published")
        yield published
        done = len(published)
        wait_until(lambda: len(published) > done + 50, "more events are published")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def message_of(event_id: str) -> amqp.Message:
    return amqp.Message(
        b"[[],{},{}]",
        # A stream drops lists and tables.
        application_headers={
            "event-id": event_id,
            "id": event_id,
            "task": KEY,
            "timelimit": [None],
            "stamps": {},
        },
        content_type="application/json",
        delivery_mode=2,
    )


def test_the_stream_has_every_event_and_reading_removes_none(billing: Service) -> None:
    for number in range(700):
        billing.publish("events", KEY, headers={"event-id": str(number)})
    assert ids(billing) == ids(billing) == [str(number) for number in range(700)]
    assert ids(billing, start=650) == [str(number) for number in range(650, 700)]
    queue = billing.names.history
    last = history.last(billing.app, billing.settings, queue)
    assert last is not None
    assert last.offset == 699
    assert billing.inspect().result == "identical"


def test_an_empty_stream_has_no_first_and_no_last(billing: Service) -> None:
    queue = billing.names.history
    assert history.first(billing.app, billing.settings, queue) is None
    assert history.last(billing.app, billing.settings, queue) is None


def test_other_limits_are_drift(billing: Service, service: Callable[..., Service]) -> None:
    other = service(billing.vhost, HISTORY={"MAX_AGE": "7d", "MAX_BYTES": "1GB"})
    (item,) = other.inspect().having("different")
    assert str(item) == "queue events:history: different (x-max-age is 14D, declared is 7D)"
    assert other.inspect(exact=False).having("different")[0].name == "events:history"
    code, _out, err = other.command("events_declare", recreate_empty=True)
    assert code == 1
    assert "restore the limits of HISTORY" in err


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"x-initial-cluster-size": 1}, "ok"),
        ({"x-queue-leader-locator": "least-leaders"}, "ok"),
        ({"x-max-length-bytes": 10**9}, "different"),
    ],
)
def test_arguments_that_another_owner_has_set(
    service: Callable[..., Service], fresh_vhost: Vhost, more: dict[str, Any], state: str
) -> None:
    """They may place its members, and set no limit."""
    made = service(fresh_vhost, HISTORY={"MAX_AGE": "14d"})
    [ours] = [queue for queue in made.topology.queues if queue.name == made.names.history]
    arguments = {**ours.arguments, **more}
    made.channel().queue_declare(ours.name, durable=True, auto_delete=False, arguments=arguments)
    for exact in (True, False):
        (item,) = [each for each in made.inspect(exact=exact).items if each.name == ours.name]
        assert (item.state, next(iter(more)) in str(item)) == (state, True)


def test_a_policy_that_cuts_the_history_is_an_error(billing: Service) -> None:
    billing.set_policy("short", "^events", {"max-age": "1s"})
    (trouble,) = billing.inspect().errors
    assert "'short' sets max-age" in trouble.message


def test_a_queue_that_is_no_stream_is_named(
    service: Callable[..., Service], fresh_vhost: Vhost
) -> None:
    made = service(fresh_vhost, HISTORY=HISTORY)
    made.channel().queue_declare(made.names.history, durable=True, auto_delete=False)
    made.publish("", made.names.history)
    with pytest.raises(TopologyError, match="is no stream"):
        history.first(made.app, made.settings, made.names.history)


@pytest.mark.parametrize(
    ("gap", "keys"),
    [(None, {}), (0.7, {}), (0.1, {"MANAGEMENT_URL": ""}), (0.7, {"MANAGEMENT_URL": ""})],
)
def test_each_event_is_in_the_queue_or_before_its_record(
    billing: Service,
    service: Callable[..., Service],
    gap: float | None,
    keys: dict[str, str],
) -> None:
    """Also if two workers declare *gap* seconds apart, without the management API."""
    late = service(billing.vhost, HISTORY=HISTORY, HANDLERS={"late": [KEY]}, **keys)
    with publishing(billing) as published:
        if gap is None:
            code, _out, err = late.command("events_declare")
            assert not code, err
        else:
            with ThreadPoolExecutor() as pool:
                first = pool.submit(startup.declare, late.app, late.settings, late.topology)
                time.sleep(gap)
                startup.declare(late.app, late.settings, late.topology)
                first.result()
    records = read_records(late.app, late.settings)
    assert [(record.queue, *record.patterns) for record in records] == [(QUEUE, KEY)]
    every = ids(billing)
    assert Counter(every) == Counter(published)
    received = Counter(m.headers["event-id"] for m in late.take_all(QUEUE))
    past = Counter(
        event_id
        for offset, event_id in enumerate(every)
        if not any(record.received(offset) for record in records)
    )
    assert past.total() > 50
    assert received + past == Counter(published)
    assert not [name for name in billing.api.queues() if "window" in name["name"]]


@pytest.mark.parametrize("exact", [True, False])
def test_a_queue_that_was_bound_before_missed_nothing(
    service: Callable[..., Service], fresh_vhost: Vhost, exact: bool
) -> None:
    service(fresh_vhost, HANDLERS={"late": [KEY]}).declare()
    keys = {} if exact else {"MANAGEMENT_URL": ""}
    made = service(fresh_vhost, HISTORY=HISTORY, HANDLERS={"late": [KEY]}, **keys)
    for _ in range(2):
        assert made.command("events_declare")[0] == 0
        (record,) = read_records(made.app, made.settings)
        assert record.received(0)


def test_no_event_is_missed_while_a_pattern_replaces_another(
    billing: Service, service: Callable[..., Service]
) -> None:
    assert with_handler(service, billing.vhost).command("events_declare")[0] == 0
    with publishing(billing) as published:
        keys = ["shop.order.*"]
        late = service(billing.vhost, HISTORY=HISTORY, HANDLERS={"late": keys})
        code, _out, err = late.command("events_declare", delete_stale=True)
        assert not code, err
    received = Counter(m.headers["event-id"] for m in late.take_all(QUEUE))
    assert received == Counter(published)
    assert late.inspect().result == "identical"


@pytest.mark.parametrize("bound", [False, True])
def test_what_a_killed_declare_leaves_is_deleted_and_no_event_is_missed(
    billing: Service, service: Callable[..., Service], tmp_path: Path, bound: bool
) -> None:
    late = with_handler(service, billing.vhost)
    process = harness.Service(
        url=billing.vhost.url,
        where=tmp_path,
        name="billing",
        handlers="steps",
        events={
            "HISTORY": HISTORY,
            "HANDLERS": {"late": {"EVENTS": [KEY], "HANDLER": "testproject.steps.perform"}},
        },
    )
    window = late.names.window(QUEUE)
    with publishing(billing) as published:
        declaring = process.start("events_declare")
        wait_until(lambda: late.exists(QUEUE) and late.ready(QUEUE), "events pass the window")
        if bound:
            wait_until(lambda: not late.inspect().having("missing"), "the queue is bound")
        declaring.kill()
        assert late.exists(window)
        # Its copies are no events that nobody has handled.
        code, _out, err = late.command("events_recover", window)
        assert (code, "copies of events" in err) == (2, True)
        code, out, err = late.command("events_declare")
        assert not code, out + err
    (record,) = read_records(late.app, late.settings)
    assert record.received(0), "what the queue missed is not known"
    assert late.inspect().result == "identical"
    assert not late.exists(window)
    received = Counter(m.headers["event-id"] for m in late.take_all(QUEUE))
    assert set(received.values()) == {1}
    # Of each publisher, all since its first one.
    for name in ("0", "1"):
        own = [event_id for event_id in published if event_id.split("-")[0] == name]
        first = next(place for place, event_id in enumerate(own) if event_id in received)
        assert set(own[first:]) <= received.keys()
