"""The urls of the project are in namespaces, which its middleware and its templates need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import resolve


def namespaces(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[..., HttpResponse]:
    def respond(request: Any) -> HttpResponse:
        request.namespace = {"shop": "public", "office": "internal"}[
            resolve(request.path_info).namespace
        ]
        return get_response(request)

    return respond


def context(request: Any) -> dict[str, Any]:
    return {"namespace": request.namespace}
