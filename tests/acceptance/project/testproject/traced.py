"""A handler whose traces are collected, and a view that publishes its event."""

from __future__ import annotations

import time
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_amqp_events import event, handler

from . import ledger
from .steps import perform


@event("traced.order")
def order(plan: list[str]) -> None: ...


@handler("traced.order", bind=True, max_retries=2, retry_backoff=1, retry_backoff_max=1)
def act(self: Any, plan: list[str]) -> str:
    ledger.write("request", headers=self.request.headers)
    return perform(self, plan)


@handler("traced.slow", max_retries=0, time_limit=1)
def slow() -> None:
    time.sleep(60)


def place(request: HttpRequest) -> HttpResponse:
    """Publish the order in the transaction of a request."""
    with transaction.atomic():
        order.publish(plan=request.POST.getlist("plan"))
    return HttpResponse("placed")


urlpatterns = [path("orders/", place)]
