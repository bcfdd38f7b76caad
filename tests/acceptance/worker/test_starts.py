"""Workers that cannot start, that stop trying, or that RabbitMQ refuses: exit codes and reasons."""

from __future__ import annotations

import re
from contextlib import suppress
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from broker import BrokerError
from tests.conftest import SLOW
from tests.forked import REAL_START

from ..conftest import NAMES_ARE_UNIQUE, Make
from ..harness import (
    Eyes,
    Service,
    Worker,
    until,
)
from .test_children import events_worker

ACT = "core.act"
ALONE = ("--no-mirror", "--no-relay", "--no-batches", "--no-reaper")


def starts(service: Service, what: str) -> Worker:
    """Start a worker in one of the ways that there are."""
    if what == "events_worker":
        return events_worker(service, *ALONE)
    return service.start(what) if what == "events_reaper" else service.worker("solo", 1)


def logged_in(core: Service, user: str, password: str) -> Service:
    """Let a service log in as another user."""
    given = urlsplit(core.url)
    core.url = given._replace(netloc=f"{user}:{password}@{given.hostname}:{given.port}").geturl()
    return core


def new_user(eyes: Eyes, password: str, permissions: str) -> str:
    """Return the name of a user of the test's own."""
    name = f"user-{uuid4().hex[:8]}"
    set_password(eyes, name, password)
    permit(eyes, name, permissions, permissions)
    return name


def set_password(eyes: Eyes, user: str, password: str) -> None:
    eyes.http("PUT", f"/api/users/{user}", {"password": password, "tags": ""})


def permit(eyes: Eyes, user: str, everything: str, read: str) -> None:
    permissions = {"configure": everything, "write": everything, "read": read}
    eyes.http("PUT", f"/api/permissions/{{vhost}}/{user}", permissions)


def critical(worker: Worker) -> list[str]:
    return [line for line in worker.log.splitlines() if "CRITICAL/" in line]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--nonsense", "CommandError: celery worker: No such option"),
        ("--detach", "CommandError: --detach is not supported"),
    ],
)
def test_an_option_that_is_not_possible(
    fresh_eyes: Eyes, service: Make, option: str, text: str
) -> None:
    worker = events_worker(service(fresh_eyes), *ALONE, "--", option)
    assert worker.wait(60) == 1
    assert text in worker.log
    assert "Traceback" not in worker.log


@pytest.mark.parametrize(
    ("what", "change", "says"),
    [
        ("worker", "password", "check user and password"),
        ("events_worker", "vhost", "check the name of the vhost"),
        ("events_worker", "permissions", "give this user the configure, write and read permission"),
        ("events_worker", "topology", "events_declare"),
        ("events_reaper", "password", "check user and password"),
        ("events_reaper", "topology", "events_declare"),
    ],
)
def test_failed_start_has_an_exit_code_and_a_reason(
    fresh_eyes: Eyes, service: Make, what: str, change: str, says: str
) -> None:
    """A supervisor that restarts failed processes must recognize a failed start.

    With ``broker_channel_error_retry`` Celery alone would try five times a second forever.
    """
    # Remote control would be refused before the topology is.
    control = change != "permissions"
    celery = {"broker_channel_error_retry": True, "worker_enable_remote_control": control}
    topology = "verify" if change == "topology" else "auto"
    core: Service = service(fresh_eyes, celery=celery, events={"TOPOLOGY": topology})
    given = urlsplit(core.url)
    if change == "permissions":
        logged_in(core, new_user(fresh_eyes, "secret", "^$"), "secret")
    elif change == "password":
        secret = str(given.password)
        core.url = core.url.replace(f":{secret}@", f":not-{secret}@")
    elif change == "vhost":
        core.url = given._replace(path="/there-is-none").geturl()
    worker = starts(core, what)
    assert worker.wait(60) == 1
    (line,) = critical(worker)
    assert "this worker does not start" in line
    assert says in line


