"""The example project: its orders, its handlers, its settings; everything in processes of its own,

since a test process has one set of settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDERS = ROOT / "example_project" / "orders.jsonl"


def python(*arguments: str, data: Path, settings: str = "shop", **env: str) -> str:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("AMQP_", "DJANGO_", "EXAMPLE_"))
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=kept
        | {"DJANGO_SETTINGS_MODULE": f"example_project.{settings}", "EXAMPLE_DATA": str(data)}
        | env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_orders_are_what_the_generator_writes(tmp_path: Path) -> None:
    written = python("-m", "example_project.make_orders", data=tmp_path)
    assert written == ORDERS.read_text()


def test_the_orders_are_broken_as_real_ones_are() -> None:
    lines = ORDERS.read_text().splitlines()
    assert len(lines) == 300
    orders, unreadable = [], 0
    for line in lines:
        try:
            orders.append(json.loads(line))
        except ValueError:
            unreadable += 1
    assert unreadable == 2
    numbers = [order["number"] for order in orders]
    assert len(numbers) - len(set(numbers)) == 1
    assert any("email" not in order["customer"] for order in orders)
    assert any(order["total"].startswith("-") for order in orders)
    assert any("," in order["total"] for order in orders)
    assert any("\u202e" in order["customer"]["name"] for order in orders)
    assert any("\u0590" < char < "\u06ff" for order in orders for char in order["customer"]["name"])
    assert len({order["currency"] for order in orders if "currency" in order}) >= 8


@pytest.mark.parametrize("settings", ["shop", "billing"])
def test_a_deployment_has_nothing_to_complain_about(settings: str, tmp_path: Path) -> None:
    command = ("-W", "error", "manage.py", "check", "--deploy", "--fail-level", "WARNING")
    python(*command, settings=settings, data=tmp_path)


DIRECT = """
import django; django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from example_project.orders.events import order_created
from django_amqp_events.testing import memory_events
"""


def test_orders_are_published_and_handled_in_memory(tmp_path: Path) -> None:
    """place_orders on the in-memory broker: what the shop does with all 300 lines."""
    out = python(
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
        data=tmp_path,
    )
    done, counts, archived = out.splitlines()
    summary = json.loads(done)
    assert (summary["published"], summary["refused"], summary["unconfirmed"]) == (292, 8, 0)
    assert counts == f"292 291 290 {292 + summary['held']}"
    assert archived == str(
        [("orders.send_confirmation", "failed")] + [("stock.reserve_stock", "failed")] * 2
    )


def test_a_repeated_order_changes_nothing(tmp_path: Path) -> None:
    out = python(
        "-c",
        DIRECT
        + f"""
import json
from example_project.stock.handlers import reserve_stock
from example_project.stock.models import Product
order = json.loads(open({str(ORDERS)!r}).readline())
def left():
    return sum(Product.objects.values_list("available", flat=True))
before = left()
for _ in range(2):
    reserve_stock(order["number"], order["lines"])
print(before - left() == sum(line["quantity"] for line in order["lines"]))
""",
        data=tmp_path,
    )
    assert out.strip() == "True"


ACCOUNT = """
from datetime import datetime, UTC
from types import SimpleNamespace as Fake
from example_project.demo.evidence import Archived, Attempt, Shape, account

now = datetime.now(UTC)
shape = Shape(service="shop", prefix="", events="events", exchanges=[],
              queues={"shop.a": "handler", "shop:archive": "archive", "shop:delay.1s": "delay"},
              bindings=[("order.*", "shop.a")])

def attempt(event_id):
    return Attempt(handler="a", event_id=event_id, attempt=1, state="SUCCESS", exception="",
                   due_at=None, began_at=now, ended_at=now)

def archived(event_id):
    return Archived(event="order.made", event_id=event_id, handler="a", reason="failed",
                    exception="", attempts=1, line="", subject="")

def lost(handled, in_archive, depths):
    ledger = Fake(published=lambda: [(str(n), "order.made") for n in range(4)],
                  attempts=lambda: [attempt(i) for i in handled])
    found = account([shape], {"shop": ledger}, depths, {"shop": [archived(i) for i in in_archive]})
    return found.lost, found.waiting, found.doubled

print(lost("012", "3", {}), lost("012", "", {}), lost("0012", "", {}), lost("01", "3", {}),
      lost("012", "", {"shop.a": 1}), lost("01", "", {"shop:delay.1s": 1}))
"""


def test_what_is_nowhere_counts_as_lost_and_a_double_hides_nothing(tmp_path: Path) -> None:
    out = python("-c", ACCOUNT, data=tmp_path)
    assert out.strip() == "(0, 0, 0) (1, 0, 0) (1, 0, 1) (1, 0, 0) (0, 1, 0) (1, 1, 0)"
