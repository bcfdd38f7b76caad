"""A handler that works once its cause is fixed."""

from __future__ import annotations

import os
from pathlib import Path

from django_amqp_events import handler


@handler("store.ordered", max_retries=0)
def book(order: int) -> None:
    if not Path(os.environ["STORE_FIXED"]).exists():
        raise ValueError(order)
    with Path(os.environ["STORE_BOOKED"]).open("a") as booked:
        booked.write(f"{order}\n")
