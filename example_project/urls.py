"""The admin, titled with the service's name, and the page that a probe asks."""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.generic import RedirectView

from django_amqp_events.publish import outbox

admin.site.site_header = admin.site.site_title = f"Example: {settings.AMQP_EVENTS['SERVICE']}"
admin.site.site_url = None


def ready(_request: HttpRequest) -> HttpResponse:
    """Answer that this process can publish; without its database, the answer is an error."""
    outbox.rows("default").exists()
    return HttpResponse()


urlpatterns = [
    path("admin/", admin.site.urls),
    path("healthz/events", ready),
    path("", RedirectView.as_view(pattern_name="admin:index")),
]
