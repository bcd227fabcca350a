"""The `lilo` command."""

from lilo_engine.cli.main import main

__all__ = ["main"]
