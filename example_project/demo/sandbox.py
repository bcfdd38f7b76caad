"""The part of a broker that the demo uses and cleans up."""

from __future__ import annotations

import http.client
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from amqp.exceptions import AMQPError

from .accounting import Queues, ServiceTopology
from .processes import RUN, DemoError

from broker import Broker, BrokerError, Node  # isort: skip - processes.py adds its path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A private node, or a vhost or a prefix on the broker of AMQP_URL."""

    url: str
    management_url: str = ""
    prefix: str = ""
    vhost: str = ""
    node: Node | None = None

    def __str__(self) -> str:
        if self.node is not None:
            return f"RabbitMQ {self.node.version}, a private node"
        return f"AMQP_URL, {f'vhost {self.vhost}' if self.vhost else f'prefix {self.prefix}'}"

    @classmethod
    def create(cls, *, keep: bool) -> Sandbox:
        """Start a private node, or use the broker of AMQP_URL.

        Raises:
            BrokerError, DemoError: there is no broker; the message names the remedies.
        """
        url, management = os.environ.get("AMQP_URL"), os.environ.get("AMQP_MANAGEMENT_URL", "")
        if not url:
            node = Node.start(RUN / "broker", die_with_parent=not keep)
            return cls(url=node.amqp_url(), management_url=node.management_url, node=node)
        name = f"demo-{secrets.token_hex(3)}"
        broker = Broker.from_urls(url, management or None)
        try:
            broker.add_vhost(name)
        except (OSError, BrokerError, http.client.HTTPException, ValueError):
            # No permission to create a vhost: a prefix will do if AMQP answers.
            try:
                Queues(url).close()
            except (OSError, AMQPError) as exc:
                raise DemoError(
                    f"No RabbitMQ answers at AMQP_URL ({urlsplit(url).hostname}): {exc}. "
                    "Correct AMQP_URL, or unset it to start a private node."
                ) from exc
            return cls(url=url, management_url=management, prefix=f"{name}-")
        own = urlsplit(url)._replace(path=f"/{quote(name, safe='')}").geturl()
        return cls(url=own, management_url=broker.management_url, vhost=name)

    def clean_up(self, topologies: Iterable[ServiceTopology]) -> None:
        """End the node, or delete what the demo has declared."""
        if self.node is not None:
            self.node.end()
        elif self.vhost:
            Broker.from_urls(self.url, self.management_url or None).delete_vhost(self.vhost)
        else:
            queues = Queues(self.url)
            try:
                for each in topologies:
                    tasks = f"{self.prefix}tasks-{each.service}"
                    queues.delete([*each.queues, tasks], [*each.exchanges, tasks])
            finally:
                queues.close()
