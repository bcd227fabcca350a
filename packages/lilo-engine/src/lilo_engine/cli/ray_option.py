"""`--ray HOST:PORT` of the commands that start a trainer: on whose nodes its ranks run."""

from __future__ import annotations

from typing import Annotated

import typer

from lilo_engine.config import RAY_ADDRESS_VARIABLE, add_to_environment

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        help=(
            "HOST:PORT of the Ray cluster that the ranks run on, as `lilo cluster head` prints it; "
            f"without, this machine, or what {RAY_ADDRESS_VARIABLE} says."
        ),
        show_default=False,
    ),
]


def use_ray(address: str | None) -> None:
    """Hand the address to the trainer, which alone knows Ray and says what is wrong with it."""
    if address is not None:
        add_to_environment({RAY_ADDRESS_VARIABLE: address})
