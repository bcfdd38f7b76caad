"""Memory of a worker while events wait for their retries, beside plain Celery's.

``python -m benchmarks.memory [--events 100000]``: a prefork worker of each kind on a private
broker runs tasks that all fail once and ask for a retry in two hours. Prints the memory of the
worker's main process and of its pool after 200 and after all of them, and counts what waits where:
with this package in a delay queue, with Celery's ``countdown`` in the worker, unacked. (A pool
process grows with the first failures, until Python collects what their tracebacks have left.)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import django
from celery import Celery
from django.conf import settings

ROOT = Path(__file__).resolve().parent.parent
KIND = os.environ.get("BENCH_KIND", "events")
DELAY = 7200

settings.configure(
    SECRET_KEY="of a benchmark",
    USE_TZ=True,
    INSTALLED_APPS=["django_amqp_events"] if KIND == "events" else [],
    AMQP_EVENTS={"SERVICE": "bench", "PUBLISH": "immediate", "TOPOLOGY": "auto"},
)
app = Celery("memory", broker=os.environ.get("AMQP_URL", "amqp://"))
app.conf.update(
    broker_channel_error_retry=True,
    worker_cancel_long_running_tasks_on_connection_loss=True,
    # The fair rival: what a worker has in hand is not lost when it dies.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    # Classic: behind quorum queues Celery 5.7 can wait on the broker too.
    task_default_queue="plain",
    # Otherwise it takes hours: each countdown raises Celery's prefetch count by one.
    **({"worker_prefetch_multiplier": 0} if KIND == "plain" else {}),
)
app.set_default()
django.setup()

if KIND == "events":
    from django_amqp_events import event

    @event("bench.happened")
    def happened(number: int) -> None:
        """Fails once."""

    @happened.handler(
        name="bench.failing", retry_backoff=DELAY, retry_backoff_max=DELAY, retry_jitter=False
    )
    def failing(number: int) -> None:
        raise ValueError(number)


@app.task(name="bench.plain", bind=True, max_retries=5, ignore_result=True)
def plain(self: Any, number: int) -> None:
    raise self.retry(exc=ValueError(number), countdown=DELAY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--events", type=int, default=100_000)
    events = parser.parse_args().events
    sys.path.insert(0, str(ROOT / "scripts"))
    from broker import Node

    with tempfile.TemporaryDirectory() as folder:
        # What plain Celery has in hand would else be taken back after half an hour.
        node = Node.start(Path(folder) / "broker", config_extra="consumer_timeout = 36000000")
        try:
            print(f"RabbitMQ {node.version}, prefork 2, {events:,} retries in {DELAY:,} s")
            print(f"{'':8}{'worker':>22}{'pool':>22}   waiting")
            for kind in ("events", "plain"):
                print(measure(node, kind, events, Path(folder)), flush=True)
        finally:
            node.end()


def measure(node: Any, kind: str, events: int, folder: Path) -> str:
    node.add_vhost(kind)
    url = node.amqp_url(kind)
    queue = "bench.bench.failing" if kind == "events" else "plain"
    with worker(url, kind, folder / f"{kind}.log") as pid:
        wait(lambda: consumed(node, kind, queue))
        subprocess.run(
            [sys.executable, "-c", PUBLISH[kind], "200"], env=environ(url, kind), cwd=ROOT,
            check=True,
        )  # fmt: skip
        wait(lambda: waiting(node, kind) >= 200)
        time.sleep(2)
        before = resident(pid), pool(pid)
        subprocess.run(
            [sys.executable, "-c", PUBLISH[kind], str(events)], env=environ(url, kind),
            cwd=ROOT, check=True,
        )  # fmt: skip
        wait(lambda: waiting(node, kind) >= events + 200, events / 50 + 60)
        time.sleep(5)
        after = resident(pid), pool(pid)
        found = where(node, kind)
    grown = (f"{b:.0f} -> {a:.0f} MB ({a - b:+.0f})" for b, a in zip(before, after, strict=True))
    return f"{kind:8}" + "".join(f"{text:>22}" for text in grown) + f"   {found}"


PUBLISH = {
    "events": (
        "import sys\nfrom benchmarks.memory import happened\n"
        "from django_amqp_events import publish_many\n"
        "n = int(sys.argv[1])\n"
        "for first in range(0, n, 1000):\n"
        "    part = range(first, min(n, first + 1000))\n"
        "    publish_many(happened.name, [{'number': number} for number in part])"
    ),
    "plain": (
        "import sys\nfrom benchmarks.memory import plain, app\n"
        "with app.producer_or_acquire() as producer:\n"
        "    for k in range(int(sys.argv[1])):\n"
        "        plain.apply_async([k], producer=producer)"
    ),
}


def environ(url: str, kind: str) -> dict[str, str]:
    return {**os.environ, "AMQP_URL": url, "BENCH_KIND": kind, "PYTHONWARNINGS": "ignore"}


@contextmanager
def worker(url: str, kind: str, log: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.memory", "worker"]
    command += ["-c", "2", "-l", "WARNING", "--without-gossip", "--without-mingle"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environ(url, kind), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(30)


def resident(pid: int) -> float:
    """Megabytes of a process; pages that it shares are divided among those who share them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this system says nothing of the memory of processes")


def pool(pid: int) -> float:
    """Megabytes of the pool's processes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(resident(int(child)) for child in children)


def queues(node: Any, vhost: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.http("GET", f"/api/queues/{quote(vhost, safe='')}")
    return found


def consumed(node: Any, vhost: str, queue: str) -> bool:
    return any(each["name"] == queue and each.get("consumers") for each in queues(node, vhost))


def waiting(node: Any, vhost: str) -> int:
    """Retries: in delay queues, or in the hand of the worker."""
    if vhost == "events":
        return sum(
            each.get("messages", 0)
            for each in queues(node, vhost)
            if each["name"].startswith("bench:delay.")
        )
    (plain_queue,) = (each for each in queues(node, vhost) if each["name"] == "plain")
    return 0 if plain_queue.get("messages_ready") else int(plain_queue.get("messages", 0))


def where(node: Any, vhost: str) -> str:
    return ", ".join(
        f"{each['name']}: {each.get('messages_ready', 0):,} ready, "
        f"{each.get('messages_unacknowledged', 0):,} in hand"
        for each in queues(node, vhost)
        if each.get("messages")
    )


def wait(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the worker did not get on; run it again with a free machine")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
