"""Where on a broker the demo happens, and how it is cleared away again."""

from __future__ import annotations

import http.client
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from amqp.exceptions import AMQPError

from . import accounting
from .accounting import ServiceTopology
from .processes import ROOT, DemoError

from broker import Broker, BrokerError, Node  # isort: skip - processes.py has its path
from machine import Process, free_ports, port_is_free  # isort: skip

RUN = ROOT / ".run" / "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A private node; or a vhost, or a prefix, on the broker that AMQP_URL names."""

    url: str
    management_url: str = ""
    prefix: str = ""
    vhost: str = ""
    node: Node | None = None

    @property
    def text(self) -> str:
        if self.node is not None:
            return f"RabbitMQ {self.node.version}, private"
        where = f"vhost {self.vhost}" if self.vhost else f"prefix {self.prefix}"
        return f"the one that AMQP_URL names, {where}"

    @classmethod
    def find(cls, *, keep: bool) -> Sandbox:
        """Start a private node, or make a place on the broker that AMQP_URL names.

        Raises:
            BrokerError, DemoError: there is no broker; with the remedies.
        """
        url, management = os.environ.get("AMQP_URL"), os.environ.get("AMQP_MANAGEMENT_URL", "")
        if not url:
            node = Node.start(RUN / "broker", die_with_parent=not keep)
            return cls(url=node.amqp_url(), management_url=node.management_url or "", node=node)
        name = f"demo-{secrets.token_hex(3)}"
        broker = Broker.from_urls(url, management or None)
        try:
            broker.add_vhost(name)
        except (OSError, BrokerError, http.client.HTTPException, ValueError):
            # Somebody else's broker, and no right to make a vhost on it.
            try:
                accounting.Queues(url).close()
            except (OSError, AMQPError) as exc:
                host = urlsplit(url).hostname
                raise DemoError(
                    f"no RabbitMQ answers where AMQP_URL says ({host}): {exc}. Remedy: correct "
                    f"AMQP_URL, or unset it, and the demo starts a node of its own"
                ) from exc
            return cls(url=url, management_url=management, prefix=f"{name}-")
        own = urlsplit(url)._replace(path=f"/{quote(name, safe='')}").geturl()
        return cls(url=own, management_url=broker.management_url or "", vhost=name)

    def processes(self) -> list[Process]:
        """Return the private node, its epmd and its guard."""
        return self.node.processes if self.node is not None else []

    def clear_away(self, shapes: Iterable[ServiceTopology]) -> None:
        """End the node, or take what the demo has made from somebody else's broker."""
        if self.node is not None:
            self.node.end()
        elif self.vhost:
            Broker.from_urls(self.url, self.management_url or None).delete_vhost(self.vhost)
        else:
            broker = accounting.Queues(self.url)
            try:
                for shape in shapes:
                    tasks = f"{self.prefix}tasks-{shape.service}"
                    broker.delete([*shape.queues, tasks], [*shape.exchanges, tasks])
            finally:
                broker.close()


def pick_ports(wanted: Sequence[int]) -> list[int]:
    """Return two ports for the web servers: those that are wanted, where they are free."""
    return [
        port if port and port_is_free(port) else free
        for port, free in zip(wanted or (0, 0), free_ports(2), strict=True)
    ]


def shown(path: Path) -> str:
    """Return a path as a person in the project's folder would write it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
