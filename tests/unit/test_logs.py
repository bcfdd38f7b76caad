"""The fields of log records, and the examples of docs/logs.md that show them."""

from __future__ import annotations

import ast
import io
import json
import logging
import logging.config
import os
import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from celery import Task
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

import django_amqp_events
from django_amqp_events import event, handler, publish_event
from django_amqp_events.logs import EventFilter, LoopRecords, event_fields, get_logger
from django_amqp_events.memory import MemoryBackend
from django_amqp_events.publish.publisher import Options
from django_amqp_events.testing import capture_events, memory_events, override_events
from tests.commands import run_python
from tests.waiting import until

from .test_docs import blocks

NOW = Options(mode="immediate")
LOGS = re.compile(r"logger\.(debug|info|warning|error|exception|critical|log)")
FIELDS = ("event_id", "event_name", "handler", "attempt", "correlation_id")


@pytest.fixture
def backend(db: None) -> Iterator[MemoryBackend]:
    with override_events(SERVICE="t", BACKEND="memory"), memory_events() as made:
        yield made


def example(word: str) -> dict[str, Any]:
    """Run the example that contains a word."""
    (code,) = [code for _, code in blocks("docs/logs.md") if word in code]
    names: dict[str, Any] = {}
    exec(compile(code, "logs.md", "exec"), names)  # noqa: S102
    return names


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the root logger's handlers write, restored afterwards."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers, root.level = before, level


def log_to(stream: io.StringIO, config: dict[str, Any]) -> None:
    config["handlers"]["console"]["stream"] = stream
    # pytest's own handlers stay.
    before = logging.getLogger().handlers[:]
    logging.config.dictConfig(config)
    logging.getLogger().handlers += before


