"""From a name and a payload to messages; when they leave; what is said when some fail."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from celery import Celery
from django.contrib.auth.models import Group
from django.db import OperationalError, connections, transaction

from django_amqp_events import (
    BrokerUnavailableError,
    ConfigurationError,
    InvalidEventError,
    MessageTooLargeError,
    Options,
    PublishNackedError,
    PublishTimeoutError,
    UnroutableError,
    publish_event,
    publish_many,
    signals,
)
from django_amqp_events.broker import connection
from django_amqp_events.declare import contracts
from django_amqp_events.declare.contracts import bind_contract
from django_amqp_events.declare.validation import REMEMBERED
from django_amqp_events.exceptions import PublishError
from django_amqp_events.message.types import Message
from django_amqp_events.monitor import metrics
from django_amqp_events.publish import publisher
from django_amqp_events.reasons import Reason
from django_amqp_events.signals import Signal, event_published, event_unrouted
from tests.doubles.broker import Broker
from tests.doubles.receivers import connected

NAME = "shop.order.created"


def answers(broker: Broker, *kinds: type[PublishError] | None) -> None:
    """Let a broker answer so, message by message."""
    left = iter(kinds)

    def answer(message: Message) -> PublishError | None:
        kind = next(left)
        if kind is None:
            return None
        return kind("no", event_id=message.event_id, event_name=message.name)

    broker.answer = answer


Configure = Callable[..., None]


@pytest.fixture
def configure(settings: Any) -> Configure:
    def configure(**keys: Any) -> None:
        settings.AMQP_EVENTS = {
            "SERVICE": "shop",
            "AUTODISCOVER": [],
            "PUBLISH": "immediate",
            **keys,
        }

    configure()
    return configure


@pytest.fixture
def outcomes(configure: Configure) -> Iterator[Broker]:
    outcomes = Broker()
    with publisher.divert(outcomes):
        yield outcomes


@pytest.mark.parametrize(
    "name",
    ["", "shop.*", "#", "*", ".", "a..b", "a b", 7, None, ["a"], "x" * 300, "a\nb", "a\ud800"],
)
def test_names_that_are_none(outcomes: Broker, name: Any):
    with pytest.raises(InvalidEventError):
        publish_event(name, {})
    assert not outcomes.messages


@pytest.mark.parametrize(
    "payload", [None, [], "text", {1: 2}, {"x": object()}, {"x": float("nan")}, {"x": {1, 2}}]
)
def test_payloads_that_are_none(outcomes: Broker, payload: Any):
    for publish in (publish_event, lambda name, wrong: publish_many(name, [{}, wrong])):
        with pytest.raises(InvalidEventError):
            publish(NAME, payload)
    assert not outcomes.messages


def test_a_body_of_exactly_max_body(outcomes: Broker, configure: Configure):
    configure(MAX_BODY=30)
    room = 30 - len('[[],{"x":""},{}]')
    publish_event(NAME, {"x": "y" * room})
    with pytest.raises(MessageTooLargeError) as caught:
        publish_event(NAME, {"x": "y" * (room + 1)})
    assert caught.value.published is False
    assert len(outcomes.messages) == 1


def test_one_id_for_several_events(outcomes: Broker):
    with pytest.raises(InvalidEventError, match="event_id"):
        publish_many(NAME, [{}, {}], options=Options(event_id="one"))
    assert publish_many(NAME, [{}], options=Options(event_id="one")) == ["one"]
    assert publish_many(NAME, []) == []
    assert len(outcomes.windows) == 1


def test_the_first_error_is_raised_and_names_the_others(
    outcomes: Broker, caplog: pytest.LogCaptureFixture
):
    kinds = [PublishNackedError, PublishTimeoutError, BrokerUnavailableError]
    answers(outcomes, None, kinds[0], None, *kinds[1:])
    with pytest.raises(PublishNackedError) as caught:
        publish_many(NAME, [{}] * 5)
    ids = [message.event_id for message in outcomes.messages]
    assert list(caught.value.errors) == [ids[1], ids[3], ids[4]]
    assert [type(error) for error in caught.value.errors.values()] == kinds
    assert caught.value.event_id == ids[1]
    assert "3 of 5" in caught.value.__notes__[0]
    # One line, however many there are.
    assert len(caplog.records) == 1
    assert "3 of 5" in caplog.text


def test_signals_report_results(outcomes: Broker):
    seen: list[tuple[str, str, Any]] = []

    def published(sender: Any, event_id: str, name: str, **_: Any) -> None:
        seen.append(("published", event_id, sender))

    def unrouted(sender: Any, event_id: str, name: str, **_: Any) -> None:
        seen.append(("unrouted", event_id, sender))

    answers(outcomes, None, UnroutableError, PublishNackedError)
    with (
        connected(published, event_published),
        connected(unrouted, event_unrouted),
        pytest.raises(PublishNackedError),
    ):
        publish_many(NAME, [{}] * 3)
    ids = [message.event_id for message in outcomes.messages]
    assert seen == [("published", ids[0], "shop"), ("unrouted", ids[1], "shop")]


@pytest.mark.django_db
@pytest.mark.parametrize("broken", [False, True])
def test_a_database_error_of_a_receiver_leaves_the_transaction_of_the_publisher(
    outcomes: Broker, caplog: pytest.LogCaptureFixture, broken: bool
):
    def audit(**_: Any) -> None:
        with transaction.atomic(durable=True):  # the transaction of this test is none
            Group.objects.create(name="order")

    def again(**_: Any) -> None:
        Group.objects.create(name="order")

    with connected(audit, event_published), connected(again, event_published):
        publish_event(NAME, {})
        assert "IntegrityError" in caplog.text
        with transaction.atomic():
            transaction.set_rollback(broken)
            publish_event(NAME, {})
            if not broken:
                Group.objects.create(name="of the publisher")
    assert Group.objects.filter(name="of the publisher").exists() is not broken


def test_a_receiver_that_ends_the_process_ends_no_thread(caplog: pytest.LogCaptureFixture):
    """It would end the relay of a companion, which has one thread for each service."""

    def leave(**_: Any) -> None:
        sys.exit(3)

    with connected(leave, event_published):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(event_published.send_robust, "shop").result() == []
        with pytest.raises(SystemExit):
            event_published.send_robust("shop")
    assert caplog.messages == ["a receiver of a signal raised SystemExit"]


def test_bind_contract():
    def contract(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: int) -> None:
        if a == 0:
            raise LookupError("of the body")

    assert bind_contract("e", contract, {"c": 5, "d": 6}, 1) == {"a": 1, "b": 2, "c": 5, "d": 6}
    with pytest.raises(InvalidEventError, match="1 unnamed arguments"):
        bind_contract("e", contract, {}, 1, 2, 3)
    with pytest.raises(InvalidEventError, match="does not match"):
        bind_contract("e", contract, {"b": 1})
    with pytest.raises(LookupError, match="of the body"):
        bind_contract("e", contract, {}, 0)
    for wrong in (None, 1, {1: 2}):
        with pytest.raises(InvalidEventError):
            bind_contract("e", contract, wrong, 1)  # type: ignore[arg-type]


def test_contracts_do_not_get_mixed_up():
    """Python reuses the id of a deleted object, as many tests show."""
    for number in range(3 * REMEMBERED):
        name = f"name{number}"
        space: dict[str, Any] = {}
        exec(f"def contract({name}): ...", space)  # noqa: S102 - many signatures
        assert bind_contract("e", space["contract"], {name: number}) == {name: number}
    assert contracts._signature.cache_info().currsize <= REMEMBERED


def test_errors_survive_a_pickle():
    """Celery stores them, and carries them between processes."""
    error = PublishTimeoutError(Reason("confirm-late"), event_id="1", event_name="e")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(copy), copy.reason, copy.event_id, copy.event_name) == (
        PublishTimeoutError, error.reason, "1", "e",
    )  # fmt: skip
    assert str(copy) == f"'e' (1) was not confirmed: {error.reason}"


@pytest.mark.parametrize("url", ["redis://localhost", "memory://", "nonsense://localhost"])
def test_a_broker_that_is_not_rabbitmq(url: str) -> None:
    """Also where the transport's own library is missing, which kombu reports in its own words."""
    with pytest.raises(ConfigurationError, match="events need RabbitMQ"):
        connection.connect(Celery("elsewhere", broker=url, set_as_current=False), timeout=1)


