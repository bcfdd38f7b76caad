"""Read RabbitMQ's management API (HTTP).

Paths and fields: https://www.rabbitmq.com/docs/management#http-api, and ``/api/index.html`` of
any node. All changes are made over AMQP, where RabbitMQ checks the same permissions as for a
worker.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

from ...exceptions import TopologyError
from ..topology import Binding

_QUEUE_COLUMNS: Final = (
    "name,type,durable,auto_delete,exclusive,arguments,policy,operator_policy,"
    "effective_policy_definition,messages,messages_ready,messages_unacknowledged,consumers,"
    "message_stats,leader"
)

#: Most bytes that are read together.
_PIECE: Final = 65_536


class ManagementApiError(TopologyError):
    """The management API cannot be reached, refuses the user, or is that of another broker.

    Attributes:
        status: of the HTTP response; ``None`` without one.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ManagementApi:
    """The management API of one vhost.

    Args:
        url: ``http(s)://user:password@host:15672``, optionally with a path before ``/api``.
        vhost: its name, not encoded.
        timeout: seconds to connect to an address of the host, and for a whole response.
    """

    def __init__(self, url: str, *, vhost: str, timeout: float = 10.0) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ManagementApiError(
                f'AMQP_EVENTS["MANAGEMENT_URL"] is not valid: {exc}; use a URL such as '
                f"http://user:password@host:15672, with other characters of the password in "
                f"percent-encoding"
            ) from exc
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        #: Without user and password, for messages.
        self.address = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}".rstrip(
            "/"
        )
        self.user = unquote(parts.username or "guest")
        self.vhost = vhost
        self.timeout = timeout
        token = base64.b64encode(f"{self.user}:{unquote(parts.password or 'guest')}".encode())
        self._headers = {"Authorization": f"Basic {token.decode()}", "Accept": "application/json"}
        # No proxy, which would see the password.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def get(self, *path: str, **query: str) -> Any:
        """Return the decoded response of ``/api/<path>``.

        Raises:
            ManagementApiError: there is no response with status 200.
        """
        url = "/".join([self.address, "api", *(quote(part, safe="") for part in path)])
        if query:
            url += f"?{urlencode(query)}"
        request = urllib.request.Request(url, headers=self._headers)  # noqa: S310 - http(s) by conf
        try:
            end = time.monotonic() + self.timeout
            with self._opener.open(request, timeout=self.timeout) as response:
                body = bytearray()
                # Its time-out is for each read.
                while piece := response.read1(_PIECE):
                    body += piece
                    if time.monotonic() > end:
                        raise TimeoutError(f"no whole response within {self.timeout:g} s")
                if response.length:
                    raise http.client.IncompleteRead(bytes(body), response.length)
                return json.loads(body)
        except urllib.error.HTTPError as exc:
            with exc:
                raise self._refused(exc.code, "/".join(path)) from None
        except (OSError, http.client.HTTPException) as exc:
            reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
            raise ManagementApiError(
                f"RabbitMQ's management API at {self.address} does not answer: "
                f"{type(reason).__name__ if not isinstance(reason, str) else 'error'}: {reason}; "
                f'check AMQP_EVENTS["MANAGEMENT_URL"] (the default port is 15672), and that the '
                f"plugin rabbitmq_management is enabled"
            ) from exc
        except ValueError as exc:
            raise self._unexpected(path, "JSON") from exc

    def _unexpected(self, path: Sequence[str], expected: str) -> ManagementApiError:
        return ManagementApiError(
            f"{self.address} is not RabbitMQ's management API: the response to "
            f'/api/{"/".join(path)} is not {expected}; check AMQP_EVENTS["MANAGEMENT_URL"]'
        )

    def _refused(self, status: int, path: str) -> ManagementApiError:
        hints = {
            401: "check the password, and that the user has the tag 'monitoring' (rabbitmqctl "
            "set_user_tags) and may connect from this machine",
            403: "give the user the tag 'monitoring'",
            404: "check that MANAGEMENT_URL is that of the Celery app's broker",
        }
        return ManagementApiError(
            f"RabbitMQ's management API at {self.address} answered {path} with status {status} "
            f"(user {self.user!r}, vhost {self.vhost!r}); "
            f"{hints.get(status, 'check the log of the broker')}",
            status=status,
        )

    def check_cluster(self, server: Mapping[str, Any]) -> None:
        """Check that this is the API of the broker with these server properties.

        Raises:
            ManagementApiError: its cluster has another name.
        """
        overview = self.get("overview")
        if not isinstance(overview, dict):
            raise self._unexpected(["overview"], "an object")
        here, there = overview.get("cluster_name"), server.get("cluster_name")
        if here and there and here != there:
            raise ManagementApiError(
                f"the management API at {self.address} is that of cluster {here!r}, but the "
                f"Celery app is connected to cluster {there!r}; correct "
                f'AMQP_EVENTS["MANAGEMENT_URL"]'
            )

    def queues(self) -> list[dict[str, Any]]:
        """Return all queues of the vhost, with arguments, policies and depths."""
        return self._list("queues", self.vhost, columns=_QUEUE_COLUMNS)

    def queue(self, name: str) -> dict[str, Any] | None:
        """Return one queue, not from the API's cache; ``None`` if it does not exist."""
        with _ignore(404):
            answer = self.get("queues", self.vhost, name)
            return answer if isinstance(answer, dict) else None
        return None

    def exchanges(self) -> list[dict[str, Any]]:
        """Return all exchanges of the vhost."""
        return self._list("exchanges", self.vhost)

    def bindings(self) -> list[Binding]:
        """Return all bindings of queues, except those of the default exchange."""
        return [
            Binding(
                exchange=binding["source"],
                queue=binding["destination"],
                routing_key=binding["routing_key"],
                arguments=binding.get("arguments") or {},
            )
            for binding in self._list("bindings", self.vhost)
            if binding.get("source") and binding.get("destination_type") == "queue"
        ]

    def policies(self) -> Sequence[dict[str, Any]] | None:
        """Return policies and operator policies (``"operator": True``).

        ``None`` if this user may not see them.
        """
        with _ignore(401, 403):
            operator = self._list("operator-policies", self.vhost)
            return [
                *self._list("policies", self.vhost),
                *({**policy, "operator": True} for policy in operator),
            ]
        return None

    def alarms(self) -> list[str] | None:
        """Describe the current alarms, during which RabbitMQ blocks publishers.

        ``None`` if this user may not see them.
        """
        with _ignore(401, 403):
            return [
                f"{what} alarm on {node.get('name', 'a node')}"
                for node in self._list("nodes", columns="name,mem_alarm,disk_free_alarm")
                for key, what in (("mem_alarm", "memory"), ("disk_free_alarm", "disk"))
                if node.get(key)
            ]
        return None

    def _list(self, *path: str, **query: str) -> list[dict[str, Any]]:
        answer = self.get(*path, **query)
        if not isinstance(answer, list):
            raise self._unexpected(path, "a list")
        return answer


@contextmanager
def _ignore(*statuses: int) -> Iterator[None]:
    """Suppress the errors of responses with these statuses."""
    try:
        yield
    except ManagementApiError as exc:
        if exc.status not in statuses:
            raise


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, which could send the password to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
