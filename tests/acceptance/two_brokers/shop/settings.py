"""Settings of the project; the environment has the addresses."""

from __future__ import annotations

import json
import os

SECRET_KEY = "not a secret: tests only"
USE_TZ = True
INSTALLED_APPS = ["django_amqp_events", "shop"]
DATABASES = {"default": json.loads(os.environ["SHOP_DATABASE"])}

CELERY_BROKER_URL = os.environ["REDIS_URL"]
CELERY_RESULT_BACKEND = os.environ["REDIS_URL"]

EVENTS_BROKER_URL = os.environ["RABBITMQ_URL"]
EVENTS_RESULT_BACKEND = "disabled"  # otherwise Celery uses CELERY_RESULT_BACKEND here, too
EVENTS_BROKER_CHANNEL_ERROR_RETRY = True
EVENTS_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = True

AMQP_EVENTS = {
    "SERVICE": "shop",
    "CELERY_APP": "shop.celery.events_app",
}
