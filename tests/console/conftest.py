"""The rig of the engine's tests."""

from tests.engine.conftest import build, limits, running, tiny

__all__ = ["build", "limits", "running", "tiny"]