class Slow(logging.Handler):
    """Waits, and then may raise."""

    def __init__(self, seconds: float) -> None:
        super().__init__(logging.WARNING)
        self.seconds, self.go = seconds, threading.Event()
        self.begun: list[str] = []
        #: What was written: text, function, error, and whether in the main thread.
        self.written: list[tuple[str, str, bool, bool]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text, here = record.getMessage(), threading.current_thread() is threading.main_thread()
        self.begun.append(text)
        self.go.wait(self.seconds)
        self.written.append((text, record.funcName, bool(record.exc_info), here))
        if text in ("1", "here"):
            raise ValueError("a handler of the project")


@contextmanager
def loop_records(slow: Slow) -> Iterator[Any]:
    """Log as an event loop does."""
    named, records = logging.getLogger("shop.loop"), LoopRecords()
    named.addHandler(slow)
    records.start()
    try:
        yield get_logger("shop.loop")
        slow.go.set()
        records.stop()
        get_logger("shop.loop").warning("here")
    finally:
        named.removeHandler(slow)


def test_records_of_an_event_loop_wait_for_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are handled in their order by a thread, all of them before it stops; later ones here.

    No handler that raises decides anything.
    """

    def fail() -> None:
        raise ValueError("stderr is a logger, with the same handler")

    monkeypatch.setattr(traceback, "print_exc", fail)
    slow, name = Slow(30), "test_records_of_an_event_loop_wait_for_no_handler"
    with loop_records(slow) as logger:
        logging.getLogger("shop.loop").setLevel(logging.WARNING)
        logger.info("not enabled")
        for number in range(2):
            logger.warning("%d", number)
        other = threading.Thread(target=logger.warning, args=("of another thread",))
        other.start()
        other.join()
        logger.warning("failed", exc_info=ValueError())
        assert not slow.written
    assert slow.written == [
        ("0", name, False, False),
        ("1", name, False, False),
        ("of another thread", "run", False, False),
        ("failed", name, True, False),
        ("here", "loop_records", False, True),
    ]


@pytest.mark.parametrize("hangs", [False, True])
def test_no_process_is_forked_while_a_record_is_written(hangs: bool) -> None:
    """A child could never write to the same file; it does not wait for a handler that hangs."""
    slow = Slow(30 if hangs else 0.05)
    with loop_records(slow) as logger:
        logger.warning("a record")
        until(lambda: slow.begun, "it is being written")
        pid = os.fork()
        if not pid:
            os._exit(bool(LoopRecords.running) or bool(slow.written) is hangs)
        assert os.waitpid(pid, 0)[1] == 0


def fail_once(backend: MemoryBackend, *, is_async: bool = False) -> str:
    """Archive an event whose handler logs a line, and return its id."""

    def act() -> None:
        logging.getLogger("shop").info("looking at it")
        raise ValueError("no")

    async def later() -> None:
        act()

    handler("a.b", name="t.act", max_retries=1, retry_backoff=1)(later if is_async else act)
    event_id = publish_event("a.b", {}, options=Options(mode="immediate", correlation_id="c-1"))
    backend.run()
    backend.advance(2)
    return event_id


def test_no_field_is_an_attribute_of_log_records() -> None:
    """``logging`` raises KeyError for such an ``extra``."""
    fields = {*event_fields(None), "archive_reason", "archive_exception"}
    assert fields == {*FIELDS, "archive_reason", "archive_exception"}
    record = logging.LogRecord("a", logging.INFO, "a.py", 1, "", (), None)
    assert not fields & {*vars(record), "message", "asctime"}


@pytest.mark.parametrize("is_async", [False, True])
def test_json_lines_of_an_event(
    backend: MemoryBackend, stream: io.StringIO, is_async: bool
) -> None:
    log_to(stream, example("pythonjsonlogger")["LOGGING"])
    logging.getLogger("shop").info("outside")
    event_id = fail_once(backend, is_async=is_async)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    about = {"event_id": event_id, "event_name": "a.b", "handler": "t.act", "correlation_id": "c-1"}
    outside, *inside = [line for line in lines if line["name"] == "shop"]
    assert {name: outside[name] for name in FIELDS} == dict.fromkeys(FIELDS)
    for number, line in enumerate(inside, 1):
        assert line | about | {"attempt": number} == line
    (retry,) = [line for line in lines if "retry: Retry at" in line["message"]]
    assert retry | about | {"attempt": 1} == retry
    (error,) = [line for line in lines if line["levelname"] == "ERROR"]
    assert error["name"] == "django_amqp_events.worker.outgoing"
    assert error["message"].startswith(f"archived event 'a.b' ({event_id}) for t.act (exhausted): ")
    assert "Traceback (most recent call last)" in error["message"]
    assert error["archive_reason"] == "exhausted"
    assert error["archive_exception"] == "ValueError"
    assert error | about | {"attempt": 2} == error


def test_the_examples_set_up_a_process() -> None:
    """Logging and traces are global, so the examples run in a process of their own."""
    tracing, logs = (
        code
        for page in ("docs/observability.md", "docs/logs.md")
        for _, code in blocks(page)
        if "# project/" in code
    )
    tracing = tracing.replace(
        # An exporter that needs no collector.
        "opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter",
        "opentelemetry.sdk.trace.export import ConsoleSpanExporter as OTLPSpanExporter",
    )
    code = f"""
from django.conf import settings
settings.configure(LOGGING={example("pythonjsonlogger")["LOGGING"]!r})
{tracing}
{logs}
from celery.signals import setup_logging, worker_process_shutdown
from django_amqp_events import telemetry
with trace.get_tracer("test").start_as_current_span("a span"):
    assert telemetry.active()
assert setup_logging.send(None)
worker_process_shutdown.send(None)
logging.getLogger("shop").info("a line")
"""
    done = run_python(code)
    assert '"name": "a span"' in done.stdout
    line = json.loads(done.stderr.splitlines()[-1])
    assert line | {"message": "a line", "event_id": None} == line


class Nowhere(Transport):
    def capture_envelope(self, envelope: Envelope) -> None: ...


def test_the_example_publishes_headers_of_sentry(db: None) -> None:
    (code,) = [code for _, code in blocks("docs/observability.md") if "get_traceparent" in code]
    client = sentry_sdk.Client(
        "https://key@sentry.example/1", transport=Nowhere, default_integrations=False
    )
    with (
        override_events(SERVICE="t"),
        capture_events() as published,
        sentry_sdk.new_scope() as scope,
    ):
        scope.set_client(client)

        @event("a.b")
        def order_created(order_id: int, total: str) -> None: ...

        names = {"order_created": order_created}
        exec(compile(code, "observability.md", "exec"), names)  # noqa: S102
    headers = published.one("a.b").headers
    trace_id = headers["sentry-trace"].split("-")[0]
    assert f"sentry-trace_id={trace_id}" in headers["baggage"]


def test_structlogs_own_loggers(backend: MemoryBackend) -> None:
    add_event = example("def add_event")["add_event"]
    seen: list[dict[str, Any]] = []

    @handler("a.b", name="t.act")
    def act() -> None:
        seen.append(add_event(None, "info", {"event": "looking"}))

    event_id = publish_event("a.b", {}, options=NOW)
    backend.run()
    assert seen == [
        {"event": "looking", "event_id": event_id, "event_name": "a.b", "attempt": 1,
         "correlation_id": event_id}
    ]  # fmt: skip
    assert add_event(None, "info", {"event": "looking"}) == {"event": "looking"}


def test_a_filter_keeps_the_fields_that_a_record_has() -> None:
    for own in ({"event_id": "1", "attempt": 3}, {"correlation_id": "request-77"}):
        record = logging.makeLogRecord(own)
        assert EventFilter().filter(record)
        assert {name: vars(record)[name] for name in event_fields(None)} == {
            **event_fields(None), **own
        }  # fmt: skip


@pytest.mark.parametrize("package", ["archive", "publish", "worker"])
def test_each_record_about_an_event_has_the_fields(package: str) -> None:
    """A call that names an event, a delivery or a message passes ``extra``.

    ``self.title`` is that of a bootstep.
    """
    calls: list[ast.Call] = []
    for path in (Path(django_amqp_events.__file__).parent / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and LOGS.fullmatch(ast.unparse(node.func)):
                calls.append(node)
    bare = [call for call in calls if not any(word.arg == "extra" for word in call.keywords)]
    assert len(bare) < len(calls)
    about = re.compile(r"\b(event|event_id|delivery|message|self\.name)\b|(?<!self\.)\btitle\b")
    named = [call for call in bare if about.search(" ".join(map(ast.unparse, call.args[1:])))]
    assert not [ast.unparse(call) for call in named]


def test_no_module_has_a_logger_that_raises() -> None:
    """A log handler that does would end a commit, a relay, a loop; see ``logs.get_logger``."""
    package = Path(django_amqp_events.__file__).parent
    direct = re.compile(r"= logging\.getLogger\(")
    found = [path.name for path in package.rglob("*.py") if direct.search(path.read_text())]
    assert found == ["logs.py"]


class Own(Task):
    """A class of a project, which has names of its own."""

    event = "theirs"

    def run(self, **_: Any) -> None:
        logging.getLogger("project").info("from the handler")


def test_a_class_with_an_event_of_its_own(
    backend: MemoryBackend, caplog: pytest.LogCaptureFixture
) -> None:
    handler("shop.order.created", name="t.own")(Own)
    caplog.set_level(logging.INFO, "project")
    event_id = publish_event("shop.order.created", {}, options=NOW)
    with caplog.filtering(EventFilter()):
        backend.run()
    (record,) = [record for record in caplog.records if record.name == "project"]
    assert (record.event_id, record.handler) == (event_id, "t.own")  # type: ignore[attr-defined]
