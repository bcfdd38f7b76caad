"""The admin alone, titled with the service's name."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path
from django.views.generic import RedirectView

from django_amqp_events.conf import get_settings

admin.site.site_header = admin.site.site_title = f"Example: {get_settings().service}"
admin.site.site_url = None

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", RedirectView.as_view(pattern_name="admin:index")),
]
