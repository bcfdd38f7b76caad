"""The service of test_story.py, its settings too: ``python -m django ... --settings`` this module.

Its handler reads what it needs to know from a file, so that a mistake can be mended while it runs,
and writes each order that it has invoiced into a ledger. STORY_DIR is where both are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHERE = Path(os.environ["STORY_DIR"])
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'"
)

SECRET_KEY = "not a secret: tests only"
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1"]
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.browser.billing_urls"
STATIC_URL = "/static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.admin",
    "django_amqp_events",
]
MIDDLEWARE = [
    "tests.browser.billing.with_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(WHERE / "db.sqlite3"),
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
    }
}
AMQP_EVENTS = {
    "SERVICE": "billing",
    "AUTODISCOVER": [],
    "CELERY_APP": "tests.browser.billing_urls.app",
    "CONFIRM_TIMEOUT": 20,
    "EDITING": True,
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
    rate(country)
    # One write to the end of a file is whole, whichever process does it.
    line = json.dumps({"order": order, "country": country, "pid": os.getpid()}) + "\n"
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
