"""``events_worker`` and the mirror beside it: started, started again, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import Make
from ..harness import (
    STARTED,
    Eyes,
    Service,
    Worker,
    until,
)

pytestmark = pytest.mark.timeout(180)


def events_worker(
    service: Service,
    *arguments: str,
    program: tuple[str, ...] = ("-m", "django"),
    cwd: Path | None = None,
) -> Worker:
    log_path = service.where / "events_worker.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, "events_worker", "-P", "solo", *arguments],
            env={**service.env(), "TESTPROJECT_OUTLIVES": "1"},
            cwd=cwd or service.where,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    worker = Worker(process, log_path, f"{service.name}-events-worker")
    STARTED.append(worker)
    return worker


def mirrors(worker: Worker, command: str = "events_mirror") -> list[int]:
    """Pids of the running mirrors, or of another command, that this worker has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        # Others on this machine may run one too, without a parent.
        if {command, "--parent"} <= set(words) and (
            words[words.index("--parent") + 1] == str(worker.pid)
        ):
            found.append(int(path.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def core(service: Make, fresh_eyes: Eyes) -> Service:
    made = service(fresh_eyes)
    made.declare()
    made.python("from django.core.management import call_command\ncall_command('migrate', '-v0')")
    return made


def states(core: Service) -> str:
    return core.python(
        "from django_amqp_events.models import ArchivedEvent\n"
        "print(list(ArchivedEvent.objects.order_by('event_id').values_list('event_id', 'state')))"
    )


def test_own_mirror_stores_archived_events(core, fresh_eyes):
    worker = events_worker(core).wait_ready()
    fresh_eyes.event("core.act.once", {"plan": ["fail"]}, event_id="one")
    until(lambda: "('one', 'archived')" in states(core), 30, "one is mirrored")
    # It is killed and another one takes over.
    [first] = mirrors(worker)
    os.kill(first, signal.SIGKILL)
    fresh_eyes.event("core.act.once", {"plan": ["fail"]}, event_id="two")
    until(lambda: "('two', 'archived')" in states(core), 30, "two is mirrored")
    assert "events_mirror" in worker.log
    assert "events_mirror ended with signal 9" in worker.log
    [second] = mirrors(worker)
    assert second != first
    assert worker.stop() == 0
    assert not alive(second)


def test_a_worker_that_is_killed_leaves_no_mirror(core):
    worker = events_worker(core).wait_ready()
    [mirror] = until(lambda: mirrors(worker), 30, "its mirror runs")
    until(lambda: "mirroring core:archive" in worker.log, 30, "the mirror has begun")
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    until(lambda: not alive(mirror), 20, "the mirror has ended")


def test_started_beside_a_module_named_celery(core):
    """As in `cd project/app; ../manage.py events_worker`, beside the app's celery.py."""
    app = core.where / "app"
    app.mkdir()
    (app / "celery.py").write_text("raise RuntimeError('this is not Celery')\n")
    manage = core.where / "manage.py"
    manage.write_text(
        "import sys\n"
        "from django.core.management import execute_from_command_line\n"
        "execute_from_command_line(sys.argv)\n"
    )
    worker = events_worker(core, program=(str(manage),), cwd=app).wait_ready()
    until(lambda: "mirroring core:archive" in worker.log, 30, "the mirror has begun")
    assert worker.stop() == 0


def test_none_where_none_is_wanted(core, fresh_eyes):
    worker = events_worker(core, "--no-mirror").wait_ready()
    fresh_eyes.event("core.act.once", {"plan": ["fail"]}, event_id="one")
    until(lambda: fresh_eyes.ready("core:archive") == 1, 20, "it is in the archive")
    assert not mirrors(worker)
    assert worker.stop() == 0
    assert states(core).strip() == "[]"


LEFT = """
from datetime import UTC, datetime
from django_amqp_events.message import encoding
from django_amqp_events.publish import outbox_rows
outbox_rows.insert([
    encoding.event_message(
        exchange="events", name="core.act.once", event_id="left", service="core",
        body=encoding.encode_payload("e", {"plan": ["ok"]}), published_at=datetime.now(UTC),
    )
], alias="default", service="core", held=False)
"""


def test_events_worker_runs_a_relay(core):
    """Events in the service's outbox are handled, and a relay that dies is restarted."""
    without = events_worker(core, "--no-relay").wait_ready()
    core.python(LEFT)
    assert mirrors(without)
    assert not mirrors(without, "events_relay")
    assert without.stop() == 0
    assert not core.runs("left")
    worker = events_worker(core).wait_ready()
    until(lambda: core.runs("left", "end"), 40, "it is handled")
    [first] = mirrors(worker, "events_relay")
    os.kill(first, signal.SIGKILL)
    core.python(LEFT.replace('"left"', '"left-too"'))
    until(lambda: core.runs("left-too", "end"), 40, "it is handled as well")
    [second] = mirrors(worker, "events_relay")
    assert second != first
    assert worker.stop() == 0
    assert not alive(second)
