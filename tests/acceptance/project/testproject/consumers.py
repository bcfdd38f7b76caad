"""A step of the project's own, as in Celery's guide: ``TESTPROJECT_STEP`` is its queue."""

from __future__ import annotations

import os
from typing import Any

from celery.bootsteps import ConsumerStep
from kombu import Consumer, Message, Queue

from . import ledger

QUEUE = Queue(os.environ["TESTPROJECT_STEP"], queue_arguments={"x-queue-type": "quorum"})


class Foreign(ConsumerStep):
    """Consumes what another program publishes."""

    def get_consumers(self, channel: Any) -> list[Consumer]:
        return [Consumer(channel, queues=[QUEUE], callbacks=[self.handle], accept=["json"])]

    def handle(self, body: Any, message: Message) -> None:
        ledger.write("foreign", number=body["number"])
        message.ack()
