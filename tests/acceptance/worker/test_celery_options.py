"""Celery's options of workers, by the table in docs/celery-options.md."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
from celery.app.defaults import NAMESPACES
from celery.bin.worker import worker as worker_command

from tests.conftest import SLOW
from tests.forked import REAL_START

from ..conftest import Make
from ..harness import Archive, Eyes, Service, until

pytestmark = pytest.mark.timeout(300)

ACT = "options.act"


@dataclass(frozen=True)
class Row:
    """Options of one worker.

    Attributes:
        celery: settings of the Celery app.
        arguments: of ``celery worker``.
        environ: of the worker.
        control: a command of remote control that is sent while events are handled.
    """

    celery: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    pools: tuple[str, ...] = ("prefork",)
    control: str = ""


ALL: Final = ("prefork", "threads", "solo")
#: Annotations that would ack a lost event, run it as a task, or change its retries or result.
DANGER: Final = {
    "acks_late": False,
    "reject_on_worker_lost": False,
    "acks_on_failure_or_timeout": True,
    "acks_on_timeout": True,
    "autoretry_for": [],
    "Request": "celery.worker.request:Request",
    "Strategy": "celery.worker.strategy:default",
    "default_retry_delay": 3600,
    "ignore_result": True,
    "max_retries": 0,
}
#: Options of the run and its result, none of which should be seen.
RUN: Final = {
    "enable_utc": False,
    "result_backend": "file://.",
    "result_compression": "gzip",
    "result_extended": True,
    "result_persistent": True,
    "result_serializer": "pickle",
    "task_acks_late": False,
    "task_acks_on_failure": True,
    "task_acks_on_failure_or_timeout": True,
    "task_acks_on_timeout": True,
    "task_always_eager": True,
    "task_annotations": {"*": DANGER, "testproject.act": DANGER},
    "task_compression": "gzip",
    "task_default_priority": 3,
    "task_default_rate_limit": "1000/s",
    "task_eager_propagates": True,
    "task_ignore_result": True,
    "task_inherit_parent_priority": True,
    "task_protocol": 1,
    "task_reject_on_worker_lost": False,
    "task_repr_maxlevels": 1,
    "task_retry_on_worker_lost": True,
    "task_serializer": "pickle",
    "task_store_eager_result": True,
    "task_store_errors_even_if_ignored": True,
    "task_track_started": True,
    "timezone": "Asia/Tokyo",
    "worker_deduplicate_successful_tasks": True,
}
#: Options of the worker beside its pool.
WORKER: Final = {
    "worker_cancel_long_running_tasks_on_connection_loss": True,
    "worker_detect_quorum_queues": False,
    "worker_direct": True,
    "worker_disable_prefetch": True,
    "worker_disable_rate_limits": True,
    "worker_enable_prefetch_count_reduction": False,
    "worker_enable_remote_control": False,
    "worker_enable_soft_shutdown_on_idle": True,
    "worker_eta_task_limit": 1,
    "worker_hijack_root_logger": False,
    "worker_log_color": True,
    "worker_log_format": "[%(process)d] %(message)s",
    "worker_redirect_stdouts": True,
    "worker_redirect_stdouts_level": "ERROR",
    "worker_send_task_events": True,
    "worker_soft_shutdown_timeout": 1.0,
    "worker_state_db": "worker.state",
    "worker_task_log_format": "[%(process)d] %(task_name)s %(message)s",
    "worker_timer_precision": 0.1,
}
ROWS: Final = {
    "run": Row(RUN, pools=ALL),
    "worker": Row(WORKER, pools=ALL),
    "time_limits": Row({"task_time_limit": 60, "task_soft_time_limit": 50}, pools=ALL),
    "autoscale": Row(arguments=("--autoscale", "3,1")),
    "few_descriptors": Row(
        arguments=("--autoscale", "260,2"), environ={"TESTPROJECT_DESCRIPTORS": "1024"}
    ),
    "spawn": Row({"worker_pool_start_method": "spawn"}, environ={REAL_START: "1"}),
    "putlocks": Row({"worker_pool_putlocks": False}),
    "restart": Row({"worker_pool_restarts": True}, control="pool_restart"),
    "concurrency": Row({"worker_concurrency": "auto"}),
    "children": Row(
        {"worker_max_tasks_per_child": 3, "worker_lost_wait": 0.5, "worker_proc_alive_timeout": 60}
    ),
    "memory": Row({"worker_max_memory_per_child": 1}),
    "optimization": Row(arguments=("-O", "default")),
    "logfile": Row(arguments=("--logfile", "worker-%n-%i.log")),
    "beat": Row(arguments=("--beat", "--schedule", "beat")),
    "purge": Row(arguments=("--purge",)),
}
#: Two workers with many options cover most of the others.
QUICK: Final = ("run", "worker", "few_descriptors")
CASES: Final = [
    pytest.param(
        name, pool, id=f"{name}-{pool}", marks=() if (name in QUICK and pool == "prefork") else SLOW
    )
    for name, row in ROWS.items()
    for pool in row.pools
]
#: Options of tasks that only a publisher of tasks reads; events are published without Celery.
PUBLISHER: Final = re.compile(
    r"task_(create_missing.*|default_(delivery|exchange|queue|routing).*|publish_retry.*|queues"
    r"|queue_max_priority|routes|send_sent_event|allow_error_cb_on_chord_header)"
)


@pytest.mark.parametrize(("name", "pool"), CASES)
def test_events_are_handled_retried_archived(
    fresh_eyes: Eyes, service: Make, name: str, pool: str
) -> None:
    """Each run counts once, whatever the options; in prefork, a process is killed too."""
    eyes, row = fresh_eyes, ROWS[name]
    options: Service = service(
        eyes, "options", handlers="options", celery=row.celery, environ=row.environ
    ).declare()
    plans = [["ok"]] * 20 + [["sleep:0.3"]] * 2 + [["fail", "ok"]] * 2 + [["fail"]] * 2
    if pool == "prefork":
        plans.append(["kill_once:x"])
    messages = [eyes.message(ACT, {"plan": plan}) for plan in plans]
    eyes.send(*messages)
    worker = options.worker(pool, 2, *row.arguments)
    until(lambda: options.ledger(what="start"), 60, "events are handled")
    if row.control:
        eyes.app.control.broadcast(row.control)
    archive = Archive(eyes, "options")
    eyes.empty("options.testproject.act", "options.testproject.kept", seconds=90)
    # `kept` has no retries.
    failed = {message.event_id: plan for message, plan in zip(messages, plans, strict=True)}
    wanted = Counter(
        (event_id, f"testproject.{handler}")
        for event_id, plan in failed.items()
        for handler in ("act", "kept")
        if plan == ["fail"] or (plan == ["fail", "ok"] and handler == "kept")
    )
    until(lambda: len(archive.collect()) >= wanted.total(), 60, "the others are archived")
    found = Counter((entry["event_id"], entry["handler"]) for entry in archive.collect())
    assert found == wanted
    others = {
        (event_id, f"testproject.{handler}") for event_id in failed for handler in ("act", "kept")
    } - set(wanted)

    def ended() -> Counter[tuple[str, str]]:
        return Counter((line["event"], line["handler"]) for line in options.ledger(what="end"))

    until(lambda: set(ended()) >= others, 60, "the others have ended")
    assert ended() == Counter(others)
    assert worker.alive
    assert worker.stop() == 0


def test_the_table_has_each_option() -> None:
    """And no option that Celery does not have."""
    text = (Path(__file__).parents[3] / "docs" / "celery-options.md").read_text()
    cells = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    documented = {name for row in cells for name in re.findall(r"`([^`]+)`", row[0])}
    settings = {
        f"{space}_{name}"
        for space in ("task", "worker")
        for name, option in NAMESPACES[space].items()
        if not name.startswith("__")
    }
    flags = {
        option
        for parameter in worker_command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    ours = {name for name in documented if name.startswith("-")}
    # Celery has these since 5.6 and 5.7.
    assert ours - {"--disable-prefetch", "--pool-start-method"} <= flags
    assert {name for name in settings if not PUBLISHER.fullmatch(name)} <= documented


# -- rate limits, connections to databases ---------------------------------------------------------


def test_rate_limit(fresh_eyes: Eyes, service: Make) -> None:
    """Held back, in order to be run once each; a warm shutdown gives back what was not."""
    options: Service = service(fresh_eyes, "options", handlers="options").declare()
    worker = options.worker("threads", 8, "-Q", "options.testproject.rated")
    ids = fresh_eyes.events(16, "options.rated", "ok")
    until(lambda: len(options.ledger(what="end")) >= 10)
    assert worker.stop() == 0
    done = len(options.ledger(what="end"))
    options.worker("threads", 8, "-Q", "options.testproject.rated")
    until(lambda: options.ended(ids, handler="testproject.rated"), 30)
    fresh_eyes.empty("options.testproject.rated")
    lines = options.ledger(what="start")
    assert Counter(line["event"] for line in lines) == dict.fromkeys(ids, 1)
    first = [line["at"] for line in lines[:done]]
    # A bucket of one token: n runs are dispatched in (n - 1) / 5 seconds at least. The first one's
    # thread may start late.
    assert first[-1] - first[0] >= (len(first) - 1) / 5 - 1


@pytest.mark.parametrize(
    ("reuse", "exchange"), [(None, "events"), (4, "events"), (4, "options:replay")]
)
def test_database_connections(
    fresh_eyes: Eyes, service: Make, reuse: int | None, exchange: str
) -> None:
    """Closed after each task, or after CELERY_DB_REUSE_MAX of them, as Celery's fixup does."""
    celery = {"CELERY_DB_REUSE_MAX": reuse}
    options: Service = service(fresh_eyes, "options", handlers="options", celery=celery).declare()
    queue = "options.testproject.query"
    worker = options.worker("threads", 2, "-Q", queue).wait_ready()
    for number in range(6):
        message = fresh_eyes.message("options.query", {"plan": ["ok"]})
        if exchange != "events":
            headers = {**message.headers, "event-replay-id": f"{number:032}"}
            message = replace(message, exchange=exchange, routing_key=queue, headers=headers)
        fresh_eyes.send(message)
        until(lambda: options.ended([message.event_id], handler="testproject.query"))  # noqa: B023
    fresh_eyes.empty(queue)

    def open_files() -> int:
        count = 0
        for link in Path(f"/proc/{worker.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                count += str(link.readlink()).endswith("db.sqlite3")
        return count

    if reuse is None:
        until(lambda: open_files() == 0, 5, "every connection is closed")
    else:
        # SQLite closes the file of a closed connection only when its last cursor is collected.
        assert open_files(), "connections stay open for the next task"
