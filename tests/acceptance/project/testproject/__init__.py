"""A Django project with several services; the environment says which one a process is."""

from .celery import app

__all__ = ["app"]
