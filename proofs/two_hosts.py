"""A trainer over two hosts whose checkpoints can be resumed: twenty saves whole, all killed, resumed bit for bit.

Two hosts (network namespaces where this is root; else two raylets on this machine) with the same host name, each with
a view of its own of one volume, as containers of a provider have it; TP2 x CP2, one pair of ranks on each. Everything
goes through the SDK.

    save 20 times -> go on (reference) -> kill all -> new hosts, new views -> resume the newest: equal losses
    one shard of the newest goes -> refused by its name -> the one before it resumes

    python proofs/two_hosts.py [--saves 20]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import tinker
from _proof import LIMIT_S, Proof, connect, datum, outcome, step, tokens
from lilo_engine.demo.server import LocalServer
from lilo_volume import open_named
from lilo_volume.testing.emulator import Container, Emulator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.cluster.hosts import (
    Cluster,
    Host,
    cluster,
    namespaces_refused,
    two_hosts,
)

DEFINITION = """\
extends: tiny
name: tiny-two-hosts
topology: {nodes: 2, tp: 2, cp: 2}
trainer: {captures: volume}
limits: {startup_timeout_s: 300}
"""
RANKS_PER_HOST = 2
START_LIMIT_S = 300.0
"""Four ranks that import torch and Megatron on two cores."""
AFTER = 3
"""Steps after the last save that are compared."""
_LABELS = ("host-0", "host-1")


def main() -> None:
    """One volume for two lives of the cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=20)
    saves = parser.parse_args().saves
    proof = Proof("two_hosts")
    reason = namespaces_refused()
    proof.figure(
        "hosts",
        "two network namespaces" if reason is None else f"two raylets: {reason}",
        "either",
        True,
    )
    with tempfile.TemporaryDirectory(prefix="lilo-two-hosts-") as name:
        folder = Path(name)
        (folder / "definition.yaml").write_text(DEFINITION, encoding="utf-8")
        with two_hosts(apart=reason is None) as hosts:
            scenario(proof, folder, hosts, saves)
    proof.end()


def scenario(proof: Proof, folder: Path, hosts: tuple[Host, Host], saves: int) -> None:
    """Both lives, and what is compared between them."""
    views = Views(folder / "volume")
    with life(folder, hosts, views) as first:
        before = train_and_save(proof, first.service, views, saves)
        first.kill()
    with life(folder, hosts, views) as second:
        resume(proof, second.service, before)
        lose_a_shard(proof, second.service, views, before)


@dataclass
class Views:
    """The volume, and which container each host is now."""

    folder: Path

    def __post_init__(self) -> None:
        self.emulator = Emulator(self.folder, shared=True)
        self.containers: list[Container] = []

    @property
    def url(self) -> str:
        """As `LILO_CHECKPOINT_VOLUME` names it."""
        return f"emulator://{self.folder}"

    def mount(self) -> None:
        """New containers: nothing but what is committed is in them."""
        self.containers = [self.emulator.mount(label) for label in _LABELS]

    def crash(self) -> None:
        """What was not committed is lost."""
        for container in self.containers:
            container.crash()

    def fault(self, path: str) -> str | None:
        """What a stranger to the volume finds wrong with a published checkpoint, every byte of it read."""
        run, kind, name = _parts(path)
        stranger = self.emulator.mount("stranger")
        try:
            checkpoint = open_named(self.emulator.volume(stranger), run, kind, name, verify="full")
            shards = [e.path for e in checkpoint.manifest.files if e.path.endswith(".distcp")]
            world = len(_LABELS) * RANKS_PER_HOST
            receipts = len(checkpoint.manifest.receipts)
            nodes = len({receipt.node for receipt in checkpoint.manifest.receipts})
            good = (len(shards), receipts, nodes) == (world, world, len(_LABELS))
            return None if good else f"{len(shards)} shards, {receipts} receipts, {nodes} nodes"
        except Exception as error:  # any of them is the answer
            return f"{type(error).__name__}: {error}"
        finally:
            stranger.crash()

    def drop(self, path: str, file_name: str) -> None:
        """Take a file of a published checkpoint away from the committed state."""
        run, kind, name = _parts(path)
        volume = self.emulator.outside()
        stranger = self.emulator.mount("stranger")
        folder = open_named(self.emulator.volume(stranger), run, kind, name).folder
        volume.remove_committed(f"{folder.relative_to(stranger.root)}/{file_name}")
        stranger.crash()


@dataclass
class Life:
    """A cluster and a server on it."""

    cluster: Cluster
    server: LocalServer
    service: tinker.ServiceClient
    views: Views
    killed: bool = False

    def kill(self) -> None:
        """SIGKILL of everything on both hosts, at once."""
        self.killed = True
        victims = [psutil.Process(self.server.pid)]
        victims += [psutil.Process(one.pid) for one in self.cluster.running.values()]
        for victim in [
            child for one in victims for child in one.children(recursive=True)
        ] + victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        self.views.crash()


