"""The base of the commands about the broker."""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter
from typing import Any, ClassVar

from django.core.management.base import BaseCommand


class BrokerCommand(BaseCommand):
    """A command that needs the broker, and neither a database nor the project's other checks.

    Attributes:
        epilog: stands below the options in the help, as it is written.
    """

    epilog: ClassVar[str] = ""
    requires_system_checks = ()

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        parser = super().create_parser(prog_name, subcommand, epilog=self.epilog, **kwargs)

        class Formatter(RawDescriptionHelpFormatter, parser.formatter_class):  # type: ignore[misc, name-defined]
            """Print options in Django's order, and the epilog unchanged."""

        parser.formatter_class = Formatter
        return parser
