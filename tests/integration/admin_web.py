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

settings.configure(
    SECRET_KEY="not a secret: tests only",
    ALLOWED_HOSTS=["127.0.0.1"],
    USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    ROOT_URLCONF="tests.unit.admin_world",
    STATIC_URL="/static/",
    PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django.contrib.sessions",
        "django.contrib.messages",
        "django.contrib.admin",
        "django_amqp_events",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[
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
    ],
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

    from tests.unit import admin_world

    call_command("migrate", verbosity=0)
    for name in ("ada", "bob"):
        User.objects.create_superuser(name, password="secret")
    print(admin_world.make(event_id="order-1").pk)


if __name__ == "__main__":
    # Under its own name, which CELERY_APP has.
    prepare()
