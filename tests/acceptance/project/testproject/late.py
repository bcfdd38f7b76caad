"""A handler that is added after its events; what it counts shows each run that was committed."""

from __future__ import annotations

from django.db import connection

from django_amqp_events import current_event, handler

TABLE = "CREATE TABLE counted (event varchar(40))"


@handler("late.happened", once=True)
def count(number: int) -> None:
    event = current_event()
    assert event is not None
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO counted VALUES (%s)", [event.id])
