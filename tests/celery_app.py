"""The Celery app of the suite; fixtures set its broker_url."""

from __future__ import annotations

from celery import Celery

app = Celery("tests", set_as_current=False)
app.conf.update(accept_content=["json"], task_serializer="json", broker_connection_retry=False)
