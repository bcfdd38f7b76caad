"""Where the console is: on Django's own site, and on one of the project's beside it."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from django_amqp_events.admin import register

from .web import SITE

ops = admin.AdminSite(name="ops")
register(ops)

urlpatterns = [path(f"{SITE}/", admin.site.urls), path("ops/", ops.urls)]
