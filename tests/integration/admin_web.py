"""A project with the admin, for a real web server: ``python -m tests.integration.admin_web`` makes
its database, with two users and one archived event, and prints the event's id.

DATABASE is an entry of DATABASES as JSON, URL the broker.
"""

from __future__ import annotations

import json
import os

import django
from celery import Celery
from django.conf import settings
from django.core.wsgi import get_wsgi_application

from tests.web_settings import WEB

settings.configure(
    **WEB,
    ROOT_URLCONF="tests.unit.admin.admin_world",
    DATABASES={"default": json.loads(os.environ["DATABASE"])},
    AMQP_EVENTS={
        "SERVICE": "billing",
        "AUTODISCOVER": [],
        "CELERY_APP": "tests.integration.admin_web.app",
        "CONFIRM_TIMEOUT": 20,
        "EDITING": True,
        "HANDLERS": {
            "send_invoice": {
                "EVENTS": ["shop.order.created"],
                "HANDLER": "tests.integration.handlers.handle",
            }
        },
    },
)
app = Celery("web", broker=os.environ["URL"], set_as_current=False)
django.setup()
wsgi = get_wsgi_application()


def prepare() -> None:
    from django.contrib.auth.models import User
    from django.core.management import call_command

    from tests.unit.admin import admin_world

    call_command("migrate", verbosity=0)
    for name in ("ada", "bob"):
        User.objects.create_superuser(name, password="secret")
    print(admin_world.make(event_id="order-1").pk)


if __name__ == "__main__":
    # Under its own name, which CELERY_APP has.
    prepare()