@contextmanager
def life(folder: Path, hosts: tuple[Host, Host], views: Views) -> Iterator[Life]:
    """Both hosts anew: containers, Ray on each, and the server on the first."""
    views.mount()
    variables = {"LILO_CHECKPOINT_VOLUME": views.url}
    for host, container in zip(hosts, views.containers, strict=True):
        host.environment |= {"MODAL_TASK_ID": container.task_id}
    with ExitStack() as held:
        ray = held.enter_context(cluster(hosts))
        ray.start_head(RANKS_PER_HOST)
        ray.start_join(hosts[1], RANKS_PER_HOST)
        variables |= {"LILO_RAY_ADDRESS": ray.address, **hosts[0].environment}
        server = LocalServer(str(folder / "definition.yaml"), folder / "data")
        held.callback(server.stop)
        with set_variables(variables):
            server.start(START_LIMIT_S)
        one = Life(ray, server, connect(server), views)
        yield one
        if (
            not one.killed
        ):  # a client would try for minutes to close its session at a server that is gone
            one.service.__exit__(None, None, None)


@dataclass
class Trained:
    """What the first life leaves to be compared with."""

    paths: list[str]
    """Of all saves."""
    losses: list[float]
    """Of the steps after the last of them."""
    snapshot: str
    sampled: list[int]
    """Greedily, from the snapshot."""


def train_and_save(
    proof: Proof, service: tinker.ServiceClient, views: Views, saves: int
) -> Trained:
    """Steps, each of them saved and looked at from outside; then some more."""
    client = service.create_lora_training_client("tiny", rank=8, seed=1).result(LIMIT_S)
    paths: list[str] = []
    faults: list[str] = []
    started = time.perf_counter()
    for number in range(saves):
        step(client, batch(number))
        paths.append(client.save_state(f"step-{number:02}").result(timeout=LIMIT_S).path)
        fault = views.fault(paths[-1])
        if fault is not None:
            faults.append(f"{paths[-1]}: {fault}")
    proof.equal(f"of {saves} saves, those not whole in the committed state", faults, [])
    proof.figure(
        "seconds of a step, a save and its check",
        (time.perf_counter() - started) / saves,
        "any",
        True,
    )
    snapshot = client.save_weights_for_sampler("sampled").result(timeout=LIMIT_S).path
    sampled = sample(service, snapshot)
    proof.figure("tokens sampled from what was just saved", sampled, "some", bool(sampled))
    losses = [step(client, batch(saves + number)) for number in range(AFTER)]
    return Trained(paths, losses, snapshot, sampled)


def resume(proof: Proof, service: tinker.ServiceClient, before: Trained) -> None:
    """The newest, on hosts that never saw it."""
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(_parts(before.paths[0])[0]).result(LIMIT_S).checkpoints
    training = [one for one in listed if one.checkpoint_type == "training"]
    newest = max(training, key=lambda one: one.time).tinker_path
    proof.equal("the newest checkpoint is the last one that was saved", newest, before.paths[-1])
    client = load(service, before.paths[-1])
    again = [step(client, batch(len(before.paths) + number)) for number in range(AFTER)]
    proof.equal("losses after the resume, as those of the uninterrupted run", again, before.losses)
    sampled = sample(service, before.snapshot)
    proof.equal("tokens sampled from the snapshot of the first life", sampled, before.sampled)


def lose_a_shard(
    proof: Proof, service: tinker.ServiceClient, views: Views, before: Trained
) -> None:
    """The newest is short of one shard: it is refused by name, and the one before it resumes."""
    paths = before.paths
    views.drop(paths[-1], "__3_0.distcp")
    error, seconds = outcome(lambda: load(service, paths[-1]))
    named = error is not None and "__3_0.distcp" in error
    proof.figure(
        "loading what is short of one shard", error, "an error that names __3_0.distcp", named
    )
    proof.at_most("seconds until that error", seconds, 20.0)
    error, _ = outcome(lambda: step(load(service, paths[-2]), batch(0)))
    proof.equal("resuming the one before it", error, None)


def load(service: tinker.ServiceClient, path: str) -> tinker.TrainingClient:
    """A client that goes on from a checkpoint."""
    return service.create_training_client_from_state_with_optimizer(path).result(LIMIT_S)


def sample(service: tinker.ServiceClient, path: str) -> list[int]:
    """Four tokens, greedily."""
    client = service.create_sampling_client(model_path=path).result(LIMIT_S)
    prompt = tinker.types.ModelInput.from_ints(tokens(1, 8))
    greedy = tinker.types.SamplingParams(max_tokens=4, temperature=0.0)
    return list(client.sample(prompt, 1, greedy).result(timeout=LIMIT_S).sequences[0].tokens)


def batch(number: int) -> list[tinker.types.Datum]:
    """Rows of odd lengths, the same for the same number."""
    return [datum(tokens(10 * number + row, length)) for row, length in enumerate((23, 8, 41))]


def _parts(path: str) -> tuple[str, str, str]:
    """Run, kind and name of `tinker://RUN/weights/NAME`."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return run, kind, name


@contextmanager
def set_variables(variables: dict[str, str]) -> Iterator[None]:
    """Of this process, for what it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    main()
