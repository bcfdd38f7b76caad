"""The private names of py-amqp, Celery and billiard: probes, and what their uses rely on."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import threading
import time
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from billiard import common
from billiard.pool import ApplyResult
from kombu.asynchronous import Hub

from django_amqp_events import worker
from django_amqp_events.broker import amqp_internals, fast_paths
from django_amqp_events.broker.private_names import PrivateName
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.worker import billiard_internals, celery_internals, signal_wakeup
from django_amqp_events.worker.celery_internals import event_loop_is_busy, wakes_for_threads

MODULES = (amqp_internals, celery_internals, billiard_internals)
REQUIRED = [name for module in MODULES for name in module.REQUIRED]
OPTIONAL = [
    name
    for module, features in (
        (celery_internals, ("ONE_ERROR", "COLD_SHUTDOWN")),
        (billiard_internals, ("KEEP_RESULTS", "TIME_LIMITS", "FINISH_WRITES")),
    )
    for feature in features
    for name in getattr(module, feature)
] + [name for _, names in fast_paths.NEEDS.values() for name in names]


def owner_of(name: PrivateName) -> tuple[Any, str]:
    module, _, attribute = name.path.partition(":")
    owner, _, last = attribute.rpartition(".")
    found = import_module(module)
    return (attrgetter(owner)(found) if owner else found), last


def test_the_installed_libraries_have_all_names() -> None:
    assert not [problem for name in REQUIRED + OPTIONAL if (problem := name.problem())]
    for module in MODULES:
        module.check()


def test_a_wrapper_that_passes_everything_on_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentry wraps ``build_tracer``, and a worker must still start."""
    (name,) = (name for name in REQUIRED if name.path.endswith(":build_tracer"))
    owner, last = owner_of(name)
    monkeypatch.setattr(owner, last, lambda name, task, *args, **kwargs: None)
    assert name.problem() == ""
    monkeypatch.setattr(owner, last, lambda task, name, *args, **kwargs: None)
    assert "build_tracer takes (task, name, args, kwargs)" in name.problem()
    own = dataclasses.replace(name, overridden=True)
    monkeypatch.setattr(owner, last, lambda name, task, *args, **kwargs: None)
    assert "takes (name, task, args, kwargs)" in own.problem()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_worker_does_not_start_without_a_name_that_it_needs(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module.REQUIRED[0]
    renamed = dataclasses.replace(name, path=f"{name.path}_renamed")
    monkeypatch.setattr(module, "REQUIRED", (renamed,))
    amqp_internals.check.cache_clear()
    with pytest.raises(ConfigurationError, match="does not exist, which is needed to"):
        module.check()


def test_a_signal_that_ends_a_pool_process_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "maybe_setsignal", lambda *_: None)
    monkeypatch.setattr(common, "_should_have_exited", [False])
    with pytest.raises(SystemExit) as ended:
        common._shutdown_cleanup(signal.SIGTERM, None)
    assert billiard_internals.terminated_by_signal(ended.value)
    assert not billiard_internals.terminated_by_signal(SystemExit(1))
    assert not billiard_internals.terminated_by_signal(SystemExit(-1))


