"""Options that several commands have, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from lilo_engine.config import RECORDS_URL_VARIABLE

DefinitionName: TypeAlias = Annotated[
    str, typer.Argument(help="As `lilo definitions list` shows it.")
]
Host: TypeAlias = Annotated[str, typer.Option(help="Address to listen on.")]
Port: TypeAlias = Annotated[int, typer.Option(help="0 picks a free one.", min=0, max=65535)]
RecordsUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"URL of the engine's database, as {RECORDS_URL_VARIABLE}; without, a file in the data folder.",
        show_default=False,
    ),
]
CheckpointsFolder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the checkpoints, if not in the data folder; engine and fronts see the same one.",
        show_default=False,
    ),
]
