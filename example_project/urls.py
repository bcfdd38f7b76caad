"""The admin, titled with the service's name, and the page that probes ask."""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.urls import path
from django.views.generic import RedirectView

from django_amqp_events.monitor.health import health_view

admin.site.site_header = admin.site.site_title = f"Example: {settings.AMQP_EVENTS['SERVICE']}"
admin.site.site_url = None

urlpatterns = [
    path("admin/", admin.site.urls),
    path("healthz/events", health_view),
    path("", RedirectView.as_view(pattern_name="admin:index")),
]