class TestEventLoop:
    """Record whether a signal arrived in a callback or in a poll."""

    @pytest.fixture
    def hub(self) -> Any:
        hub = Hub()
        yield hub
        hub.close()

    @pytest.fixture
    def seen(self) -> Any:
        seen: list[bool] = []

        def handle(_number: int, frame: FrameType | None) -> None:
            seen.append(event_loop_is_busy(frame))

        before = signal.signal(signal.SIGUSR1, handle)
        yield seen
        signal.signal(signal.SIGUSR1, before)

    def test_in_a_callback(self, hub: Any, seen: list[bool]) -> None:
        hub.call_soon(lambda: signal.raise_signal(signal.SIGUSR1))
        next(hub.create_loop(), None)
        assert seen == [True]

    def test_in_a_poll(self, hub: Any, seen: list[bool]) -> None:
        main = threading.main_thread().ident
        assert main is not None
        reading, writing = os.pipe()
        hub.add_reader(reading, os.read, reading, 1)
        polled = threading.Event()

        def interrupt() -> None:
            # Where a single signal arrives is not known: only the poll answers with False.
            while False not in seen and not polled.wait(0.01):
                signal.pthread_kill(main, signal.SIGUSR1)
            os.write(writing, b"x")

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            next(hub.create_loop(), None)
            assert False in seen
        finally:
            polled.set()
            thread.join()
            hub.remove(reading)
            os.close(reading)
            os.close(writing)

    def test_outside_the_loop(self, seen: list[bool]) -> None:
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [False]

    def test_without_the_names(
        self, hub: Any, seen: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then a cold shutdown starts immediately, as in Celery."""
        monkeypatch.setattr(celery_internals, "COLD_SHUTDOWN", (PrivateName("celery:no", ""),))
        hub.call_soon(lambda: signal.raise_signal(signal.SIGUSR1))
        next(hub.create_loop(), None)
        assert seen == [False]


def test_another_thread_wakes_a_loop_that_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """kombu does so itself since 5.7."""
    monkeypatch.setattr(celery_internals, "WAKING", (PrivateName("kombu:no", ""),))
    wakes_for_threads.cache_clear()
    sockets = socket.socketpair()
    sockets[0].setblocking(False)
    monkeypatch.setattr(signal_wakeup, "_signals", lambda: (sockets[0], sockets[1].fileno()))
    hub, found = Hub(), list[str]()

    def without_waking(function: Any, *args: Any) -> None:
        hub._ready.add(partial(function, *args))

    consumer = SimpleNamespace(hub=hub, pool=None, call_soon=without_waking)
    call_soon = signal_wakeup.call_soon(consumer)
    signal_wakeup._install(consumer)
    poll, polled = hub.poller.poll, threading.Event()

    def long_poll(_timeout: float) -> Any:
        polled.set()
        return poll(0 if found else 60)

    monkeypatch.setattr(hub.poller, "poll", long_poll)
    thread = threading.Thread(target=lambda: polled.wait() and call_soon(found.append, "this"))
    thread.start()
    began, loop = time.monotonic(), hub.create_loop()
    while not found:
        next(loop)
    assert time.monotonic() - began < 30
    thread.join()
    call_soon(found.append, "that")
    with pytest.raises(BlockingIOError):  # the loop's own thread needs no byte
        sockets[0].recv(1)
    hub.close()
    for each in sockets:
        each.close()
    wakes_for_threads.cache_clear()


@pytest.mark.parametrize(
    ("soft", "hard", "spent", "left"),
    [(None, 10, 4, (None, 6)), (5, 10, 4, (1, 6)), (5, 10, 7, (0, 3)), (5, 10, 20, (0, 0.01))],
)
def test_a_run_that_outlives_its_connection_keeps_its_time_limits(
    soft: float | None, hard: float, spent: float, left: tuple[float | None, float]
) -> None:
    calls: list[Any] = []
    result = ApplyResult(
        {},
        None,
        soft_timeout=soft,
        timeout=hard,
        on_timeout_set=lambda _, *limits: calls.append(pytest.approx(limits, abs=0.5)),
        on_timeout_cancel=lambda _: calls.append("cancel"),
    )
    billiard_internals.restart_time_limit(result)
    assert calls == []
    result._ack(None, time.monotonic() - spent, 1, None)
    billiard_internals.restart_time_limit(result)
    assert calls[1:] == ["cancel", left]


@pytest.mark.parametrize("missing", [False, True])
def test_pool_keeps_results_of_received_jobs(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing:
        names = (PrivateName("billiard:renamed", "test it"),)
        monkeypatch.setattr(billiard_internals, "KEEP_RESULTS", names)
    cache: dict[int, Any] = {}
    results = [ApplyResult(cache, None) for _ in range(3)]
    written, accepted, _waiting = results
    written._write_to = accepted._write_to = object()
    accepted._ack(None, 0, 1, None)
    for result in results:
        billiard_internals.keep_result(result)
        result.discard()
    billiard_internals.keep_result(None)
    assert list(cache.values()) == ([] if missing else [written])


def test_no_other_module_imports_what_is_private() -> None:
    private = re.compile(
        r"^(from|import) (celery\.(app\.trace|worker\.(state|request))\b"
        r"|celery\.app import trace|celery\.worker import (state|request)"
        r"|billiard\.(?!exceptions))",
        re.MULTILINE,
    )
    package = Path(worker.__file__).parent
    found = [
        path.name
        for path in package.rglob("*.py")
        if not path.name.endswith("_internals.py") and private.search(path.read_text())
    ]
    assert found == []