def test_an_app_for_events_that_cannot_be_imported(fresh_eyes: Eyes, service: Make) -> None:
    """Celery drops what a receiver of its signals raises, and would handle no event."""
    worker = starts(service(fresh_eyes, events={"CELERY_APP": "nowhere.app"}), "worker")
    assert worker.wait(60) == 1
    assert "this worker does not start: " in worker.log
    assert "nowhere" in worker.log


def test_changed_password_is_waited_for(fresh_eyes: Eyes, service: Make) -> None:
    """It retries rarely, stops on a signal, and then handles the events published meanwhile."""
    user = new_user(fresh_eyes, "first", ".*")
    core = logged_in(service(fresh_eyes), user, "first")
    # Celery's command line has these variables for its options.
    theirs = {"APP": "nowhere", "BROKER_URL": "redis://nowhere"}
    workers = [
        events_worker(core, *ALONE, **theirs).wait_ready(),
        core.worker("solo", 1).wait_ready(),
    ]
    set_password(fresh_eyes, user, "second")

    def refused() -> bool:
        for connection in fresh_eyes.connections():
            if connection.get("user") == user:
                with suppress(BrokerError):  # it has ended by itself
                    fresh_eyes.cut(connection)
        return all(worker.log.count("the next try is in 5 s") >= 3 for worker in workers)

    until(refused, 60)
    for worker in workers:
        assert not critical(worker)
    stopped, goes_on = workers
    assert stopped.stop(20) == 0
    message = fresh_eyes.message(ACT, {"plan": ["ok"]})
    fresh_eyes.send(message)
    set_password(fresh_eyes, user, "first")
    until(lambda: core.runs(message.event_id, "end"), 90, "it was let in again")
    assert goes_on.stop() == 0


@pytest.mark.slow
def test_one_without_permissions_asks_seldom_and_says_why(fresh_eyes: Eyes, service: Make) -> None:
    """It may log in and nothing else: the refusal comes on a channel."""
    user = new_user(fresh_eyes, "secret", "^$")
    core = logged_in(service(fresh_eyes), user, "secret")
    worker = events_worker(core, *ALONE)
    until(lambda: worker.log.count("check the user's permissions on this vhost") >= 3, 90)
    assert "the next try is in 5 s" in worker.log
    assert not critical(worker)
    permit(fresh_eyes, user, ".*", ".*")
    worker.wait_ready(60)
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_queue_that_may_not_be_read_keeps_none_of_the_others(
    fresh_eyes: Eyes, service: Make
) -> None:
    """A refusal closes the shared channel, so each refusal would redeliver all messages."""
    queue = "core.testproject.strict"
    user = new_user(fresh_eyes, "secret", ".*")
    permit(fresh_eyes, user, ".*", f"^(?!{re.escape(queue)}$).*$")
    core = service(fresh_eyes, events={"TOPOLOGY": "verify"}).declare()
    logged_in(core, user, "secret")
    waiting = [fresh_eyes.event(ACT, {"plan": ["ok"]}) for _ in range(20)]
    strict = fresh_eyes.event("core.strict", {"plan": ["ok"]})
    worker = events_worker(core, *ALONE)
    until(lambda: f"queue '{queue}' cannot be consumed" in worker.log, 60)
    assert "Give this user the read permission" in worker.log
    assert worker.log.count("the next try is in") == 1, "one connection was lost for it"
    until(lambda: all(core.runs(event_id, "end") for event_id in waiting))
    assert strict not in worker.log
    assert worker.stop() == 0
    permit(fresh_eyes, user, ".*", ".*")
    worker = events_worker(core, *ALONE)
    until(lambda: strict in worker.log and "Task testproject.strict[" in worker.log, 60)
    assert worker.stop() == 0


def test_with_several_brokers_the_refusal_of_one_ends_nothing(
    fresh_eyes: Eyes, service: Make
) -> None:
    core: Service = service(fresh_eyes, celery={"broker_channel_error_retry": True})
    given = urlsplit(core.url)
    unreachable = given._replace(netloc=f"{given.username}:x@127.0.0.1:1").geturl()
    core.url = f"{unreachable};{core.url.replace(str(given.password), 'wrong')}"
    worker = events_worker(core, *ALONE)
    until(lambda: worker.log.count("check user and password") >= 2, 60)
    assert not critical(worker)
    assert worker.stop() == 0


