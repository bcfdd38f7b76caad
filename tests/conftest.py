"""Fixtures that every suite shares: RabbitMQ and databases, with a vhost or database of one's own.

A broker or database that cannot be had is a failure, never a skip: a suite that skips proves
nothing.

`rabbit`, `vhost`, `fresh_vhost`: the session's broker. `private_node`: one to kill.
`archive_database`: the archive's tables (all models of django_amqp_events) in an empty, migrated
SQLite file or database of the test's own, beside the default database, which a test may use too; a
test that takes it runs once on each of SQLite, PostgreSQL and MariaDB, or on one, also on
PostgreSQL behind ``pgbouncer``, with
``@on("postgresql")``. It is a
:class:`Database`: alias, kind, server, and the settings that another process would need. The router
sends the models there, and what went past the router fails the test.
`empty_database`: one of each kind for other processes. `servers`: the session's database servers by
kind. `private_server`: one of each kind to kill.
Tests in :data:`TIMES` that use a database run once more with ``USE_TZ = False``, on one of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch
from zlib import crc32

import pytest
from django.apps import apps
from django.conf import settings as django_settings
from django.core.management import call_command
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.sqlite3.base import DatabaseWrapper as SqliteWrapper
from django.test import override_settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from broker import Broker, Node
from database_server import DatabaseServer
from mariadb import MariaDB
from pgbouncer import PgBouncer
from postgresql import Postgres
from tests import forked

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vhost:
    """A vhost for one test module, deleted afterwards."""

    name: str
    url: str
    management_url: str
    node: Broker

    @property
    def path(self) -> str:
        """The name as the management API wants it in a path."""
        return self.url.rpartition("/")[2]


# Under pytest-xdist all processes share one node and one fork server, which the controller ends.
SHARED = "AMQP_EVENTS_SHARED_NODE"
FORKS = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    shared = Path(tempfile.mkdtemp(prefix="amqp-events-"))
    config.stash[FORKS] = forked.start_server(shared)
    if getattr(config.option, "numprocesses", None):
        os.environ[SHARED] = str(shared)


def pytest_unconfigure(config: pytest.Config) -> None:
    if server := config.stash.get(FORKS, None):
        server.communicate()  # it ends with its standard input
        shared = Path(os.environ.pop(forked.SOCKET)).parent
        if os.environ.pop(SHARED, None) and (node := Node.attach(shared)):
            node.end()
        shutil.rmtree(shared, ignore_errors=True)


#: Tests that may need a second run because something did not come in time, in a complete run of the
#: suite on a machine that is busy. More than that, and something is wrong.
TOO_MANY = 4


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Let the first process compile the tests, and the others read what it has written."""
    with ExitStack() as stack:
        if shared := os.environ.get(SHARED):
            lock = stack.enter_context((Path(shared) / "collection").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that repeated too many tests."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    repeated = reporter.stats.get("rerun", ())
    if len(repeated) >= TOO_MANY and not session.exitstatus:
        reporter.write_line(f"{len(repeated)} tests did not end in time and were run again")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


#: Of tests that `make test` leaves to `make test-all`, which CI runs: another test asks the same,
#: for instance on another database or pool, or they install programs.
SLOW = pytest.mark.slow
#: Where all are: they need a browser, npm, linters, or packages in empty environments.
SLOW_FOLDERS = frozenset({"browser", "deploy", "packaging"})


def slow(*values: Any) -> list[Any]:
    """Return parameters with which a test is slow."""
    return [pytest.param(value, marks=SLOW) for value in values]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="Leave out tests marked as slow.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import folders all of whose tests are slow."""
    slow = collection_path.parent == Path(__file__).parent and collection_path.name in SLOW_FOLDERS
    return (slow and config.getoption("--quick")) or None


#: Long tests start first; short ones fill the gaps at the end.
LONG = (
    "acceptance/example/test_demo.py",
    "faults",
    "browser",
    "acceptance",
    "test_",
    "integration",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what takes long first; the rest stays in the order that pytest-randomly gave it."""
    if config.getoption("--quick"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        return next((at for at, each in enumerate(LONG) if path.startswith(each)), len(LONG))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Reports travel to the controller as UTF-8, and our tests log and show lone surrogates."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_encodable(item) for item in value)
    return value


def _shared_node(directory: Path) -> Node:
    """The node of all test processes; the first one starts it. It ends with the controller."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (running := Node.attach(directory)) is not None:
            return running
        node = Node.start(directory, owner=os.getppid())
        keep_dead_lettering(node)
        node.disown()
        return node


def keep_dead_lettering(node: Node) -> None:
    """Let a crashed dead-letter worker stay down, and repeat unconfirmed dead letters after 20 s.

    RabbitMQ starts it again, even if its queue has just been deleted. On 3.10, its second crash
    within five seconds ends the dead-lettering of the whole node, and a quorum queue can no longer
    be declared there (rabbitmq-server, issue 16652). A suite deletes thousands of queues.

    By default, a dead letter that its queue did not take, as on a busy machine, is repeated after
    180 s, which is longer than tests wait.
    """
    child, state = "setelement(5, Child, temporary)", "setelement(4, State, {Ids, Temporary})"
    node.ctl(
        "eval",
        "application:set_env(rabbit, dead_letter_worker_publisher_confirm_timeout, 20000),"
        " sys:replace_state(rabbit_fifo_dlx_sup, fun(State) -> {Ids, Children} = element(4, State),"
        f" Temporary = maps:map(fun(_, Child) -> {child} end, Children), {state} end),"
        " {ok, #{restart := temporary}} ="
        " supervisor:get_childspec(rabbit_fifo_dlx_sup, rabbit_fifo_dlx_worker).",
    )


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    """Fail a test that leaves its settings to those behind it.

    Blocks of override_settings and pytest-django's `settings` that do not end in the order of their
    beginning do that.
    """
    holder: Any = django_settings
    before = holder._wrapped
    yield
    after, holder._wrapped = holder._wrapped, before
    assert after is before, "the settings are not what they were before the test"


@pytest.fixture(scope="session", autouse=True)
def _threads_close_what_they_opened() -> Iterator[None]:
    """Let a thread's ``close()`` close its connection to the default database in memory too.

    Django keeps those open, as the last one takes the database along. The main thread has one, and
    what a thread leaves open is a warning since Python 3.13, which hits some later test.
    """
    real = SqliteWrapper.close

    def close(self: SqliteWrapper) -> None:
        if self.is_in_memory_db() and threading.current_thread() is not threading.main_thread():
            BaseDatabaseWrapper.close(self)
        else:
            real(self)

    with (
        patch.object(SqliteWrapper, "close", close),
        # The first is what Django calls.
        patch.object(sqlite3.dbapi2, "connect", partial(sqlite3.connect, factory=_Connection)),
        patch.object(sqlite3, "connect", partial(sqlite3.connect, factory=_Connection)),
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def _flushes_keep_permissions() -> Iterator[None]:
    """Let a test that commits leave content types and permissions, which migrate made, in place.

    Django empties these tables too, and makes the rows again after each such test.
    """

    def sql_flush(style: Any, connection: Any, **options: bool) -> list[str]:
        tables = connection.introspection.django_table_names(only_existing=True)
        kept = {"django_content_type", "auth_permission"}
        statements: list[str] = connection.ops.sql_flush(style, {*tables} - kept, **options)
        return statements

    flush = "django.core.management.commands.flush"
    with patch(f"{flush}.sql_flush", sql_flush), patch(f"{flush}.emit_post_migrate_signal"):
        yield


class _Connection(sqlite3.Connection):
    """Name the test that opened it when a later test reports it as unclosed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.opened_in = os.environ.get("PYTEST_CURRENT_TEST", "no test")

    def __repr__(self) -> str:
        return f"<connection of {self.opened_in}>"


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The broker of this session: AMQP_URL (and AMQP_MANAGEMENT_URL) if set, else a private node.

    Shared by all tests: do not stop or kill it, `private_node` is for that.
    """
    if url := os.environ.get("AMQP_URL"):
        yield Broker.from_urls(url, os.environ.get("AMQP_MANAGEMENT_URL"))
        return
    if shared := os.environ.get(SHARED):
        yield _shared_node(Path(shared))
        return
    node = Node.start(tmp_path_factory.mktemp("rabbit"))
    keep_dead_lettering(node)
    yield node
    node.end()


@pytest.fixture(scope="module")
def vhost(rabbit: Broker, request: pytest.FixtureRequest) -> Iterator[Vhost]:
    """A fresh vhost for the test module."""
    with _vhost(rabbit, request.module.__name__.rpartition(".")[2]) as fresh:
        yield fresh


@pytest.fixture
def fresh_vhost(rabbit: Broker, request: pytest.FixtureRequest) -> Iterator[Vhost]:
    """A fresh vhost for one test."""
    with _vhost(rabbit, re.sub(r"\W+", "-", request.node.name)[:60]) as fresh:
        yield fresh


@contextmanager
def _vhost(broker: Broker, name: str) -> Iterator[Vhost]:
    """A private vhost. Test processes share the broker, so its name has a random suffix."""
    name = f"{name}-{secrets.token_hex(4)}"
    broker.add_vhost(name)
    try:
        url, management_url = broker.amqp_url(name), broker.management_url
        assert management_url is not None
        yield Vhost(name=name, url=url, management_url=management_url, node=broker)
    finally:
        broker.delete_vhost(name)


@pytest.fixture
def make_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Start further nodes with the arguments of `Node.start`; stop all after the test."""
    nodes: list[Node] = []

    def start(**options: object) -> Node:
        node = Node.start(tmp_path_factory.mktemp("node"), **options)  # type: ignore[arg-type]
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        node.end()


@pytest.fixture(scope="session")
def own_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that this process does not share; its tests leave it running or not."""
    node = Node.start(tmp_path_factory.mktemp("private"))
    yield node
    node.end()


@pytest.fixture(scope="module")
def _module_node(own_node: Node) -> Node:
    """The node of this process, with nothing of other modules in its vhost."""
    _run(own_node)
    own_node.delete_vhost("/")
    own_node.add_vhost("/")
    return own_node


@pytest.fixture
def private_node(_module_node: Node) -> Node:
    """A node that a test may stop, kill and start again.

    It runs when a test begins, whatever the one before did to it; its data stays in a module.
    """
    _run(_module_node)
    return _module_node


def _run(node: Node) -> None:
    if node.alive:
        node.wait_ready()
    else:
        node.start_again()


# -- the ways in which tests of databases run ------------------------------------------------------

#: Folders and modules whose tests of a database run once more without time zones, on any one kind.
TIMES = (
    "integration/archive/test_mirror.py",
    "integration/management/test_events_prune",
    "integration/management/test_events_recover",
    "integration/management/test_events_replay",
    "integration/monitor/",
    "integration/publish/test_outbox.py",
    "integration/worker/test_once",
    "unit/admin/test_admin",
    "unit/admin/test_batches",
    "unit/admin/test_dashboard",
    "unit/admin/test_editing",
    "unit/admin/test_find",
    "unit/admin/test_groups",
    "unit/admin/test_hostile_values",
    "unit/admin/test_outbox",
    "unit/archive/test_batches",
    "unit/archive/test_export",
    "unit/archive/test_failure_groups",
    "unit/archive/test_mirror",
    "unit/archive/test_replay",
    "unit/monitor/",
)
#: Those that store times or compare them with the database's own: without time zones on each kind.
CLOCKS = (
    "integration/archive/test_mirror.py",
    "integration/management/test_events_prune",
    "integration/publish/test_outbox.py",
    "unit/monitor/test_event_locations",
)
#: Those whose tests of PostgreSQL run once more behind PgBouncer.
POOLED = (
    "integration/archive/test_batches",
    "integration/archive/test_mirror.py",
    "integration/management/test_events_replay",
    "integration/publish/test_outbox",
    "integration/worker/test_once",
)


def choice(name: str, among: Sequence[T]) -> T:
    """Return the same one for a name in each process and each run."""
    return among[crc32(name.encode()) % len(among)]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test, names = metafunc.definition, {*metafunc.fixturenames}
    where = test.nodeid.removeprefix("tests/")
    is_mirror = where.startswith("integration/archive/test_mirror.py")
    no_tz = () if is_mirror else SLOW  # the mirror stands for all
    chosen = any("archive_database" in mark.args[0] for mark in test.iter_markers("parametrize"))
    arguments: list[str] = []
    ways: list[Any] = []
    if "archive_database" in names and not chosen:
        arguments = ["_use_tz", "archive_database"]
        ways = [pytest.param(True, kind, id=kind, marks=_marks(kind)) for kind in KINDS]
        if where.startswith(TIMES):
            kinds = KINDS if where.startswith(CLOCKS) else (choice(where, KINDS),)
            ways += [
                pytest.param(False, kind, id=f"no-tz-{kind}", marks=_marks(kind) or no_tz)
                for kind in kinds
            ]
        if where.startswith(POOLED):
            ways.append(pytest.param(True, "pgbouncer", id="pgbouncer", marks=SLOW))
    elif where.startswith(TIMES) and (
        names & {"db", "transactional_db"} or test.get_closest_marker("django_db")
    ):
        arguments = ["_use_tz"]
        ways = [
            pytest.param(True, id=pytest.HIDDEN_PARAM),
            pytest.param(False, id="no-tz", marks=no_tz),
        ]
    if ways:
        # Not by metafunc.parametrize(): the fixture's own parameters would be added to these.
        test.add_marker(pytest.mark.parametrize(arguments, ways, indirect=True))


@pytest.fixture(autouse=True)
def _use_tz(request: pytest.FixtureRequest, _settings_stay: None) -> Iterator[None]:
    """Turn ``USE_TZ`` off for tests that are parametrised so."""
    if getattr(request, "param", True):
        yield
        return
    with override_settings(USE_TZ=False):
        yield


# -- databases -------------------------------------------------------------------------------------


#: The kinds of database servers.
SERVERS: dict[str, type[DatabaseServer]] = {each.kind: each for each in (Postgres, MariaDB)}
#: All kinds of databases.
KINDS = ("sqlite", *SERVERS)


def _marks(kind: str) -> Any:
    """`make test` has SQLite only, but for a row of the faults."""
    return () if kind == "sqlite" else SLOW


def on(*kinds: str) -> pytest.MarkDecorator:
    """Return the mark of tests that run on these kinds of databases."""
    values = [pytest.param(kind, marks=_marks(kind)) for kind in kinds]
    return pytest.mark.parametrize("archive_database", values, indirect=True)


EACH, ONE, POSTGRESQL = on(*KINDS), on("sqlite"), on("postgresql")
#: Of tests that need rows locked one by one.
ROW_LOCKS = on(*SERVERS)


_WAITING = {
    "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
    "mariadb": "SELECT count(*) FROM information_schema.innodb_lock_waits",
}


class Servers(dict[str, DatabaseServer]):
    """Database servers by kind, each started on first use."""

    def __missing__(self, kind: str) -> DatabaseServer:
        return self.setdefault(kind, SERVERS[kind].start())


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The database servers of this process; do not stop or kill one."""
    started = Servers()
    yield started
    for server in started.values():
        server.end()


@pytest.fixture(scope="session")
def pgbouncer(servers: Servers) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode before the PostgreSQL server of this process."""
    pool = PgBouncer.start(servers["postgresql"])
    yield pool
    pool.end()


@pytest.fixture(params=slow(*SERVERS))
def private_server(request: pytest.FixtureRequest) -> Iterator[DatabaseServer]:
    """A server of the test's own, which it may kill."""
    server = SERVERS[request.param].start()
    yield server
    server.end()


class ArchiveRouter:
    """Sends the archive's tables to :attr:`alias`, and nothing else."""

    alias = "archive"

    def db_for_read(self, model: type[Any], **_: Any) -> str | None:
        return self.alias if model._meta.app_label == "django_amqp_events" else None

    def db_for_write(self, model: type[Any], instance: Any = None, **_: Any) -> str | None:
        if instance is not None and instance._state.db is not None:
            return None
        return self.db_for_read(model)

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool | None:
        return app_label == "django_amqp_events" if db == self.alias else None


class Replicas(ArchiveRouter):
    """The same, but reads go to a replica that lags behind: it has the tables and no rows."""

    def db_for_read(self, model: type[Any], **_: Any) -> str | None:
        return "default"

    def db_for_write(self, model: type[Any], instance: Any = None, **_: Any) -> str | None:
        return self.alias if model._meta.app_label == "django_amqp_events" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """Where the archive's tables are during a test.

    Attributes:
        kind: ``sqlite`` or one of :data:`SERVERS`.
        settings: its entry in DATABASES.
        path: of SQLite's file.
        server: ``None`` for SQLite.
    """

    kind: str
    settings: dict[str, Any]
    alias: str = ArchiveRouter.alias
    path: Path | None = None
    server: DatabaseServer | None = None

    @property
    def json(self) -> str:
        """The entry, for the environment of another process."""
        return json.dumps(self.settings)

    def close(self) -> None:
        """Close this thread's connection."""
        connections[self.alias].close()

    def waiting(self) -> int:
        """Return how many transactions of the server wait for a lock."""
        assert self.server is not None
        return int(self.server.execute(_WAITING[self.kind])[0][0])

    def migrate(self) -> None:
        call_command("migrate", database=self.alias, verbosity=0)


@contextmanager
def routed_by(*routers: Any) -> Iterator[None]:
    """Route models for a block.

    Not by override_settings: it would end before a test's `settings`, which would then put back
    the settings that it found, this router among them, and leave them to all tests behind.
    """
    with patch.dict(vars(router), routers=list(routers)):
        yield


@contextmanager
def archive_in(kind: str, settings: dict[str, Any], **more: Any) -> Iterator[Database]:
    """Route the archive's tables to this database for a block; *more* are fields of Database."""
    alias = ArchiveRouter.alias
    before = connections.databases.get(alias)
    connections.databases[alias] = connections.configure_settings(
        {**connections.databases, alias: settings}
    )[alias]
    try:
        with routed_by(ArchiveRouter()):
            yield Database(kind=kind, settings=settings, **more)
    finally:
        connections[alias].close()
        del connections[alias], connections.databases[alias]
        if before is not None:
            connections.databases[alias] = before


def sqlite_settings(path: Path) -> dict[str, Any]:
    """An entry of DATABASES. Transactions begin as Django has it, deferred: the harder case."""
    options = {"timeout": 20}
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path), "OPTIONS": options}


@contextmanager
def new_database(
    server: DatabaseServer, template: str = "", *, pooled: bool = False
) -> Iterator[dict[str, Any]]:
    """Create a database for a block; yield its entry of DATABASES."""
    name = server.borrow(template)
    yield server.settings(name)
    # PgBouncer may not have noticed yet that its connections have ended.
    (server.drop if pooled else server.give_back)(name)


@pytest.fixture(params=["sqlite", *slow(*SERVERS)])
def empty_database(
    request: pytest.FixtureRequest, servers: Servers, tmp_path: Path
) -> Iterator[dict[str, Any]]:
    """An entry of DATABASES for other processes; the database has no tables."""
    if request.param == "sqlite":
        yield sqlite_settings(tmp_path / "db.sqlite3")
    else:
        with new_database(servers[request.param]) as settings:
            yield settings


@pytest.fixture(scope="session")
def template_of(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory, django_db_blocker: Any
) -> Callable[[str], str]:
    """Return the file or name of a migrated database of a kind."""

    @cache
    def template(kind: str) -> str:
        if kind == "sqlite":
            name = str(tmp_path_factory.mktemp("sqlite") / "archive")
            settings = sqlite_settings(Path(name))
        else:
            name = "archive_template"
            servers[kind].create(name)
            settings = servers[kind].settings(name)
        with django_db_blocker.unblock(), archive_in(kind, settings) as database:
            database.migrate()
        return name

    return template


@pytest.fixture(params=KINDS)
def archive_database(
    request: pytest.FixtureRequest,
    servers: Servers,
    template_of: Callable[[str], str],
    tmp_path: Path,
    transactional_db: None,
    django_db_blocker: Any,
) -> Iterator[Database]:
    """The archive's tables in a database of this test's own; see the top of this module."""
    pooled = request.param == "pgbouncer"
    kind: str = "postgresql" if pooled else request.param
    with ExitStack() as stack:
        template = template_of(kind)
        stack.enter_context(django_db_blocker.unblock())
        if kind == "sqlite":
            path = tmp_path / "archive.sqlite3"
            shutil.copyfile(template, path)
            yield stack.enter_context(archive_in(kind, sqlite_settings(path), path=path))
        else:
            server = servers[kind]
            settings = stack.enter_context(new_database(server, template, pooled=pooled))
            if pooled:
                pool: PgBouncer = request.getfixturevalue("pgbouncer")
                settings = {**settings, "PORT": str(pool.port), "DISABLE_SERVER_SIDE_CURSORS": True}
            yield stack.enter_context(archive_in(kind, settings, server=server))
    for model in apps.get_app_config("django_amqp_events").get_models():
        assert not model._default_manager.using("default").exists(), f"{model} past the router"