ON_COMMIT = Options(mode="on_commit")


@pytest.mark.django_db(transaction=True)
def test_events_of_one_transaction_do_not_fall_with_the_first(outcomes: Broker):
    """Django drops the callbacks after one that raises: the second event, and its name."""
    answers(outcomes, PublishNackedError, None, PublishTimeoutError)
    with pytest.raises(PublishNackedError) as info, transaction.atomic():
        ids = [publish_event(NAME, {"order_id": n}, options=ON_COMMIT) for n in range(3)]
    assert len(outcomes.windows) == 1
    assert [message.event_id for message in outcomes.messages] == ids
    assert list(info.value.errors) == [ids[0], ids[2]]


@pytest.mark.django_db(transaction=True)
def test_events_of_a_savepoint_are_rolled_back_with_it(outcomes: Broker):
    with transaction.atomic():
        first = publish_event(NAME, {}, options=ON_COMMIT)
        with suppress(ZeroDivisionError), transaction.atomic():
            publish_event(NAME, {}, options=ON_COMMIT)
            publish_event(NAME, {}, options=ON_COMMIT)
            raise ZeroDivisionError
        with transaction.atomic():
            second = publish_event(NAME, {}, options=ON_COMMIT)
        third = publish_event(NAME, {}, options=ON_COMMIT)
        order: list[int] = []
        transaction.on_commit(lambda: order.append(len(outcomes.windows)))
        fourth = publish_event(NAME, {}, options=ON_COMMIT)
    assert [message.event_id for message in outcomes.messages] == [first, second, third, fourth]
    assert order == [2], "a callback of the user's keeps its place"
    assert len(outcomes.windows) == 3
    publish_event(NAME, {}, options=ON_COMMIT)
    assert len(outcomes.windows) == 4


