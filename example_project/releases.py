"""The second release, which mends what made events of the first one fail for good.

A real release is other files. Here both are in these files, so that `make demo` can roll out the
second one half way: `EXAMPLE_RELEASE` says which a process runs, and each place that differs asks
:func:`mended`.
"""

from __future__ import annotations

from django.conf import settings

#: What release 2 changes, by handler.
NOTES = (
    ("orders.send_confirmation", "a line break in a name becomes a space in the mail's subject"),
    ("stock.reserve_stock", "what the shelves do not have is noted for the buyers"),
    ("invoices.issue_invoice", "rate for Croatia; who gives no valid VAT id pays VAT"),
    ("invoices.register_sale", "the new address of the Greek tax office"),
)


def mended() -> bool:
    """Whether this process runs release 2."""
    return bool(getattr(settings, "EXAMPLE_RELEASE", 1) >= 2)
