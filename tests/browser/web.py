"""A project with the console, for a browser: ``python -m tests.browser.web PORT`` fills an empty
database (CONSOLE_DATABASE, a file), prints the pages' addresses as a line of JSON, and serves.

CONSOLE_BROKER is a vhost of its own. CONSOLE_SITE is ``admin``, or ``unfold``, where that is among
the apps.

Every page has the policy of docs/admin-site.md, but with unfold, whose own pages break it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import django
from celery import Celery
from django.conf import settings

from tests.services import handling
from tests.web_settings import (
    INSTALLED_APPS,
    POLICY,
    WEB,
    sqlite,
)

SITE = os.environ.get("CONSOLE_SITE", "admin")

app = Celery("console", broker=os.environ["CONSOLE_BROKER"], set_as_current=False)
app.conf.update(accept_content=["json"], task_serializer="json", broker_connection_retry=False)


def configure() -> None:
    settings.configure(
        **WEB
        | {
            "ROOT_URLCONF": "tests.browser.urls",
            "MESSAGE_STORAGE": "django.contrib.messages.storage.session.SessionStorage",
            "INSTALLED_APPS": [*["unfold"] * (SITE == "unfold"), *INSTALLED_APPS],
            "DATABASES": {"default": sqlite(os.environ["CONSOLE_DATABASE"])},
        },
        AMQP_EVENTS={
            "SERVICE": "billing",
            "AUTODISCOVER": [],
            "CELERY_APP": "tests.browser.web.app",
            "CONFIRM_TIMEOUT": 20,
            "EDITING": True,
            "MANAGEMENT_URL": os.environ["CONSOLE_MANAGEMENT"],
            "EVENTS": {
                "shop.order.created": {"SEARCH": ["order_id", "lines.sku"]},
                "shop.order.paid": {"SEARCH": ["order_id"]},
                "billing.invoice.issued": {},
            },
            "HANDLERS": {name: handling("shop.order.*") for name in ("send_invoice", "book")},
        },
    )
    django.setup()


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its own name
        pass


def server(port: int) -> WSGIServer:
    """Listen; the project and its static files are served under the policy."""
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.wsgi import get_wsgi_application

    project = StaticFilesHandler(get_wsgi_application())

    def application(environ: dict[str, Any], start: Any) -> Any:
        def with_policy(status: str, headers: list[Any], *more: Any) -> Any:
            policy = [] if SITE == "unfold" else [("Content-Security-Policy", POLICY)]
            return start(status, [*headers, *policy], *more)

        return project(environ, with_policy)

    return make_server("127.0.0.1", port, application, Server, Quiet)


def main() -> None:
    configure()

    from django.core.management import call_command

    from . import state

    call_command("migrate", verbosity=0)
    call_command("events_declare", verbosity=0)
    pages = state.fill()
    listening = server(int(sys.argv[1]))
    print(json.dumps(pages), flush=True)
    listening.serve_forever()


if __name__ == "__main__":
    # Under its own name, which CELERY_APP has.
    importlib.import_module("tests.browser.web").main()