SIGNALS = {name: value for name, value in vars(signals).items() if isinstance(value, Signal)}


@pytest.mark.parametrize("state", ["", "transaction", "usable", "autocommit off"])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_connection_that_a_receiver_has_lost_is_closed(
    db: None, monkeypatch: pytest.MonkeyPatch, name: str, state: str
):
    """The threads of relay, mirror and direct publisher end no requests, at which Django does so.

    A transaction of the sender is its own.
    """

    def receiver(**_: Any) -> None:
        connections["default"].ensure_connection()
        connections["default"].errors_occurred = True

    def send() -> list[Any]:
        block = transaction.atomic() if state == "transaction" else nullcontext()
        with block:
            if state == "autocommit off":
                connections["default"].set_autocommit(False)
            SIGNALS[name].send_robust("shop")
            left = [one.alias for one in connections.all() if one.connection is not None]
        connections.close_all()
        return left

    monkeypatch.setattr(type(connections["default"]), "is_usable", lambda _: state == "usable")
    with connected(receiver, SIGNALS[name]), ThreadPoolExecutor(1) as pool:
        assert pool.submit(send).result() == ([] if state == "" else ["default"])


@pytest.mark.django_db
def test_a_transaction_that_ends_within_a_receiver_is_told(
    outcomes: Broker, monkeypatch: pytest.MonkeyPatch
):
    """Its savepoint is gone too, and Django would roll back silently at the end."""

    def lost(*_: object) -> None:
        raise OperationalError("the connection is lost")

    def lose(**_: object) -> None:
        monkeypatch.setattr(connections["default"], "savepoint_commit", lost)
        monkeypatch.setattr(connections["default"], "savepoint_rollback", lost)

    with (
        connected(lose, event_published),
        transaction.atomic(),
        pytest.raises(transaction.TransactionManagementError, match="nothing of it is committed"),
    ):
        publish_event(NAME, {})
    monkeypatch.undo()


@pytest.mark.django_db
def test_metrics_cost_no_query(outcomes: Broker, django_assert_num_queries: Any):
    signal = Signal()
    signal.quiet = 1
    for receiver, queries in ((metrics._published, 0), (lambda **_: None, 2)):
        signal.connect(receiver, weak=False)
        with django_assert_num_queries(queries):
            signal.send_robust("shop", name="shop.order.created")
