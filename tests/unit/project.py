"""Stands for a user's project in the tests of the checks: its Celery app and its functions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task, shared_task

#: The tests put the app they need here; CELERY_APP names it.
app: Any = None
no_app = "nothing"


def make_app(**options: Any) -> Celery:
    """Return an app with everything that the checks ask for, and *options* over it."""
    # Without Celery's fixup for Django, which makes it the default of all threads.
    made = Celery(
        "project",
        set_as_current=False,
        fixups=[],
        broker="pyamqp://me:secret@rabbit.example//",
    )
    made.conf.update(
        {
            "broker_channel_error_retry": True,
            "worker_cancel_long_running_tasks_on_connection_loss": True,
            "accept_content": ["json"],
            **options,
        }
    )
    return made


def order_created(order_id: int, total: str, note: str = "") -> None: ...


@dataclass
class Customer:
    email: str
    addresses: list[dict[str, str]]


def order_paid(
    order_id: int, customer: Customer, tags: tuple[str, ...] = (), note: str | None = None
) -> None: ...


def unknown_type(order_id: Celery, total: str) -> None: ...


def anything_goes(order_id: int, **more: Any) -> None: ...


def fits(order_id: int, total: str) -> None: ...


def fits_by_default(order_id: int, other: int = 5) -> None: ...


def fits_with_keywords(**payload: Any) -> None: ...


def fits_with_some(order_id: int, *args: Any, **payload: Any) -> None: ...


def fits_exactly(*, order_id: int, total: str, note: str) -> None: ...


async def fits_asynchronously(order_id: int) -> None: ...


def fits_bound(self: Task, order_id: int) -> None: ...


def fits_bound_anyhow(*args: Any, **payload: Any) -> None: ...


def misses(order_id: int, total: str, customer: int) -> None: ...


def misses_keyword(*, invoice_id: int) -> None: ...


def by_position(order_id: int, /, total: str) -> None: ...


def by_position_if_at_all(order_id: int = 0, /) -> None: ...


def takes_nothing() -> None: ...


def takes_keywords_only(*, order_id: int) -> None: ...


def generator(order_id: int) -> Iterator[int]:
    yield order_id


async def asynchronous_generator(order_id: int) -> AsyncIterator[int]:
    yield order_id


@shared_task
def celery_task(order_id: int) -> None: ...


class FittingTask(Task):
    def run(self, order_id: int, total: str) -> None: ...


class MissingTask(Task):
    def run(self, customer: int) -> None: ...


class TaskWithoutRun(Task):
    pass


class TaskWithoutSelf(Task):
    def run() -> None: ...  # type: ignore[misc]


class StaticTask(Task):
    @staticmethod
    def run(order_id: int) -> None: ...


class Handlers:
    """A handler may be what a call returns, or a method of an object."""

    def __call__(self, order_id: int) -> None: ...

    def method(self, order_id: int) -> None: ...


instance = Handlers()
method = Handlers().method
