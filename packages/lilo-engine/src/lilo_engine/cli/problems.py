"""Problems of a command, as one line on standard error and exit code 1; a traceback is for bugs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import typer
from lilo_definitions import DefinitionError

from lilo_engine.errors import LiloError


class Problem(Exception):
    """Why a command cannot go on, in words for whoever typed it."""


@contextmanager
def problems_in_one_line() -> Generator[None]:
    """Turn what a person can mend into one line."""
    try:
        yield
    except (Problem, LiloError, DefinitionError) as error:
        typer.echo(f"lilo: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        typer.echo(f"lilo: {error.strerror or error}{where}", err=True)
        raise typer.Exit(1) from error
