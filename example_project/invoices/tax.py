"""Tax rates, VAT ids, and the tax offices, which are not always available."""

from __future__ import annotations

import re
import zlib
from decimal import Decimal

from example_project.releases import fixed

#: VAT in percent; a sale to a country with 0 is an export.
RATES = {
    "AE": 0, "AT": 20, "BE": 21, "CH": 0, "CZ": 21, "DE": 19, "DK": 25, "ES": 21, "FI": 24,
    "FR": 20, "GB": 20, "GR": 24, "IE": 23, "IL": 0, "IT": 22, "JP": 0, "NL": 21, "PL": 23,
    "PT": 23, "SE": 25, "US": 0,
}  # fmt: skip
#: Added in release 2.
NEW_RATES = {"HR": 25}
VAT_ID = {
    "AT": r"ATU\d{8}", "BE": r"BE[01]\d{9}", "DE": r"DE\d{9}", "DK": r"DK\d{8}",
    "ES": r"ES[A-Z]\d{8}", "FR": r"FR\d{11}", "GB": r"GB\d{9}", "IE": r"IE\d{7}[A-Z]{1,2}",
    "IT": r"IT\d{11}", "NL": r"NL\d{9}B\d{2}", "PL": r"PL\d{10}", "SE": r"SE\d{12}",
}  # fmt: skip


class TaxError(ValueError):
    """The order cannot be taxed: its data must be corrected."""


class TaxOfficeUnavailable(OSError):
    """The tax office is busy or does not answer; a retry may succeed."""


def rate(country: str, vat_id: str | None) -> Decimal:
    """Return the VAT rate for a customer.

    Raises:
        TaxError: unknown country, or, in release 1, an invalid VAT id.
    """
    rates = RATES | NEW_RATES if fixed() else RATES
    if country not in rates:
        raise TaxError(f"there is no tax rate for the country {country!r}")
    if vat_id:
        valid = re.fullmatch(VAT_ID.get(country, r"(?!)"), vat_id)
        if not valid and not fixed():
            raise TaxError(f"{vat_id!r} is not a VAT id of {country}")
        if valid and country != "DE":
            return Decimal(0)  # reverse charge: the customer pays the tax
    return Decimal(rates[country]) / 100


def report_sale(number: str, country: str, *, attempt: int) -> str:
    """Report a sale to the tax office of a country and return its receipt.

    The office is simulated and fails in the same way in every run: for three of twelve orders, the
    first one, two or three calls find it busy. The Greek office has moved; release 2 knows the new
    address.

    Raises:
        TaxOfficeUnavailable: try again.
    """
    if country == "GR" and not fixed():
        raise TaxOfficeUnavailable("503 the tax office of GR does not answer")
    busy = {0: 1, 1: 2, 2: 3}.get(zlib.crc32(number.encode()) % 12, 0)
    if attempt <= busy:
        raise TaxOfficeUnavailable(f"429 the tax office of {country} is busy (order {number})")
    return f"{country}-{zlib.crc32(f'receipt {number}'.encode()):08x}"
