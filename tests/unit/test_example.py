"""The example project: its orders, its handlers, its settings; everything in processes of its own,

since a test process has one set of settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import ROOT, run_example
from tests.conftest import SLOW

ORDERS = ROOT / "example_project" / "orders.jsonl"


@pytest.mark.parametrize("settings", ["shop", "billing"])
def test_a_deployment_has_nothing_to_complain_about(settings: str, tmp_path: Path) -> None:
    command = ("-W", "error", "manage.py", "check", "--deploy", "--fail-level", "WARNING")
    run_example(*command, settings=settings, EXAMPLE_DATA=str(tmp_path))


DIRECT = """
import django; django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from example_project.orders.events import order_created
from django_amqp_events.testing import memory_events
"""


@pytest.mark.parametrize(
    ("release", "done", "failed"),
    [
        ("1", (291, 290), [("orders.send_confirmation", "failed")]
         + [("stock.reserve_stock", "failed")] * 2),
        pytest.param("2", (292, 292), [], marks=SLOW),
    ],
)  # fmt: skip
def test_orders_are_published_and_handled_in_memory(
    release: str, done: tuple[int, int], failed: list[tuple[str, str]], tmp_path: Path
) -> None:
    """place_orders on the in-memory broker: what the shop does with all 300 lines."""
    out = run_example(
        "-c",
        DIRECT
        + f"""
from io import StringIO
from example_project.orders.models import Confirmation, Order
from example_project.stock.models import Reservation
from example_project.audit.models import Entry
with memory_events() as broker:
    out = StringIO()
    call_command("place_orders", {str(ORDERS)!r}, format="json", stdout=out)
    broker.run()
    archived = sorted((a.handler, a.reason) for a in broker.archived)
print(out.getvalue().splitlines()[-1])
print(Order.objects.count(), Confirmation.objects.count(), Reservation.objects.count(),
      Entry.objects.count())
print(archived)
""",
        EXAMPLE_DATA=str(tmp_path),
        EXAMPLE_RELEASE=release,
    )
    last, counts, archived = out.splitlines()
    summary = json.loads(last)
    assert (summary["published"], summary["refused"], summary["unconfirmed"]) == (292, 8, 0)
    assert counts == f"292 {done[0]} {done[1]} {292 + summary['held']}"
    assert archived == str(failed)
