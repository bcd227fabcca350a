"""UsageMeter: what each owner used of the trainer and of the sampler, read from what is counted for reports anyway.

Nothing is counted here while something runs: `look` compares the totals of runs with those of its last look. Belongs to
the engine's event loop; `control/usage.py` keeps what it says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from lilo_engine.console.recorder import Recorder
from lilo_engine.console.run_totals import RunTotals
from lilo_engine.operations.operation import ModelId

_OFF_THE_DEVICE = ("persist",)
"""Commands during which the device works for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Of one owner."""

    trained_tokens: int = 0
    """Of passes, forward only ones too."""
    prompt_tokens: int = 0
    """Of prompts of samples; of one prompt once, however many samples it had."""
    sampled_tokens: int = 0
    device_s: float = 0.0
    """Seconds of the trainer's commands times its devices; of a shared command the share of its tokens."""

    def __add__(self, other: Used) -> Used:
        """Both together."""
        return Used(
            trained_tokens=self.trained_tokens + other.trained_tokens,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
            device_s=self.device_s + other.device_s,
        )

    def __sub__(self, other: Used) -> Used:
        """What this has more."""
        return Used(
            trained_tokens=self.trained_tokens - other.trained_tokens,
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            sampled_tokens=self.sampled_tokens - other.sampled_tokens,
            device_s=self.device_s - other.device_s,
        )


@dataclass(slots=True, kw_only=True)
class UsageMeter:
    """Of one engine."""

    recorder: Recorder
    samples: Callable[[], Mapping[str, Used]]
    """Takes what sampling sessions used since it was last asked, by their ids."""
    owner_of_run: Callable[[str], Awaitable[str]]
    owner_of_sampler: Callable[[str], Awaitable[str]]
    num_devices: int
    """Of the trainer."""
    totals: dict[str, Used] = field(default_factory=dict[str, Used])
    """Owner -> all since the engine began, as of the last look."""
    _owed: dict[str, Used] = field(default_factory=dict[str, Used])
    """Of that, what was not handed over yet."""
    _seen: dict[ModelId, Used] = field(default_factory=dict[ModelId, Used])
    _of_runs: dict[str, Used] = field(default_factory=dict[str, Used])
    """Run -> what is counted to nobody yet."""
    _of_samplers: dict[str, Used] = field(default_factory=dict[str, Used])

    async def look(self) -> None:
        """Count what was used since the last look.

        What has no owner yet, because the records that know it cannot be read, is counted at a later look.

        Raises:
            LiloError: they cannot be.
        """
        seen: dict[ModelId, Used] = {}
        for run_id, totals in list(self.recorder.runs.items()):
            seen[run_id] = self._of_run(totals)
            _add(self._of_runs, run_id, seen[run_id] - self._seen.get(run_id, Used()))
        # Runs that the recorder let go of are forgotten here too.
        self._seen = seen
        for sampling_session_id, more in self.samples().items():
            _add(self._of_samplers, sampling_session_id, more)
        await self._give(self._of_runs, self.owner_of_run)
        await self._give(self._of_samplers, self.owner_of_sampler)

    async def take(self) -> dict[str, Used]:
        """Look, and hand over what was not handed over before, by owner."""
        await self.look()
        taken, self._owed = self._owed, {}
        return taken

    def put_back(self, taken: Mapping[str, Used]) -> None:
        """It could not be kept: hand it over again the next time."""
        for owner, more in taken.items():
            _add(self._owed, owner, more)

    async def _give(self, used: dict[str, Used], owner_of: Callable[[str], Awaitable[str]]) -> None:
        """Count each to its owner."""
        for name in list(used):
            owner = await owner_of(name)
            # Somebody else may have looked meanwhile.
            more = used.pop(name, Used())
            _add(self.totals, owner, more)
            _add(self._owed, owner, more)

    def _of_run(self, totals: RunTotals) -> Used:
        seconds = sum(s for command, s in totals.seconds.items() if command not in _OFF_THE_DEVICE)
        return Used(trained_tokens=totals.tokens, device_s=seconds * self.num_devices)


def _add(counts: dict[str, Used], name: str, more: Used) -> None:
    if more != Used():
        counts[name] = counts.get(name, Used()) + more
