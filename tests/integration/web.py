"""A tiny Django project for web servers: it publishes at import, and in each request."""

from __future__ import annotations

import os

import django
from celery import Celery
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.urls import path

settings.configure(
    SECRET_KEY="not a secret: tests only",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["django_amqp_events"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ["DATABASE"],
            "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
        }
    },
    AMQP_EVENTS={
        "SERVICE": "shop",
        "AUTODISCOVER": [],
        "EXCHANGE": os.environ["EXCHANGE"],
        "CELERY_APP": f"{__name__}.app",
        "CONFIRM_TIMEOUT": 20,
    },
)
django.setup()

from django_amqp_events import event  # noqa: E402 - settings come first

app = Celery("web", broker=os.environ["URL"], set_as_current=False)


@event("shop.visited")
def visited(n: int, pid: int) -> None:
    """Somebody was here."""


def view(request: HttpRequest, n: int) -> HttpResponse:
    return HttpResponse(visited.publish(n=n, pid=os.getpid()))


async def aview(request: HttpRequest, n: int) -> HttpResponse:
    ready = visited.using(mode="immediate") if n % 2 else visited
    return HttpResponse(await ready.apublish(n=n, pid=os.getpid()))


urlpatterns = [path("<int:n>", view), path("async/<int:n>", aview)]

wsgi = get_wsgi_application()
asgi = get_asgi_application()
call_command("migrate", verbosity=0)
visited(-1, os.getpid())
# Of the master's, which its workers may not share.
connections.close_all()
