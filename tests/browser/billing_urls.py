"""Addresses of the service of test_story.py, and its Celery app."""

from __future__ import annotations

import os

from celery import Celery
from django.contrib import admin
from django.urls import path

app = Celery("billing", broker=os.environ["STORY_BROKER"], set_as_current=False)
app.conf.update(
    accept_content=["json"],
    task_serializer="json",
    broker_channel_error_retry=True,
    worker_cancel_long_running_tasks_on_connection_loss=True,
)

urlpatterns = [path("admin/", admin.site.urls)]
