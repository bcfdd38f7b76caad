"""``events_declare`` on a real broker: what it prints, what it does, how it exits."""

from __future__ import annotations

import pytest

HANDLERS = {
    "send_invoice": {
        "EVENTS": ["shop.order.created", "shop.refund.*"],
        "HANDLER": "tests.integration.handlers.handle",
        "MAX_RETRIES": 5,
        "RETRY_BACKOFF": 30,
        "RETRY_BACKOFF_MAX": 300,
    },
    "book": ["shop.#"],
}


@pytest.fixture
def billing(service, fresh_vhost):
    return service(fresh_vhost, HANDLERS=HANDLERS)


def test_declares_then_finds_nothing_to_do(billing):
    code, out, err = billing.command("events_declare")
    assert (code, err) == (0, "")
    assert "billing.send_invoice" in out
    assert "shop.order.created, shop.refund.*" in out
    assert "30 s, 60 s, 120 s … 300 s, total 12 min 30 s; max 5 retries" in out
    assert "1 s, 2 s, 4 s … 512 s, total 17 min 3 s; max 10 retries" in out
    assert billing.command("events_declare", "--check")[0] == 0
    code, out, err = billing.command("events_declare")
    assert code == 0
    assert "nothing to do: identical" in out
