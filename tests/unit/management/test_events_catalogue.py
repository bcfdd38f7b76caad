"""events_catalogue: its document, and --check with its exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from tests.commands import run_command

HERE = __name__
PLACE = "events/billing.invoice.issued/payload/properties"
EVENTS: dict[str, Any] = {
    "SERVICE": "billing",
    "AUTODISCOVER": [],
    "EVENTS": {
        "billing.invoice.issued": {
            "CONTRACT": f"{HERE}.invoice_issued",
        },
        "billing.invoice.paid": {},
    },
    "HANDLERS": {
        "book": {
            "EVENTS": ["shop.#"],
            "HANDLER": f"{HERE}.book",
            "MAX_RETRIES": 2,
            "ONCE": True,
            "TIME_LIMIT": 30,
        }
    },
}


def invoice_issued(order_id: int, total: str, currency: str = "EUR") -> None:
    """An invoice has its number.

    It is mailed afterwards.
    """


def invoice_issued_2(order_id: int, currency: str = "EUR", note: str = "") -> None: ...


def book(order_id: int, **more: Any) -> None:
    """Book it."""


@pytest.fixture(autouse=True)
def service() -> Iterator[None]:
    with override_settings(AMQP_EVENTS=EVENTS):
        yield


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    code, out, _ = run_command("events_catalogue")
    assert code == 0
    path = tmp_path / "saved.json"
    path.write_text(out)
    return path


def with_contract(name: str) -> Any:
    contract = {"CONTRACT": f"{HERE}.{name}"}
    events = {**EVENTS["EVENTS"], "billing.invoice.issued": contract}
    return override_settings(AMQP_EVENTS={**EVENTS, "EVENTS": events})


def test_no_change(saved: Path) -> None:
    assert run_command("events_catalogue", "--check", str(saved)) == (0, "no changes\n", "")


def test_incompatible_changes(saved: Path) -> None:
    with with_contract("invoice_issued_2"):
        code, out, _ = run_command("events_catalogue", "--check", str(saved), no_color=True)
        assert code == 1
        assert out == (
            f'incompatible: {PLACE}/total was removed: {{"type": "string"}}\n'
            f'compatible: {PLACE}/note is new: {{"type": "string", "optional": true}}\n'
        )
        code, out, _ = run_command("events_catalogue", "--check", str(saved), "--format", "json")
    text = {"type": "string"}
    assert (code, json.loads(out)) == (
        1,
        {
            "version": 1,
            "exit_code": 1,
            "result": "incompatible",
            "changes": [
                {"path": f"{PLACE}/total", "old": text, "new": None, "compatible": False},
                {
                    "path": f"{PLACE}/note",
                    "old": None,
                    "new": {**text, "optional": True},
                    "compatible": True,
                },
            ],
        },
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "cannot be compared"),
        (b"\xff\xfe\x00", "cannot be compared"),
        (b'{"openapi": "3.0.0", "info": {"title": "another tool"}}', "cannot be compared"),
        (b"[" * 100_000, "cannot be compared"),
    ],
)
def test_what_cannot_be_compared_exits_with_2(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved.json"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run_command("events_catalogue", "--check", str(path))
    assert (code, out) == (2, "")
    assert reason in err
    assert len(err.splitlines()) == 1


def test_wrong_settings_exit_with_2() -> None:
    with override_settings(AMQP_EVENTS={**EVENTS, "HANDLERS": {"book": {}}}):
        code, _, err = run_command("events_catalogue")
    assert (code, "has no 'HANDLER'" in err) == (2, True)
