"""The example project: its orders, its handlers, its settings; everything in processes of its own,

since a test process has one set of settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import ROOT, run_example
from tests.conftest import SLOW

ORDERS = ROOT / "example_project" / "orders.jsonl"


def test_generated_orders_are_reproducible(tmp_path: Path) -> None:
    written = run_example("-m", "example_project.make_orders", EXAMPLE_DATA=str(tmp_path))
    assert written == ORDERS.read_text()


def test_generated_orders_contain_realistic_faults() -> None:
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


TAXES = """
import django; django.setup()
from example_project.invoices.tax import rate, report_sale
for call in (lambda: rate("HR", None), lambda: rate("DE", "DE 12 345"),
             lambda: rate("PL", "unknown"), lambda: report_sale("S-1", "GR", attempt=9),
             lambda: rate("XX", None), lambda: rate("FR", "FR00004711000")):
    try:
        print(call())
    except (OSError, ValueError) as exc:
        print(type(exc).__name__)
"""


def test_release_2_handles_the_failed_orders(tmp_path: Path) -> None:
    first = run_example("-c", TAXES, settings="billing", EXAMPLE_DATA=str(tmp_path)).split()
    assert first == [*["TaxError"] * 3, "TaxOfficeUnavailable", "TaxError", "0"]
    second = run_example(
        "-c", TAXES, settings="billing", EXAMPLE_DATA=str(tmp_path), EXAMPLE_RELEASE="2"
    ).split()
    assert second[:3] == ["0.25", "0.19", "0.23"]
    assert second[3].startswith("GR-")
    assert second[4:] == ["TaxError", "0"]


def test_a_repeated_order_changes_nothing(tmp_path: Path) -> None:
    out = run_example(
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
        EXAMPLE_DATA=str(tmp_path),
    )
    assert out.strip() == "True"


ACCOUNT = """
from datetime import datetime, UTC
from types import SimpleNamespace as Fake
from example_project.demo.accounting import Archived, Attempt, ServiceTopology, account

now = datetime.now(UTC)
shape = ServiceTopology(service="shop", prefix="", events="events", exchanges=[],
              queues={"shop.a": "handler", "shop:archive": "archive", "shop:delay.1s": "delay"},
              bindings=[("order.*", "shop.a")])

def attempt(event_id):
    return Attempt(handler="a", event_id=event_id, attempt=1, state="SUCCESS", exception="",
                   due_at=None, began_at=now, ended_at=now)

def archived(event_id, state):
    return Archived(event="order.made", event_id=event_id, handler="a", reason="failed",
                    exception="", attempts=1, line="", subject="", state=state)

def found(handled, in_archive, depths, state=""):
    ledger = Fake(published=lambda: [(str(n), "order.made") for n in range(4)],
                  attempts=lambda: [attempt(i) for i in handled])
    kept = [archived(i, state) for i in in_archive]
    return account([shape], {"shop": ledger}, depths, {"shop": kept})
"""


def test_missing_events_count_as_lost(tmp_path: Path) -> None:
    out = run_example(
        "-c",
        ACCOUNT
        + """
def lost(*arguments):
    result = found(*arguments)
    return result.lost, result.waiting, result.total('doubled')

print(lost("012", "3", {}), lost("012", "", {}), lost("0012", "", {}), lost("01", "3", {}),
      lost("012", "", {"shop.a": 1}), lost("01", "", {"shop:delay.1s": 1}))
""",
        EXAMPLE_DATA=str(tmp_path),
    )
    assert out.strip() == "(0, 0, 0) (1, 0, 0) (1, 0, 1) (1, 0, 0) (0, 1, 0) (1, 1, 0)"


def test_the_archive_is_not_believed_that_a_replay_was_handled(tmp_path: Path) -> None:
    out = run_example(
        "-c",
        ACCOUNT
        + """
def lost(*arguments):
    result = found(*arguments)
    archived, discarded = result.total("archived"), result.total("discarded")
    return result.lost, archived, discarded, sum(result.open.values())

print(lost("012", "3", {}, "archived"), lost("012", "3", {}, "replaying"),
      lost("012", "3", {}, "succeeded"), lost("0123", "3", {}, "succeeded"),
      lost("012", "3", {}, "discarded"), lost("0123", "3", {}, "replaying"))
""",
        EXAMPLE_DATA=str(tmp_path),
    )
    open_, going, claimed, handled, discarded, unheard = out.strip().removesuffix(")").split(") ")
    assert open_ == going == "(0, 1, 0, 1"
    assert claimed == "(1, 0, 0, 0"
    assert handled == "(0, 0, 0, 0"
    assert discarded == "(0, 0, 1, 0"
    # Handled, but open in the archive: nothing is lost, but an action is left.
    assert unheard == "(0, 0, 0, 1"
