"""Tasks on Redis and events on RabbitMQ in one project, as docs/redis.md has it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as redis_client

from redis_server import Redis
from tests.conftest import sqlite_settings
from tests.forked import REAL_START

from .harness import Eyes, Project, until

HERE = Path(__file__).resolve().parent / "two_brokers"
ROOT = HERE.parents[2]
#: What runs for order 1, each on the broker that it came from.
EXPECTED = Counter(
    [
        "booked on amqp, order=1",
        "reported on amqp, order=1",
        "packed on redis, order=1",
        "packed on redis, order=2",
        "packed on redis, order=3",
        "shipped on redis, order=1",
    ]
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Shop(Project):
    """The project on both brokers."""

    def __init__(self, redis: Redis, eyes: Eyes, where: Path) -> None:
        self.notes = where / "notes"
        super().__init__(
            where,
            HERE,
            DJANGO_SETTINGS_MODULE="shop.settings",
            REDIS_URL=redis.url,
            RABBITMQ_URL=eyes.url,
            SHOP_DATABASE=json.dumps(sqlite_settings(where / "db.sqlite3")),
            SHOP_NOTES=str(self.notes),
        )

    @property
    def noted(self) -> Counter[str]:
        return Counter(self.notes.read_text().splitlines() if self.notes.exists() else ())


def results(shop: Shop) -> int:
    """Count the results of tasks in Redis."""
    with redis_client.from_url(shop.environ["REDIS_URL"]) as client:
        return len(client.keys("celery-task-meta-*"))


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    server = Redis.start()
    yield server
    server.end()


@pytest.fixture
def shop(redis: Redis, fresh_eyes: Eyes, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(redis, fresh_eyes, tmp_path)
    try:
        made.manage("migrate", "--verbosity", "0")
        made.manage("check", "--tag", "amqp_events", "--fail-level", "WARNING")
        made.manage("events_declare")
        made.start("tasks", "-m", "celery", "-A", "shop", "worker", "-P", "solo", "-l", "INFO")
        yield made
    finally:
        made.end()


@pytest.mark.parametrize(
    ("command", "pool"),
    [
        ("events_worker", "prefork"),
        ("events_worker", "threads"),
        ("celery", "solo"),
        ("celery", "spawn"),
    ],
)
def test_tasks_go_to_redis_and_events_to_rabbitmq(
    shop: Shop, fresh_eyes: Eyes, command: str, pool: str
) -> None:
    program = {
        "events_worker": ("django", "events_worker", "--no-mirror", "--no-batches", "--no-reaper"),
        "celery": ("celery", "-A", "shop.celery:events_app", "worker"),
    }
    before = results(shop)
    if pool == "spawn":
        shop.environ[REAL_START] = "1"
    chosen = ("prefork", "--pool-start-method", "spawn") if pool == "spawn" else (pool,)
    shop.start("events", "-m", *program[command], "-P", *chosen, "-c", "2", "-l", "INFO")
    shop.python("from shop.events import ordered\nordered.publish(order=1)")
    until(lambda: shop.noted == EXPECTED, 30, str(shop.noted))
    # From a thread, as a web server has them, a task that publishes.
    shop.python(
        "from threading import Thread\nfrom shop.tasks import order\n"
        "thread = Thread(target=order.delay, args=[1])\nthread.start(); thread.join()"
    )
    twice = EXPECTED + EXPECTED + Counter(["ordered on redis, order=1"])
    until(lambda: shop.noted == twice, 30, str(shop.noted))
    # Tasks have results there, handlers have none.
    tasks = before + sum(count for line, count in twice.items() if "redis" in line)
    until(lambda: results(shop) == tasks, 30, "each task has a result")
    until(lambda: not any(fresh_eyes.totals().values()), 30, "each event is acknowledged")
    assert results(shop) == tasks


def test_the_page_has_the_files_of_the_project() -> None:
    page = (ROOT / "docs" / "redis.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert (HERE / "shop" / "celery.py").read_text() in blocks
    settings = (HERE / "shop" / "settings.py").read_text()
    assert any(block.startswith("CELERY_BROKER_URL") and block in settings for block in blocks)
