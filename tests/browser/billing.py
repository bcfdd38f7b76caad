"""The service of test_story.py, its settings too: ``python -m django ... --settings`` this module.

Its handler reads what it needs to know from a file, so that a mistake can be fixed while it runs,
and writes each order that it has invoiced into a ledger. STORY_DIR is where both are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.web_settings import *  # noqa: F403 - it is a settings module
from tests.web_settings import MIDDLEWARE, POLICY, sqlite

WHERE = Path(os.environ["STORY_DIR"])
DEBUG = False
ROOT_URLCONF = "tests.browser.billing_urls"
MIDDLEWARE = ["tests.browser.billing.with_policy", *MIDDLEWARE]
DATABASES = {"default": sqlite(str(WHERE / "db.sqlite3"))}
AMQP_EVENTS = {
    "SERVICE": "billing",
    "AUTODISCOVER": [],
    "CELERY_APP": "tests.browser.billing_urls.app",
    "CONFIRM_TIMEOUT": 20,
    "EDITING": True,
    "HISTORY": {"MAX_AGE": "1d"},
    "HANDLERS": {
        "invoice": {
            "EVENTS": ["shop.order.*"],
            "HANDLER": "tests.browser.billing.invoice",
            "MAX_RETRIES": 1,
            "RETRY_BACKOFF": 1,
        }
    },
}


class TaxError(Exception):
    """Nobody has written down the rate."""


class CountryError(Exception):
    """There is no such country."""


def invoice(order: int, country: str, customer: str | None = None) -> None:
    """Invoice an order."""
    if customer is None:
        raise KeyError("customer")
    check(country)
    written = {"order": order, "country": country, "rate": rate(country)}
    # One write to the end of a file is whole, whichever process does it.
    line = json.dumps(written) + "\n"
    with (WHERE / "ledger.jsonl").open("ab", buffering=0) as ledger:
        ledger.write(line.encode())


def check(country: str) -> None:
    if not country.isalpha():
        raise CountryError(f"{country!r} is no country")


def rate(country: str) -> int:
    rates: dict[str, int] = json.loads((WHERE / "rates.json").read_text())
    if country not in rates:
        raise TaxError(f"there is no tax rate for {country!r}")
    return rates[country]


def with_policy(get_response: Callable[..., Any]) -> Callable[..., Any]:
    def middleware(request):
        response = get_response(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response

    return middleware
