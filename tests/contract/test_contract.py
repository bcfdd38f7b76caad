"""What every broker and worker must do: each case on the in-memory broker and on RabbitMQ.

A case is a generator: what it publishes stands before its ``yield``, what must have come of it
after. All cases publish first, then time passes once, for all of them together.

What the worker decides from a handler's options, exceptions and arguments is in
acceptance/worker/test_core.py and test_combined.py: both worlds run the same code for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from datetime import datetime

import pytest

from django_amqp_events.broker.topology import Names
from django_amqp_events.conf import get_settings
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import (
    ExchangeMissingError,
    UnroutableError,
)
from django_amqp_events.message import encoding, text
from django_amqp_events.message.archive_message import Archived
from django_amqp_events.message.types import Message, task_id
from django_amqp_events.testing import override_events
from tests.event_messages import delivered, published

from .worlds import World, memory_world, rabbit_world

Case = Callable[[World], Generator[None]]
CASES: list[Case] = []
#: Seconds of the longest chain of delays: 1 + 2 + 4.
DELAYS = 7.0


def case(function: Case) -> Case:
    CASES.append(function)
    return function


class Played:
    """A world after all cases have published and time has passed."""

    def __init__(self, world: World) -> None:
        self.running: dict[str, Generator[None] | Exception] = {}
        for function in CASES:
            running = function(world)
            try:
                next(running)
            except Exception as exc:  # noqa: BLE001 - raised in the test of that case
                self.running[function.__name__] = exc
            else:
                self.running[function.__name__] = running
        world.advance(DELAYS)

    def check(self, name: str) -> None:
        running = self.running[name]
        if isinstance(running, Exception):
            raise running
        with pytest.raises(StopIteration):
            next(running)


@pytest.fixture(scope="module", params=["memory", "rabbitmq"])
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:
    where = tmp_path_factory.mktemp(request.param)
    world = (
        memory_world(where)
        if request.param == "memory"
        else rabbit_world(where, request.getfixturevalue("vhost"))
    )
    with world as entered:
        yield Played(entered)


def one(world: World, event_id: str) -> Archived:
    found = world.archived(event_id)
    assert len(found) == 1, found
    return found[0]


def attempts(world: World, handler: str, event_id: str) -> list[int]:
    return [run["attempt"] for run in world.runs(handler, event_id)]


# -- handling -----------------------------------------------------------------------------


@case
def handled_once(world: World) -> Generator[None]:
    event = world.publish("case.once", {"number": 1, "text": "ä", "when": datetime(2026, 1, 2)})  # noqa: DTZ001
    yield
    (run,) = world.runs("once", event)
    assert run["payload"] == {"number": 1, "text": "ä", "when": "2026-01-02T00:00:00"}
    assert run["attempt"] == 1
    assert run["due_at"] is None
    assert world.archived(event) == []


@case
def every_handler_gets_the_event_and_only_the_failing_one_its_retries(
    world: World,
) -> Generator[None]:
    event = world.publish("case.trio")
    yield
    assert attempts(world, "first", event) == [1]
    assert attempts(world, "second", event) == [1]
    assert attempts(world, "third", event) == [1, 2, 3, 4]
    assert world.archived(event) == []


@case
def retries_come_when_they_are_due(world: World) -> Generator[None]:
    event = world.publish("case.backoff")
    yield
    runs = world.runs("backoff", event)
    assert [run["attempt"] for run in runs] == [1, 2, 3, 4]
    at = [datetime.fromisoformat(run["at"]) for run in runs]
    due = [datetime.fromisoformat(run["due_at"]) for run in runs[1:]]
    for before, due_at, after, delay in zip(at, due, at[1:], (1, 2, 4), strict=False):
        # The attempt failed a moment after it wrote that it ran.
        assert delay <= (due_at - before).total_seconds() <= delay + world.late
        assert 0 <= (after - due_at).total_seconds() <= world.late
    assert world.archived(event) == []


@case
def exhausted_is_archived(world: World) -> Generator[None]:
    event = world.publish("case.exhausted", {"reason": "nothing"}, headers={"tenant": "x"})
    yield
    assert attempts(world, "exhausted", event) == [1, 2, 3]
    found = one(world, event)
    assert found.reason == "exhausted"
    assert found.handler == "c.exhausted"
    assert found.attempts == 3
    assert found.exception == "LookupError"
    assert found.message == "nothing 3\nsecond line"
    assert 'raise LookupError(f"{reason} {_event().attempt}' in found.traceback
    assert found.payload == {"reason": "nothing"}
    assert found.body == b'[[],{"reason":"nothing"},{}]'
    assert found.headers["tenant"] == "x"
    assert [entry["attempt"] for entry in found.history] == [1, 2, 3]
    assert [entry["message"] for entry in found.history] == ["nothing 1", "nothing 2", "nothing 3"]
    moments = [text.parse_moment(entry["at"]) for entry in found.history]
    assert found.first_failed_at == moments[0]
    assert found.last_failed_at == moments[2]
    assert found.event is not None
    assert found.event.name == "case.exhausted"
    assert found.document["queue"] == "contract.c.exhausted"
    assert found.document["deaths"][0]["reason"] == "expired"
    assert found.document["deaths"][0]["queue"] == "contract:delay.2s"


# -- what a handler asks for --------------------------------------------------------------


@case
def retry_with_countdown(world: World) -> Generator[None]:
    event = world.publish("case.countdown", {"seconds": 3})
    yield
    first, second = world.runs("countdown", event)
    gap = datetime.fromisoformat(second["at"]) - datetime.fromisoformat(first["at"])
    # No queue has 3 s: 2 s and 1 s.
    assert 3 <= gap.total_seconds() < 3 + world.late
    assert second["attempt"] == 2


@case
def what_is_requeued_for_ever_ends_in_the_graveyard(world: World) -> Generator[None]:
    event = world.publish("case.poison")
    yield
    # A delivery limit of 5 means 6 deliveries. One is without a run if it was on its way when the
    # worker replaced its consumer, since the first run tells how long the handler takes.
    assert attempts(world, "poison", event) in ([1] * 6, [1] * 5)
    assert world.depth("contract:graveyard") == 1
    assert world.archived(event) == []


@case
def a_bound_handler(world: World) -> Generator[None]:
    event = world.publish("case.bound", {"order_id": 5}, headers={"tenant": "x"})
    yield
    (run,) = world.runs("bound", event)
    assert run["own"] == event
    assert run["task"] == "c.bound"
    assert run["task_id"] == task_id(
        "contract", "c.bound", ReceivedEvent(id=event, name="case.bound", service="contract")
    )
    assert run["headers"] == {"tenant": "x"}
    assert run["service"] == "contract"


# -- routing ------------------------------------------------------------------------------


@case
def topic_patterns(world: World) -> Generator[None]:
    one_word = world.publish("case.pattern.one")
    two_words = world.publish("case.pattern.one.two")
    no_word = world.publish("case.pattern")
    yield
    assert [len(world.runs("star", event)) for event in (one_word, two_words, no_word)] == [1, 0, 0]
    # Two of its patterns match case.pattern.one; a queue gets one copy.
    assert [len(world.runs("hashed", event)) for event in (one_word, two_words, no_word)] == [1] * 3


@case
def several_handlers_on_one_queue(world: World) -> Generator[None]:
    a, b = world.publish("case.mail.a"), world.publish("case.mail.b")
    yield
    assert [len(world.runs("mail_a", event)) for event in (a, b)] == [1, 0]
    assert [len(world.runs("mail_b", event)) for event in (a, b)] == [0, 1]


@case
def an_event_that_nobody_on_the_queue_handles(world: World) -> Generator[None]:
    message = raw(world, "case.mail.zzz", event_id="unknown-1")
    assert world.send(replace(message, exchange="", routing_key="contract.mail")) is None
    yield
    found = one(world, "unknown-1")
    assert (found.reason, found.handler) == ("unknown", None)
    assert found.body == message.body


@case
def unrouted_warn_and_ignore(world: World) -> Generator[None]:
    records: list[logging.LogRecord] = []
    log = logging.getLogger("django_amqp_events.publish")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]
    log.addHandler(handler)
    try:
        with override_events(UNROUTED="warn"):
            world.publish("nobody.listens")
        warned = [record.levelname for record in records]
        with override_events(UNROUTED="ignore"):
            world.publish("nobody.listens")
    finally:
        log.removeHandler(handler)
    yield
    assert warned == ["WARNING"]
    assert len(records) == 1


@case
def a_missing_exchange(world: World) -> Generator[None]:
    error = world.send(replace(raw(world, "case.once"), exchange="not-there"))
    yield
    assert isinstance(error, ExchangeMissingError)
    assert error.published is False


@case
def an_unroutable_replay_is_an_error(world: World) -> Generator[None]:
    error = world.send(
        replace(raw(world, "case.once"), exchange=names().replay, routing_key="contract.gone")
    )
    yield
    assert isinstance(error, UnroutableError)


@case
def a_delayed_event_whose_handler_is_gone_is_archived(world: World) -> Generator[None]:
    message = raw(world, "case.once", event_id="gone-1")
    message = replace(message, exchange=names().delay(1), routing_key="contract.c.gone")
    message = replace(message, headers={**message.headers, "event-handler": "c.gone"})
    assert world.send(message) is None
    yield
    found = one(world, "gone-1")
    assert (found.reason, found.handler) == ("unknown", "c.gone")


# -- messages -----------------------------------------------------------------------------


@case
def an_event_published_by_a_handler_knows_its_cause(world: World) -> Generator[None]:
    event = world.publish("case.cause", correlation_id="the-order")
    yield
    runs = [run for run in world.runs("effect_seen") if run["payload"]["from"] == event]
    assert len(runs) == 1
    assert runs[0]["correlation_id"] == "the-order"
    assert runs[0]["causation_id"] == event
    assert runs[0]["event"] != event


@case
def a_message_without_an_id_is_archived(world: World) -> Generator[None]:
    message = replace(raw(world, "case.once"), body=b"no id at all", headers={}, properties={})
    assert world.send(message) is None
    yield
    (found,) = [item for item in world.all_archived() if item.body == b"no id at all"]
    assert found.reason == "malformed"
    assert found.event is None


@case
def our_headers_are_not_believed_from_a_publisher(world: World) -> Generator[None]:
    lies = {
        "event-attempt": 9,
        "event-handler": "c.replay_fails",
        "event-due-at": "2099-01-01T00:00:00Z",
        "event-replay-id": "forged",
        "eta": "2099-01-01T00:00:00Z",
        "expires": "2001-01-01T00:00:00Z",
        "event-name": "case.other",
        "task": "os.system",
        "ignore_result": False,
    }
    for name, event_id in (("case.once", "liar-1"), ("case.replay_fails", "liar-2")):
        message = raw(world, name, event_id=event_id)
        assert world.send(replace(message, headers={**message.headers, **lies})) is None
    yield
    (run,) = world.runs("once", "liar-1")
    assert (run["attempt"], run["replay_id"], run["name"]) == (1, None, "case.once")
    assert world.runs("replay_fails", "liar-1") == []
    found = one(world, "liar-2")
    assert found.event is not None
    assert (found.attempts, found.event.attempt, found.event.replay_id) == (1, 1, None)
    assert (found.handler, found.event.name) == ("c.replay_fails", "case.replay_fails")


# -- replays ------------------------------------------------------------------------------


@case
def a_replay_that_ends_well_is_reported(world: World) -> Generator[None]:
    assert world.send(replay(world, "case.replayed", "c.replayed", "replayed-1", "r-1")) is None
    yield
    (run,) = world.runs("replayed", "replayed-1")
    assert (run["replay_id"], run["attempt"]) == ("r-1", 1)
    (outcome,) = world.outcomes("replayed-1")
    assert (outcome.outcome, outcome.handler) == ("succeeded", "c.replayed")
    assert outcome.event.replay_id == "r-1"


@case
def a_replay_that_fails_is_archived_under_its_id(world: World) -> Generator[None]:
    assert world.send(replay(world, "case.x", "c.replay_fails", "replayed-2", "r-2")) is None
    yield
    found = one(world, "replayed-2")
    assert found.event is not None
    assert (found.reason, found.event.replay_id) == ("failed", "r-2")
    assert world.outcomes("replayed-2") == []


@case
def an_ordinary_success_is_not_reported(world: World) -> Generator[None]:
    event = world.publish("case.replayed")
    yield
    assert len(world.runs("replayed", event)) == 1
    assert world.outcomes(event) == []


# -- versions -----------------------------------------------------------------------------


@case
def an_older_version_is_upcast_in_each_attempt(world: World) -> Generator[None]:
    events = [
        world.publish("case.version", {"total": "9.90"}),
        world.publish("case.version.v2", {"total": "9.90", "currency": "USD"}),
        world.publish("case.version.v3", {"total": "9.90", "currency": "USD", "country": "US"}),
    ]
    yield
    for event, expected in zip(events, (("EUR", "DE"), ("USD", "DE"), ("USD", "US")), strict=True):
        runs = world.runs("versioned", event)
        assert [run["attempt"] for run in runs] == [1, 2]
        for run in runs:
            assert (run["currency"], run["country"]) == expected
            assert run["total"] == "Decimal('9.90')"
        assert world.archived(event) == []
    assert [run["name"] for run in world.runs("versioned", events[0])] == ["case.version"] * 2


@case
def an_upcaster_that_fails_is_archived_without_a_run(world: World) -> Generator[None]:
    event = world.publish("case.version", {"sum": "9.90"})
    yield
    assert world.runs("versioned", event) == []
    found = one(world, event)
    assert (found.reason, found.attempts, found.handler) == ("contract", 1, "c.versioned")
    assert "with_currency failed from 'case.version' to 'case.version.v3': KeyError" in found.detail
    assert 'payload["total"]' in found.traceback
    # The event as it came, so that a replay after a fix upcasts it again.
    assert found.event is not None
    assert found.event.name == "case.version"
    assert found.body == b'[[],{"sum":"9.90"},{}]'


# -- tools --------------------------------------------------------------------------------


def names() -> Names:
    return Names.of(get_settings())


def raw(world: World, name: str, event_id: str = "raw") -> Message:
    return published(name, event_id=event_id, service="elsewhere", at=world.now())


def replay(world: World, name: str, handler: str, event_id: str, replay_id: str) -> Message:
    """Build what the admin would publish to replay an archived event."""
    message = raw(world, name, event_id)
    return encoding.retry_message(
        delivered(message, "", headers={}),
        ReceivedEvent(id=event_id, name=name, service="elsewhere"),
        exchange=names().replay,
        routing_key=get_registry().handlers[handler].key,
        service="contract",
        handler=handler,
        attempt=1,
        due_at=world.now(),
        replay_id=replay_id,
        history=(),
    )


@pytest.mark.parametrize("name", [function.__name__ for function in CASES])
def test_contract(played: Played, name: str) -> None:
    played.check(name)
