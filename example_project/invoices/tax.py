"""Tax rates, VAT ids, and the tax offices, which are not always in."""

from __future__ import annotations

import re
import zlib
from decimal import Decimal

from example_project.releases import mended

#: VAT in per cent; sales to countries with 0 here are exports.
RATES = {
    "AE": 0, "AT": 20, "BE": 21, "CH": 0, "CZ": 21, "DE": 19, "DK": 25, "ES": 21, "FI": 24,
    "FR": 20, "GB": 20, "GR": 24, "IE": 23, "IL": 0, "IT": 22, "JP": 0, "NL": 21, "PL": 23,
    "PT": 23, "SE": 25, "US": 0,
}  # fmt: skip
#: Joined in release 2.
NEW_RATES = {"HR": 25}
VAT_ID = {
    "AT": r"ATU\d{8}", "BE": r"BE[01]\d{9}", "DE": r"DE\d{9}", "DK": r"DK\d{8}",
    "ES": r"ES[A-Z]\d{8}", "FR": r"FR\d{11}", "GB": r"GB\d{9}", "IE": r"IE\d{7}[A-Z]{1,2}",
    "IT": r"IT\d{11}", "NL": r"NL\d{9}B\d{2}", "PL": r"PL\d{10}", "SE": r"SE\d{12}",
}  # fmt: skip


class TaxError(ValueError):
    """The order cannot be taxed as it is; somebody has to correct it."""


class TaxOfficeUnavailable(OSError):
    """No answer, or a busy one; it may be better in a second."""


def rate(country: str, vat_id: str | None) -> Decimal:
    """Return the VAT rate for a customer.

    Raises:
        TaxError: unknown country; in release 1 a VAT id that cannot be one, too.
    """
    rates = RATES | NEW_RATES if mended() else RATES
    if country not in rates:
        raise TaxError(f"there is no tax rate for the country {country!r}")
    if vat_id:
        valid = re.fullmatch(VAT_ID.get(country, r"(?!)"), vat_id)
        if not valid and not mended():
            raise TaxError(f"{vat_id!r} is no VAT id of {country}")
        if valid and country != "DE":
            return Decimal(0)  # reverse charge: the customer pays it
    return Decimal(rates[country]) / 100


def report_sale(number: str, country: str, *, attempt: int) -> str:
    """Report a sale to the tax office of a country; returns its receipt.

    It is simulated, and fails in the same way every time the demo runs: for three orders in twelve
    the first one, two or three calls find it busy. The Greek office has moved; release 1 calls it
    where it was, release 2 has the new address.

    Raises:
        TaxOfficeUnavailable: try again.
    """
    if country == "GR" and not mended():
        raise TaxOfficeUnavailable("503 the office of GR does not answer")
    busy = {0: 1, 1: 2, 2: 3}.get(zlib.crc32(number.encode()) % 12, 0)
    if attempt <= busy:
        raise TaxOfficeUnavailable(f"429 the office of {country} is busy (order {number})")
    return f"{country}-{zlib.crc32(f'receipt {number}'.encode()):08x}"
