"""A service on a real broker, described as a user would, and a look behind the curtain.

Use::

    def test_it(service, fresh_vhost):
        billing = service(fresh_vhost, HANDLERS={"send_invoice": ["shop.order.created"]})
        billing.declare()
        billing.publish("events", "shop.order.created", b"…")
        billing.wait_for_ready("billing.send_invoice", 1)
        code, out, err = billing.command("events_status")

``service(vhost, **keys)`` takes the keys of AMQP_EVENTS. SERVICE is ``billing`` and MANAGEMENT_URL
that of the vhost unless given (``MANAGEMENT_URL=""`` for plain AMQP). A handler that is given as a
list of events gets a function that takes anything. The settings are in force until the test ends;
of several services, those of the last one, and `Service.active()` switches for a block.
`tests.celery_app.app` is the Celery app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import amqp
import pytest
from celery import Celery
from django.test import override_settings

from django_amqp_events import conf
from django_amqp_events.broker.provisioning import drift, inspection, startup
from django_amqp_events.broker.provisioning.management_api import ManagementApi
from django_amqp_events.broker.queue_depth import queue_depth
from django_amqp_events.broker.topology import Names, Topology, build
from django_amqp_events.declare.registry import Registry, get_registry
from tests import waiting
from tests.acceptance import harness
from tests.acceptance.conftest import pytest_runtest_makereport  # noqa: F401 - shows the logs
from tests.celery_app import app as celery_app
from tests.commands import run_command
from tests.conftest import Database, Vhost
from tests.definitions import definitions
from tests.services import handling
from tests.waiting import is_usable

from .wire import Wire, close_pools, drain, raw_connection

DEADLINE = 20.0
#: Of processes of the service.
HANDLERS = {
    "send_invoice": {"EVENTS": ["shop.order.created"], "HANDLER": "testproject.steps.perform"}
}

#: Makes each database give up a lock early.
SHORT_LOCKS = {
    "sqlite": "PRAGMA busy_timeout = 100",
    "postgresql": "SET lock_timeout = 100",
    "mysql": "SET innodb_lock_wait_timeout = 1",
}

wait_until = waiting.until


@dataclass
class Service:
    """One service's settings and topology on a vhost, and raw access to the broker."""

    vhost: Vhost
    raw: dict[str, Any]
    app: Celery
    settings: conf.Settings
    registry: Registry
    topology: Topology
    stack: ExitStack = field(repr=False)
    _connection: amqp.Connection | None = None
    _asked: amqp.Channel | None = None
    _publishing: amqp.Channel | None = None

    @property
    def names(self) -> Names:
        return self.topology.names

    @property
    def api(self) -> ManagementApi:
        return ManagementApi(self.vhost.management_url, vhost=self.vhost.name)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put this service's settings and vhost in force for a block."""
        before = self.app.conf.broker_url
        self.app.conf.broker_url = self.vhost.url
        try:
            with override_settings(AMQP_EVENTS=self.raw):
                yield
        finally:
            self.app.conf.broker_url = before

    # -- provisioning

    def inspect(self, *, exact: bool = True) -> drift.Report:
        with self.active():
            return inspection.inspect(
                self.app, self.settings, self.topology, api=self.api if exact else None
            )

    def declare(self) -> None:
        with self.active():
            startup.declare(self.app, self.settings, self.topology)

    def import_topology(self) -> None:
        """Declare the topology in an empty vhost, at a tenth of the cost for RabbitMQ."""
        path = f"/api/definitions/{self.vhost.path}"
        self.vhost.node.http("POST", path, definitions(self.topology))

    def command(self, name: str, *args: str, **options: Any) -> tuple[int, str, str]:
        """Run a management command; its exit code, stdout and stderr."""
        with self.active():
            return run_command(name, *args, **options)

    # -- raw AMQP

    def connect(self) -> amqp.Connection:
        """Open a connection of the test's own; it is closed with the test."""
        connection = raw_connection(self.vhost.url)
        self.stack.callback(connection.collect)
        return connection

    def channel(self) -> amqp.Channel:
        """Return a new channel; one that the broker closed is no loss."""
        if self._connection is None:
            self._connection = self.connect()
        return self._connection.channel()

    def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes = b"[[],{},{}]",
        headers: dict[str, Any] | None = None,
        **properties: Any,
    ) -> None:
        """Publish a raw message, confirmed, mandatory."""
        if self._publishing is None or not is_usable(self._publishing):
            self._publishing = self.channel()
            self._publishing.confirm_select()
        channel = self._publishing
        message = amqp.Message(
            body,
            application_headers=headers or {},
            **{"delivery_mode": 2, "content_type": "application/json", **properties},
        )
        returned: list[Any] = []
        channel.events["basic_return"] = {lambda *args: returned.append(args)}
        channel.basic_publish_confirm(message, exchange, routing_key, mandatory=True)
        assert not returned, f"unroutable: {exchange!r} {routing_key!r}"

    def ready(self, queue: str) -> int:
        if self._asked is None or not is_usable(self._asked):
            self._asked = self.channel()
        return queue_depth(self._asked, queue).ready

    def exists(self, queue: str) -> bool:
        try:
            self.ready(queue)
        except amqp.NotFound:
            return False
        return True

    def wait_for_ready(self, queue: str, count: int, deadline: float = DEADLINE) -> None:
        wait_until(lambda: self.ready(queue) == count, f"{count} ready in {queue}", deadline)

    def take(self, queue: str, deadline: float = DEADLINE) -> amqp.Message:
        """Get one message and ack it."""
        channel = self.channel()
        message = wait_until(lambda: channel.basic_get(queue), f"a message in {queue}", deadline)
        channel.basic_ack(message.delivery_tag)
        channel.close()
        return message

    def consume(self, queue: str, *, prefetch: int = 0) -> amqp.Channel:
        """Consume and never ack, until the channel is closed."""
        channel = self.channel()
        channel.basic_qos(0, prefetch, False)
        channel.basic_consume(queue, callback=lambda message: None)
        return channel

    def take_all(self, queue: str) -> list[amqp.Message]:
        channel = self.channel()
        messages = drain(channel, queue)
        channel.close()
        return messages

    def set_policy(self, name: str, pattern: str, definition: dict[str, Any], **more: Any) -> None:
        self.vhost.node.http(
            "PUT",
            f"/api/policies/{self.vhost.path}/{name}",
            {"pattern": pattern, "definition": definition, "apply-to": "all", **more},
        )


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Callable[..., Service]]:
    """Make services; see the top of this module."""
    if "archive_database" in request.fixturenames:
        # Settings are overridden like brackets: what is first put in force is the last to go.
        request.getfixturevalue("archive_database")
    before = celery_app.conf.broker_url
    with ExitStack() as stack:

        def make(vhost: Vhost, **keys: Any) -> Service:
            raw: dict[str, Any] = {
                "SERVICE": "billing",
                "MANAGEMENT_URL": vhost.management_url,
                "CELERY_APP": "tests.celery_app.app",
                "AUTODISCOVER": [],
                "HANDLERS": {},
                "PUBLISH": "immediate",
                **keys,
            }
            raw["HANDLERS"] = {
                name: handling(*options) if isinstance(options, list) else options
                for name, options in raw["HANDLERS"].items()
            }
            celery_app.conf.broker_url = vhost.url
            stack.enter_context(override_settings(AMQP_EVENTS=raw))
            settings = conf.get_settings()
            declared = get_registry()
            return Service(
                vhost=vhost,
                raw=raw,
                app=celery_app,
                settings=settings,
                registry=declared,
                topology=build(settings, declared),
                stack=stack,
            )

        yield make
    celery_app.conf.broker_url = before


@pytest.fixture
def billing(service: Callable[..., Service], fresh_vhost: Vhost) -> Iterator[Service]:
    """A service with one handler, declared; others of its name in modules are made otherwise."""
    made = service(fresh_vhost, HANDLERS={"send_invoice": ["shop.order.created"]})
    made.import_topology()
    close_pools()
    yield made
    close_pools()


@pytest.fixture
def processes(
    billing: Service, archive_database: Database, tmp_path: Path
) -> Iterator[harness.Service]:
    """The service for commands in processes of their own; if a test fails, it shows their logs."""
    before = len(harness.STARTED)
    yield harness.Service(
        url=billing.vhost.url,
        where=tmp_path,
        name="billing",
        handlers="steps",
        events={"TOPOLOGY": "verify", "HANDLERS": HANDLERS},
        environ={"TESTPROJECT_DATABASE": archive_database.json},
    )
    for worker in harness.STARTED[before:]:
        worker.kill()
    del harness.STARTED[before:]


@pytest.fixture
def wire(vhost: Vhost) -> Iterator[Wire]:
    with Wire.on(vhost.url) as made:
        yield made
