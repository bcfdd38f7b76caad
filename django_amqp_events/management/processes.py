"""Celery workers in the process of a management command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import click
from celery import Celery
from celery.bin.celery import celery as celery_command
from django.core.management.base import CommandError

from django_amqp_events.broker.connection import build_connection

#: Celery's default of ``broker_connection_max_retries``.
DEFAULT_CONNECTION_RETRIES: Final = 100
#: Switch off broadcasts that events do not use; N workers would exchange N² messages.
QUIET: Final = ("--without-gossip", "--without-mingle", "--without-heartbeat")


def prepare(app: Celery) -> None:
    """Set the Celery options that events need, for a worker in this process.

    Raises:
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    build_connection(app)
    # Otherwise a consumer timeout ends the worker (celery#6760).
    app.conf.broker_channel_error_retry = True
    # Otherwise a handler keeps running beside the redelivery of its event.
    app.conf.worker_cancel_long_running_tasks_on_connection_loss = True
    # Otherwise a thread of the pool reads the worker's connection after a reconnect (Celery 5.7).
    app.conf.worker_enable_prefetch_count_reduction = False
    # Otherwise the worker ends after RabbitMQ was unreachable for about 50 minutes.
    if app.conf.broker_connection_max_retries == DEFAULT_CONNECTION_RETRIES:
        app.conf.broker_connection_max_retries = math.inf


def run_worker(app: Celery, arguments: Sequence[str]) -> int:
    """Run a Celery worker with the arguments of ``celery worker``; return its exit code.

    ``app.worker_main()`` does the same but returns nothing, so a supervisor could not distinguish
    a failed worker from a stopped one.
    """
    app_option = celery_command.params[0]
    default, app_option.default = app_option.default, app
    for option in celery_command.params:
        # APP, BROKER_URL and others are the project's own.
        if option.name not in ("no_color", "skip_checks"):
            option.envvar = None
    try:
        code = celery_command.main(args=["worker", *arguments], standalone_mode=False)
    except click.ClickException as exc:
        raise CommandError(f"celery worker: {exc.format_message()}") from exc
    finally:
        app_option.default = default
    # A worker step of the project may call sys.exit() with a text.
    return code if isinstance(code, int) else int(bool(code))
