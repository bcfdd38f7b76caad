"""Django settings of the contract's worker."""

from tests.settings import *  # noqa: F403

from .handlers import AMQP_EVENTS as AMQP_EVENTS  # noqa: PLC0414 - a setting
