"""Where the console is."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from django_amqp_events.admin import register

from .web import SITE

site = admin.site
if SITE == "ops":
    site = admin.AdminSite(name="ops")
    register(site)

urlpatterns = [path(f"{SITE}/", site.urls)]
