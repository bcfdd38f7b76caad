"""``once`` with workers that die: each effect is in the database once."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from ..conftest import POOLS, Make
from ..harness import (
    Archive,
    Eyes,
    Service,
    until,
)

pytestmark = pytest.mark.timeout(240)

ACT = "effects.act"
QUEUE = "core.testproject.act"


class Effects:
    """The table that the handler writes to, on another alias than default."""

    def __init__(self, core: Service, alias: str) -> None:
        self.core = core
        self.alias = alias

    def rows(self) -> Counter[str]:
        """How often each event has had its effect."""
        return Counter(json.loads(self._ask("SELECT event FROM effects")))

    def entries(self) -> int:
        found: list[int] = json.loads(
            self._ask("SELECT count(*) FROM django_amqp_events_inboxentry")
        )
        return found[0]

    def _ask(self, query: str) -> str:
        return self.core.python(
            f"import json\nfrom django.db import connections\n"
            f"cursor = connections[{self.alias!r}].cursor()\ncursor.execute({query!r})\n"
            f"print(json.dumps([row[0] for row in cursor.fetchall()]))"
        )


@pytest.fixture
def effects(empty_database: dict[str, Any], fresh_eyes: Eyes, service: Make) -> Effects:
    core = service(
        fresh_eyes,
        handlers="effects",
        celery={"worker_lost_wait": 1},
        environ={
            "TESTPROJECT_DATABASES": json.dumps({"books": empty_database}),
            "TESTPROJECT_ALIAS": "books",
        },
    )
    core.python(
        "from django.core.management import call_command\n"
        "from django.db import connections\n"
        "from testproject.effects import TABLE\n"
        "call_command('migrate', database='books', verbosity=0)\n"
        "connections['books'].cursor().execute(TABLE)"
    )
    core.declare()
    return Effects(core, "books")


@pytest.mark.parametrize("pool", POOLS[:2])
def test_killed_before_the_commit_and_after_it(
    pool: str, effects: Effects, fresh_eyes: Eyes
) -> None:
    """The one runs again, the other is found to be done."""
    eyes, core = fresh_eyes, effects.core
    before = eyes.event(ACT, {"plan": ["kill_once:before"]})
    worker = core.worker(pool, 2, "-Q", QUEUE)
    if pool != "prefork":
        assert worker.wait(60) == -9
        worker = core.worker(pool, 2, "-Q", QUEUE)
    # Not its end in the ledger: the next line would kill it before it is acked.
    until(lambda: " succeeded in " in worker.log, 60, "it is run again")
    assert len(core.runs(before)) == 2
    eyes.empty(QUEUE)
    (core.where / "die-after").touch()
    after = eyes.event(ACT, {"plan": ["ok"]})
    if pool != "prefork":
        assert worker.wait(60) == -9
        worker = core.worker(pool, 2, "-Q", QUEUE)
    until(lambda: f"({after}) is skipped" in worker.log, 60, "it is skipped")
    eyes.empty(QUEUE)
    assert len(core.runs(after)) == 1, "the handler was not called again"
    assert effects.rows() == {before: 1, after: 1}
    assert effects.entries() == 2
    assert not Archive(eyes).collect()
