"""Connections to RabbitMQ and its management API; the integration suite opens them."""

from __future__ import annotations

import pytest

from django_amqp_events.broker.provisioning.management_api import ManagementApi, ManagementApiError


@pytest.mark.parametrize(
    "url",
    ["http://[::1:15672", "http://u:pa[ss@rabbit:15672", "http://u:p/w@rabbit", "http://a\u2100"],
)
def test_a_url_of_the_management_api_that_cannot_be_read(url: str) -> None:
    with pytest.raises(ManagementApiError, match="MANAGEMENT_URL"):
        ManagementApi(url, vhost="/")


def test_a_management_api_that_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ManagementApi, "get", lambda *_: [])
    with pytest.raises(ManagementApiError, match="/api/overview is not an object"):
        ManagementApi("http://rabbit:15672", vhost="/").check_cluster({})
