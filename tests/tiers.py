"""Which tests `make test` leaves to `make test-all`: those whose behaviour another test covers.

`make test` runs each behaviour once on a real broker, in ten minutes. `make test-all`, which CI
runs, adds the other pools, databases, fault rows and browser pages, and the programs in scripts/.
"""

from __future__ import annotations

import re
from typing import Final

#: One row per family of faults runs in `make test`.
FAULT_ROWS: Final = (
    "broker-killed-publish",
    "child-within",
    "cold-solo",
    "cut-handling",
    "database-outbox",
    "delay-queue-deleted",
    "disk-retry",
    "half-open-archive",
    "relay-relayed",
    "worker-within-prefork",
)

#: Node ids, relative to tests/, with the reason why they wait for `make test-all`.
_LATER: Final = {
    rf"faults/.*\[(?!({'|'.join(FAULT_ROWS)})(-postgresql)?\])": "one row per family is enough",
    r"browser/(?!test_story)": "the story visits the pages",
    r"asyncapi/": "npm installs a validator; unit tests cover the documents",
    r"deploy/": "it installs linters, and the packages of an image",
    r"acceptance/example/": "`make demo` counts the same",
    r"acceptance/publish/test_message_format\.py": "the contract covers the formats",
    r"acceptance/monitor/test_metrics\.py::test_prometheus": "it installs Prometheus",
    r"test_(broker_node|pgbouncer)\.py": "tests of scripts/, not of the package",
    r"(?!integration/publish).*\[(.*-)?pgbouncer\b": "the outbox covers it",
    r"acceptance/test_two_brokers\.py.*celery": "events_worker covers it",
    r"acceptance/(?!worker/test_core).*\[(.*-)?(threads|solo)\b": "prefork covers it",
    r"acceptance/worker/test_poison\.py::Test(Threads|Solo)": "prefork covers it",
    r"acceptance/.*\[(.*-)?(postgresql|mariadb)\b": "SQLite covers it",
    r"integration/(?!archive/test_races|monitor/test_statistics).*"
    r"\[(.*-)?(postgresql|mariadb)\b": "SQLite covers it",
    r"unit/(archive|monitor)/.*\[(.*-)?(postgresql|mariadb)\b": "SQLite covers it",
    r"(?!integration/archive/test_mirror\.py).*\[(.*-)?no-tz\b": "the mirror covers it",
    r"integration/archive/test_races.*\[sqlite": "PostgreSQL, with its row locks, covers it",
    r"acceptance/worker/test_chunks\.py.*(warm_shut|ends_the_process|holds_nobody_up|cold_shut)": (
        "the fault rows kill workers with chunks"
    ),
    r"acceptance/worker/.*(rolling_restarts|memory_stays_bounded|killed_seven_times)": "load",
    r"acceptance/worker/test_reconnect\.py.*comes_back\[stop\]": "a killed broker covers it",
    r"acceptance/worker/test_children\.py.*(runs_a_relay|celery_of_its_own)": "slow starts",
    r"acceptance/test_migrating\.py.*behind_an_exchange": "the other guide has the same steps",
    r"acceptance/worker/test_starts\.py.*(may_not_be_read|without_permissions)": "long back-off",
}
_PATTERN: Final = re.compile("|".join(f"({pattern})" for pattern in _LATER))


def later(node_id: str) -> bool:
    """Return True if a test waits for `make test-all`."""
    return _PATTERN.match(node_id.removeprefix("tests/")) is not None
