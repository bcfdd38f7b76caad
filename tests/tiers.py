"""Which tests `make test` leaves to `make test-all`: those whose behaviour another test covers.

`make test` runs each behaviour once, on a real broker and real processes. `make test-all`, which CI
runs, adds the other pools, databases, fault rows and browser pages, and the programs in scripts/.
"""

from __future__ import annotations

import re
from typing import Final

#: One row per family of faults runs in `make test`.
FAULT_ROWS: Final = (
    "broker-killed-publish",
    "child-within",
    "cut-handling",
    "database-outbox",
    "delay-queue-deleted",
)

#: Node ids, relative to tests/, with the reason why they wait for `make test-all`.
_LATER: Final = {
    rf"faults/.*\[(?!({'|'.join(FAULT_ROWS)})(-postgresql)?\])": "one row per family is enough",
    r"faults/test_(peers|publishers|clusters)\.py": "other programs, and more of the same families",
    r"acceptance/crash_points/.*\[(?!handle-s|publish-o[mu]|relay|replay-s)": (
        "more points of the same kinds"
    ),
    r"soak/test_soaking\.py": "a minute; test_history.py plants a fault for each rule",
    r"browser/": "the admin's own tests read the same pages without a browser",
    r"asyncapi/": "npm installs a validator; unit tests cover the documents",
    r"integration/test_benchmarks\.py": "half a minute; nothing depends on it",
    r"deploy/": "it installs linters, and the packages of an image",
    r"packaging/": "it installs Sphinx, twine, and the package in empty environments",
    r"acceptance/example/": "`make demo` counts the same",
    r"acceptance/publish/test_message_format\.py": "the contract covers the formats",
    r"acceptance/monitor/test_metrics\.py::test_prometheus": "it installs Prometheus",
    r"acceptance/test_(migrating|two_brokers|console)\.py": "guides, with projects of their own",
    r"unit/admin/test_who_sees_what\.py.*nowhere\[(reader|root|stranger)": "a viewer sees most",
    r"unit/archive/test_identity\.py.*\[(bytes|unreadable|archive message\])": "others cover it",
    r"unit/test_example\.py.*in_memory\[2": "the demo's second release; the first fails more",
    r"integration/broker/test_provisioning\.py.*without_the_flag": "a broker of its own",
    r"integration/management/test_events_status\.py.*a_leader": "it stops a broker",
    r"integration/broker/test_confirms\.py.*(killed_in_the_middle|failover|stale_connection)": (
        "the fault row of a killed broker covers it"
    ),
    r"integration/publish/test_outbox\.py.*broker_that_is_killed": "others have it away",
    r"integration/broker/test_confirms\.py.*by_an_alarm": "test_settlement has one",
    r"integration/monitor/test_snapshots\.py.*broker_restart": "a broker of its own",
    r"acceptance/monitor/test_health\.py.*a_broker_that_stops": "a broker of its own",
    r"acceptance/worker/test_broker_limits\.py.*small_frames": "unit tests cover the sizes",
    r"test_(broker_node|database_server|pgbouncer)\.py": "tests of scripts/, not of the package",
    r".*\[(.*-)?pgbouncer\b": "PostgreSQL covers it",
    r"acceptance/worker/test_combined\.py.*\[(?!prefork-one)": "a format for each case covers most",
    r"integration/broker/test_confirms_model\.py.*\[limited": "a broker of its own",
    r"acceptance/(?!worker/test_core).*\[(.*-)?(threads|solo)\b": "prefork covers it",
    r"acceptance/worker/test_poison\.py::Test(Threads|Solo)": "prefork covers it",
    r"acceptance/.*\[(.*-)?(postgresql|mariadb)\b": "SQLite covers it",
    r"integration/(?!archive/test_races).*\[(.*-)?postgresql\b": "SQLite covers it",
    r".*\[(.*-)?mariadb\b": "SQLite, or PostgreSQL with its row locks, covers it",
    r"unit/admin/test_hostile_values\.py": "1,400 requests to pages that have other tests",
    r"unit/(archive|monitor)/.*\[(.*-)?postgresql\b": "SQLite covers it",
    r"(?!integration/archive/test_mirror\.py).*\[(.*-)?no-tz\b": "the mirror covers it",
    r"integration/archive/test_races.*\[sqlite": "PostgreSQL, with its row locks, covers it",
    r"acceptance/worker/test_celery_options\.py.*\[(?!(run|worker|few_descriptors)-prefork)": (
        "two workers with many options cover most of them"
    ),
    r"acceptance/worker/test_children\.py.*killed_part.*\[(pool|reaper|worker)": "fault rows",
    r"acceptance/worker/test_consumer_timeout\.py": "RabbitMQ's timer, half a minute",
    r"acceptance/worker/.*(rolling_restarts|memory_stays_bounded|killed_seven_times)": "load",
    r"acceptance/worker/test_reconnect\.py.*doubles_nothing\[stop\]": "a killed broker covers it",
    r"acceptance/worker/test_children\.py.*(runs_a_relay|celery_of_its_own)": "slow starts",
    r"acceptance/worker/test_starts\.py.*(may_not_be_read|without_permissions)": "long back-off",
}
_PATTERN: Final = re.compile("|".join(f"({pattern})" for pattern in _LATER))


def later(node_id: str) -> bool:
    """Return True if a test waits for `make test-all`."""
    return _PATTERN.match(node_id.removeprefix("tests/")) is not None


def ignored(path: str) -> bool:
    """Return True if all tests of a folder, relative to tests/, wait for `make test-all`."""
    return path in {"asyncapi", "browser", "deploy", "packaging"}
