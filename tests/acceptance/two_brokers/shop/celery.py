import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")  # first, so that it is the app of tasks in every thread
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

events_app = Celery("shop-events", set_as_current=False)
events_app.config_from_object("django.conf:settings", namespace="EVENTS")
