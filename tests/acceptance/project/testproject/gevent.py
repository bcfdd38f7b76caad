"""Stands in for a green pool where gevent is not installed: the module's name is what counts."""

from celery.concurrency.thread import TaskPool as Threads


class TaskPool(Threads):
    """A pool whose module has a green one's name."""
