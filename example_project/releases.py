"""The second release, which fixes the failures of the first one.

Both releases share these files, so that `make demo` can roll out the second one: `EXAMPLE_RELEASE`
selects one for a process, and the code that differs asks :func:`fixed`.
"""

from __future__ import annotations

from django.conf import settings

#: What release 2 changes, by handler.
NOTES = (
    ("orders.send_confirmation", "a line break in a customer's name becomes a space"),
    ("stock.reserve_stock", "missing stock becomes a back-order"),
    ("invoices.issue_invoice", "tax rate of Croatia; an invalid VAT id means that VAT is charged"),
    ("invoices.register_sale", "the new address of the Greek tax office"),
)


def fixed() -> bool:
    """Return True if this process runs release 2."""
    return bool(getattr(settings, "EXAMPLE_RELEASE", 1) >= 2)
