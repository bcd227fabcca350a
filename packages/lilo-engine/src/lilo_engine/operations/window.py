"""Window: what is known of one model's gradients between two optimizer steps. Pure.

A failed or refused forward_backward spoils its window: the step that would close it fails and names the failure,
and the next window starts clean. So a step never uses half of what the client asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_engine.errors import CommandFailed, InvalidRequest, LiloError


@dataclass(slots=True)
class Window:
    """One model's gradient window."""

    passes: int = 0
    """forward_backward passes whose gradients are in it."""
    failure: str | None = None
    """The first failure, in words; the window is spoiled."""
    is_users_fault: bool = True
    """Whose failure that was; the refused step is the same one's."""

    @property
    def is_empty(self) -> bool:
        """Whether there are neither gradients nor a failure that the next step must hear of."""
        return self.passes == 0 and self.failure is None

    def passed(self) -> None:
        """A forward_backward added its gradients."""
        self.passes += 1

    def spoil(self, what: str, error: LiloError) -> None:
        """A forward_backward failed or was refused; the first one is kept."""
        if self.failure is None:
            self.failure = f"{what} failed: {error.message}"
            self.is_users_fault = error.category == "user"

    def refusal(self) -> LiloError | None:
        """Why an optimizer step cannot be done now, or None."""
        if self.failure is not None:
            kind = InvalidRequest if self.is_users_fault else CommandFailed
            return kind(
                f"this step was not done, because {self.failure}; the gradients since the last "
                "step were dropped; send the batch again"
            )
        if self.passes == 0:
            return InvalidRequest(
                "there are no gradients since the last step; call forward_backward before optim_step"
            )
        return None

    def close(self) -> None:
        """The step was done or refused, or the gradients were dropped: start clean."""
        self.passes = 0
        self.failure = None