def test_names_that_differ_at_their_end_only(fresh_eyes: Eyes, service: Make) -> None:
    """Their consumers have different tags; equal ones cost the connection, again and again."""
    common = "n" * 120
    options = {"EVENTS": ["core.long"], "HANDLER": "testproject.core.act", "BIND": True}
    handlers = {f"{common}.a": options, f"{common}.b": options}
    core = service(fresh_eyes, events={"HANDLERS": handlers}).declare()
    worker = core.worker("threads", 2).wait_ready()
    event_id = fresh_eyes.event("core.long", {"plan": ["ok"]})
    until(lambda: len(core.runs(event_id, "end")) == 2)
    assert worker.log.count("Connected to") == 1


@NAMES_ARE_UNIQUE
def test_a_second_worker_of_the_same_name_waits_for_it(fresh_eyes: Eyes, service: Make) -> None:
    """It says so, and continues when the first one has ended."""
    core = service(fresh_eyes, celery={"broker_channel_error_retry": True}).declare()
    name = ("--hostname", "same@localhost")
    first = core.worker("prefork", 1, *name).wait_ready()
    second = core.worker("prefork", 1, *name)
    until(lambda: "another connection uses the name same@localhost" in second.log, 30)
    assert "Frequent restarts" not in second.log
    first.stop()
    second.wait_ready(60)
    event_id = fresh_eyes.event(ACT, {"plan": ["ok"]})
    until(lambda: core.runs(event_id, "end"))


def test_a_worker_never_gives_up_waiting_for_the_broker(fresh_eyes: Eyes, service: Make) -> None:
    """Celery's default is a hundred tries; a configured number is kept."""
    core: Service = service(fresh_eyes, celery={"broker_connection_max_retries": 100})
    given = urlsplit(core.url)
    core.url = given._replace(netloc=f"{given.username}:x@127.0.0.1:1").geturl()
    patient = events_worker(core, *ALONE)
    until(lambda: "(1/inf)" in patient.log, 30)
    patient.kill()
    impatient: Service = service(fresh_eyes, celery={"broker_connection_max_retries": 1})
    impatient.url = core.url
    worker = events_worker(impatient, *ALONE)
    assert worker.wait(60) == 1


@pytest.mark.parametrize(
    ("pool", "shared"), [("prefork", True), pytest.param("solo", False, marks=SLOW)]
)
def test_pool_processes_share_loaded_memory(
    fresh_eyes: Eyes, service: Make, pool: str, shared: bool
) -> None:
    """Garbage collection skips it, because every written page is copied per process."""
    core = service(fresh_eyes, environ={REAL_START: "1"}).declare()
    core.worker(pool, 1).wait_ready()
    event_id = fresh_eyes.event(ACT, {"plan": ["frozen"]})
    until(lambda: core.runs(event_id, "end"))
    (line,) = core.ledger(what="frozen")
    assert (line["objects"] > 10_000) is shared


@pytest.mark.parametrize("backend", ["inline", "memory"])
def test_a_backend_that_replaces_rabbitmq(backend: str, eyes: Eyes, service: Make) -> None:
    """A worker is for ordinary tasks then, and each command that needs RabbitMQ says why not."""
    core = service(eyes, handlers="mixed", events={"BACKEND": backend})
    worker = core.worker("solo", 1).wait_ready()
    eyes.app.send_task("testproject.tasks.ordinary", args=[backend], queue="ordinary")
    until(lambda: core.ledger(what="ordinary", task=backend))
    assert worker.stop() == 0
    commands = ("declare", "worker", "reaper", "mirror", "relay", "batches", "recover", "status")
    running = [core.start(f"events_{name}") for name in commands]
    for process in running:
        assert process.wait(60) != 0, process.name
        assert f"AMQP_EVENTS['BACKEND'] is '{backend}'" in process.log
