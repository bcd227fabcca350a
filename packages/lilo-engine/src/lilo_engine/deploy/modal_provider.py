"""ModalProvider: the provider's side of a running trainer, through Modal's client (extra `modal`)."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import modal

from lilo_engine.deploy.modal import TRAINER, urls_name

_client: Any = modal
"""For calls whose types the client leaves open."""


class ModalProvider:
    """Modal, seen from inside a container."""

    @property
    def client(self) -> object:
        """For asking about the cluster."""
        return modal

    @contextmanager
    def forward(self, port: int) -> Generator[str]:
        """A public address of a port of this container; TLS ends at the provider."""
        with modal.forward(port) as tunnel:
            yield tunnel.url

    def publish_url(self, app: str, run: str, url: str) -> None:
        """Write the address into the app's dictionary."""
        modal.Dict.from_name(urls_name(app), create_if_missing=True)[run] = url

    def call_again(self, app: str, run: str) -> None:
        """Start the next container of a run: called when this one serves no more."""
        _client.Function.from_name(app, TRAINER).spawn(run)

    def say(self, line: str) -> None:
        """A line of the container's log at the provider."""
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
