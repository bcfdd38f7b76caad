"""The option of `celery worker` for handlers that hang."""

from __future__ import annotations

import click
import pytest
from celery import Celery

from django_amqp_events.worker import hang_detector


def read(text: str) -> float | None:
    app = Celery()
    hang_detector.add_options(app)
    [option] = app.user_options["worker"]
    command = click.Command("worker", params=[option])
    context = command.make_context("worker", [hang_detector.OPTION, text])
    seconds: float | None = context.params["events_hang_after"]
    return seconds


@pytest.mark.parametrize("text", ["0", "2.5", "1000000"])
def test_seconds(text: str) -> None:
    assert read(text) == float(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e7", "soon", ""])
def test_what_would_report_nothing_or_everything_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter) as raised:
        read(text)
    assert hang_detector.OPTION in raised.value.format_message()
