"""Bodies: what the provider's containers run. Module-level functions: a container imports this module and calls one.

A run longer than one container's life is a chain: at its deadline the head leaves and calls the trainer again with the
same run. A call that failed is tried again by the provider with the same run. Either way the next container goes on
from the newest whole state.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from lilo_definitions import Definition

from lilo_engine.cluster.bring_up import BringUp, environment_of
from lilo_engine.cluster.membership import Cluster, read_cluster
from lilo_engine.config import add_to_environment, environment
from lilo_engine.deploy import places
from lilo_engine.deploy.head import Life, PartsOf, Timing, of_processes
from lilo_engine.deploy.resume import Resume
from lilo_engine.deploy.surroundings import Surroundings
from lilo_engine.errors import ServerError
from lilo_engine.log import begin_log
from lilo_engine.sampling.host import GROUP as SAMPLERS

LEAVE_S = 900.0
"""Before the container's limit: a checkpoint that is being published has time to end, and so has the last snapshot."""


class Provider(Protocol):
    """What a trainer needs of the provider while it runs."""

    @property
    def client(self) -> object:
        """For asking about the cluster: the module `modal`, or what looks like it."""
        ...

    def forward(self, port: int) -> AbstractContextManager[str]:
        """The public URL of a port of this container, for as long as the block runs."""
        ...

    def publish_url(self, app: str, run: str, url: str) -> None:
        """Write down where a run can be reached."""
        ...

    def call_again(self, app: str, run: str) -> None:
        """Start the trainer with the same run in a new container."""
        ...

    def say(self, line: str) -> None:
        """Tell whoever reads the container's output."""
        ...


def _bring_up(cluster: Cluster) -> BringUp:
    return BringUp(cluster=cluster)


def trainer(run: str) -> list[dict[str, Any]]:
    """Body of the function `trainer`: one life of a run on this container.

    Returns what the models of the run went on from, for whoever called; on containers other than the head, nothing.
    """
    from lilo_engine.deploy.modal_provider import ModalProvider  # noqa: PLC0415 (an extra)

    ending = Ending()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, partial(_end, ending))
    return [asdict(resume) for resume in run_trainer(run, ModalProvider(), ending=ending)]


def _end(ending: Ending, _number: int, _frame: object) -> None:
    ending.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How others end a life before its deadline."""

    leave: threading.Event = field(default_factory=threading.Event)
    """Set: leave now, as at the deadline; the run goes on in another container."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set as well: the run ends with this life, or the provider starts it again by itself."""

    def end(self) -> None:
        """End the run with this life."""
        self.over.set()
        self.leave.set()


def run_trainer(
    run: str,
    provider: Provider,
    *,
    ending: Ending | None = None,
    timing: Timing | None = None,
    parts_of: PartsOf = of_processes,
    bring_up_of: Callable[[Cluster], BringUp] = _bring_up,
    port: int = places.FRONT_PORT,
) -> tuple[Resume, ...]:
    """One life of a run.

    Args:
        run: Its name; the same name again goes on with it.
        provider: The provider's side.
        ending: How somebody ends this life early.
        timing: Instead of what the definition says.
        parts_of: Instead of a trainer and a sampler in processes of their own.
        bring_up_of: Brings a container of a cluster into it.
        port: Of the front, which `provider.forward` makes public.

    Raises:
        ServerError: see `Life.live` and `bring_up`.
    """
    begin_log(logging.INFO)
    here = Surroundings.of(environment())
    check_installed(here.definition)
    cluster = read_cluster(provider.client, here.definition.topology.nodes)
    lead = partial(_lead, run, here, provider, ending or Ending(), timing, parts_of, port)
    if len(cluster.addresses) == 1:
        return lead()
    add_to_environment(environment_of(cluster))
    bring_up = bring_up_of(cluster)
    if not cluster.is_head:
        bring_up.lend()
        return ()
    ray = bring_up.start_head()
    try:
        return lead()
    finally:
        ray.stop()


def _lead(
    run: str,
    here: Surroundings,
    provider: Provider,
    ending: Ending,
    timing: Timing | None,
    parts_of: PartsOf,
    port: int,
) -> tuple[Resume, ...]:
    with provider.forward(port) as url:
        life = Life(
            run=run,
            surroundings=here,
            timing=timing or timing_of(here.definition.deployment.trainer_timeout_hours),
            announce=_announcer(here.app, run, url, provider),
            parts_of=parts_of,
            port=port,
            stop=ending.leave,
        )
        resumes = life.live()
    if not ending.over.is_set():
        provider.call_again(here.app, run)
    return resumes


def check_installed(definition: Definition) -> None:
    """Refuse before other containers are waited for, and paid, what this image cannot serve.

    Raises:
        ServerError: no such sampling engine is installed; those there are.
    """
    engine = definition.sampler.engine
    there = sorted(point.name for point in entry_points(group=SAMPLERS))
    if engine not in there:
        raise ServerError(
            f"definition {definition.name!r} asks for what is not installed here: sampler.engine is {engine!r} "
            f"(there are: {', '.join(there) or 'none'})"
        )


def timing_of(timeout_hours: float) -> Timing:
    """A life that ends before its container does."""
    limit_s = timeout_hours * 3600
    return Timing(life_s=max(limit_s - LEAVE_S, limit_s / 2))


def _announcer(
    app: str, run: str, url: str, provider: Provider
) -> Callable[[str, tuple[Resume, ...]], None]:
    def announce(local: str, resumes: tuple[Resume, ...]) -> None:
        provider.publish_url(app, run, url)
        said = [f"lilo: serving {app} run {run} at {url} (here {local})"]
        for resume in resumes:
            said += [f"lilo: passed over {skipped}" for skipped in resume.skipped]
            said.append(
                f"lilo: {resume.model_id} goes on from {resume.path or 'nothing: no whole state'}"
            )
        for line in said:
            provider.say(line)

    return announce


def sampler() -> None:
    """Body of the function `sampler`: starts one replica's server; the provider routes to its port."""
    command = cast("list[str]", json.loads(environment()[places.SAMPLER_COMMAND]))
    subprocess.Popen(command, stdin=subprocess.DEVNULL)


__all__ = ["Ending", "Provider", "run_trainer", "sampler", "timing_of", "trainer"]
