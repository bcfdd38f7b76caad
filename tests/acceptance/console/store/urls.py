"""The pages of the project."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import include, path


def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.namespace)  # type: ignore[attr-defined]


urlpatterns = [
    path("", include(([path("", view, name="index")], "shop"))),
    path("office/", include(([path("", view, name="index")], "office"))),
]
