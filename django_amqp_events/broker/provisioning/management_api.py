"""Read RabbitMQ's management API (HTTP).

Paths and fields: https://www.rabbitmq.com/docs/management#http-api, and ``/api/index.html`` of
any node. Everything is read; what is changed is changed over AMQP, where RabbitMQ checks the same
permissions as for a worker.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

from ...exceptions import TopologyError

_DECLARED_COLUMNS: Final = "name,type,durable,auto_delete,exclusive,arguments"
_QUEUE_COLUMNS: Final = (
    f"{_DECLARED_COLUMNS},policy,operator_policy,"
    "effective_policy_definition,messages,messages_ready,messages_unacknowledged,consumers,"
    "message_stats"
)


class ManagementApiError(TopologyError):
    """The management API cannot be reached, refuses the user, or is that of another broker.

    Attributes:
        status: of the HTTP answer; ``None`` where there was none.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ManagementApi:
    """The management API of one vhost.

    Args:
        url: ``http(s)://user:password@host:15672``, a path before ``/api`` allowed.
        vhost: its name, not encoded.
        timeout: seconds to connect and for each read.
    """

    def __init__(self, url: str, *, vhost: str, timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as exc:
            raise ManagementApiError(
                f'the port in AMQP_EVENTS["MANAGEMENT_URL"] is no number: {exc}; it is a URL such '
                f"as http://user:password@host:15672"
            ) from exc
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        #: Without user and password: for messages.
        self.address = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}".rstrip(
            "/"
        )
        self.user = unquote(parts.username or "guest")
        self.vhost = vhost
        self.timeout = timeout
        token = base64.b64encode(f"{self.user}:{unquote(parts.password or 'guest')}".encode())
        self._headers = {"Authorization": f"Basic {token.decode()}", "Accept": "application/json"}
        # No proxy: the password is not for one, and the broker's network is the application's.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def get(self, *path: str, **query: str) -> Any:
        """Return the decoded answer of ``/api/<path>``.

        Raises:
            ManagementApiError: no answer, or none with status 200.
        """
        url = "/".join([self.address, "api", *(quote(part, safe="") for part in path)])
        if query:
            url += f"?{urlencode(query)}"
        request = urllib.request.Request(url, headers=self._headers)  # noqa: S310 - http(s) by conf
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as exc:
            with exc:
                raise self._refused(exc.code, "/".join(path)) from None
        except (OSError, http.client.HTTPException) as exc:
            reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
            raise ManagementApiError(
                f"RabbitMQ's management API at {self.address} does not answer: "
                f"{type(reason).__name__ if not isinstance(reason, str) else 'error'}: {reason}; "
                f'check AMQP_EVENTS["MANAGEMENT_URL"] (its port is 15672 by default, and not that '
                f"of AMQP), and that the broker has the plugin rabbitmq_management enabled"
            ) from exc
        except ValueError as exc:
            raise ManagementApiError(
                f"what answers at {self.address} is not RabbitMQ's management API: its answer to "
                f'/api/{"/".join(path)} is no JSON; check AMQP_EVENTS["MANAGEMENT_URL"]'
            ) from exc

    def _refused(self, status: int, path: str) -> ManagementApiError:
        if status == 401:
            what = (
                f"refused user {self.user!r} ({path}): user or password is wrong, or the user "
                f"lacks the tag 'management', or may log in from localhost only; give it the tag "
                f"(rabbitmqctl set_user_tags {self.user} monitoring)"
            )
        elif status == 403:
            what = f"does not let user {self.user!r} read {path}; give it the tag 'monitoring'"
        elif status == 404:
            what = (
                f"has no {path}: check that MANAGEMENT_URL belongs to the broker of the Celery "
                f"app, which uses vhost {self.vhost!r}"
            )
        else:
            what = f"answered {path} with status {status}; look at the broker's log"
        return ManagementApiError(
            f"RabbitMQ's management API at {self.address} {what}", status=status
        )

    def check_cluster(self, server: Mapping[str, Any]) -> None:
        """Make sure that this is the API of the broker with these server properties.

        Raises:
            ManagementApiError: its cluster has another name.
        """
        here, there = self.get("overview").get("cluster_name"), server.get("cluster_name")
        if here and there and here != there:
            raise ManagementApiError(
                f"the management API at {self.address} is that of cluster {here!r}, but the "
                f"Celery app is connected to cluster {there!r}; correct "
                f'AMQP_EVENTS["MANAGEMENT_URL"]'
            )

    def queues(self) -> list[dict[str, Any]]:
        """Return all queues of the vhost, with arguments, policies and depths."""
        return self._list("queues", self.vhost, columns=_QUEUE_COLUMNS)

    def declared_queues(self) -> list[dict[str, Any]]:
        """Return all queues of the vhost as they were declared, without policies and depths.

        A quarter of the broker's work for :meth:`queues`; before 3.8.10 it is the same.
        """
        return self._list("queues", self.vhost, columns=_DECLARED_COLUMNS, disable_stats="true")

    def queue(self, name: str) -> dict[str, Any] | None:
        """Return one queue, not from the API's cache; ``None`` where it does not exist."""
        try:
            found = self.get("queues", self.vhost, name)
        except ManagementApiError as exc:
            if exc.status == 404:
                return None
            raise
        return found if isinstance(found, dict) else None

    def exchanges(self) -> list[dict[str, Any]]:
        """Return all exchanges of the vhost."""
        return self._list("exchanges", self.vhost)

    def bindings(self) -> list[dict[str, Any]]:
        """Return all bindings of the vhost."""
        return self._list("bindings", self.vhost)

    def bindings_of(self, queue: str) -> list[dict[str, Any]]:
        """Return the bindings of one queue, without that of the default exchange."""
        try:
            found = self._list("queues", self.vhost, queue, "bindings")
        except ManagementApiError as exc:
            if exc.status == 404:
                return []
            raise
        return [binding for binding in found if binding.get("source")]

    def policies(self) -> Sequence[dict[str, Any]] | None:
        """Return policies and operator policies (``"operator": True``).

        ``None`` where this user may not see them.
        """
        try:
            policies = self._list("policies", self.vhost)
            operator = self._list("operator-policies", self.vhost)
        except ManagementApiError as exc:
            if exc.status in (401, 403):
                return None
            raise
        return [*policies, *({**policy, "operator": True} for policy in operator)]

    def feature_flags(self) -> dict[str, str] | None:
        """Return the state of each feature flag; ``None`` where this user may not see them."""
        try:
            return {flag["name"]: flag["state"] for flag in self._list("feature-flags")}
        except ManagementApiError as exc:
            if exc.status in (401, 403):
                return None
            raise

    def alarms(self) -> list[str] | None:
        """Return the alarms in force, for which the broker blocks publishers; one text each.

        ``None`` where this user may not see them.
        """
        try:
            nodes = self._list("nodes", columns="name,mem_alarm,disk_free_alarm")
        except ManagementApiError as exc:
            if exc.status in (401, 403):
                return None
            raise
        return [
            f"{what} alarm on {node.get('name', 'a node')}"
            for node in nodes
            for key, what in (("mem_alarm", "memory"), ("disk_free_alarm", "disk"))
            if node.get(key)
        ]

    def _list(self, *path: str, **query: str) -> list[dict[str, Any]]:
        found = self.get(*path, **query)
        if not isinstance(found, list):
            raise ManagementApiError(
                f"what answers at {self.address} is not RabbitMQ's management API: "
                f'/api/{"/".join(path)} is no list; check AMQP_EVENTS["MANAGEMENT_URL"]'
            )
        return found


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the password to wherever it points."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
