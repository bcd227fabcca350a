"""Deploy: Modal's objects for every definition, and a run of tiny in two containers' lives, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Queue
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import lilo_definitions  # noqa: E402
import tinker  # noqa: E402
from _proof import Proof, adam, datum, logprobs  # noqa: E402
from lilo_engine.deploy import places, plan  # noqa: E402
from lilo_engine.deploy.bodies import Ending, run_trainer  # noqa: E402
from lilo_engine.deploy.head import Timing  # noqa: E402
from lilo_engine.deploy.modal import build  # noqa: E402

from tests.deploy.local_provider import LocalProvider, free_port  # noqa: E402

KEY = "tml-proof-of-deploy"
APP = "lilo-tiny"
LIMIT_S = 120.0
DATA = [datum(list(b"12+34=46")), datum(list(b"5+6=11"))]


class Provider(LocalProvider):
    """Tells when the run can be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = threading.Event()

    def publish_url(self, app: str, run: str, url: str) -> None:
        """Note the address."""
        super().publish_url(app, run, url)
        self.ready.set()


@contextmanager
def life(provider: Provider, lives: list) -> Iterator[str]:
    """One container's life, its trainer and sampler in processes of their own."""
    ending = Ending()
    options = {"ending": ending, "timing": Timing(life_s=600), "port": free_port()}
    provider.ready.clear()
    thread = threading.Thread(
        target=lambda: lives.append(run_trainer("proof", provider, **options)), daemon=True
    )
    thread.start()
    assert provider.ready.wait(LIMIT_S), "the server was not ready in time"
    try:
        yield provider.urls[f"{APP}/proof"]
    finally:
        ending.leave.set()
        thread.join(LIMIT_S)


def objects(proof: Proof) -> None:
    """Modal's own account of what would be created, against the definition."""
    names, wrong = lilo_definitions.names(), []
    for name in names:
        definition = lilo_definitions.get(name)
        built = build(plan(definition))
        info, topology = built.trainer.info(), definition.topology
        size = info.cluster_info.size if info.cluster_info else 1
        gpus = sum(count for _, count in info.gpus) * size
        limit_s = round(definition.deployment.trainer_timeout_hours * 3600)
        if (size, gpus, info.timeout) != (
            topology.nodes,
            topology.nodes * topology.gpus_per_node,
            limit_s,
        ):
            wrong.append(name)
    proof.at_least("definitions built as Modal's objects", len(names), 20)
    proof.equal("of which disagree with Function.info()", wrong, [])


def set_surroundings(folder: Path) -> None:
    """The variables of a container whose mounts and disk are folders here."""
    os.environ.update(plan(lilo_definitions.get("tiny")).trainer.environment)
    del os.environ[places.CHECKPOINT_VOLUME], os.environ[places.MODELS]
    os.environ[places.CHECKPOINT_ROOT] = str(folder / "volume" / places.STATES_FOLDER)
    os.environ[places.DATA_DIR] = str(folder / "disk")
    os.environ["LILO_API_KEY"] = KEY


def chain(proof: Proof, folder: Path) -> None:
    """Train, lose the container and the newest state, go on; compared with the numbers before."""
    set_surroundings(folder)
    provider, lives = Provider(), []
    with life(provider, lives) as url:
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        client = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result(
            LIMIT_S
        )
        steps(client, 2)
        first = client.save_state("one").result(LIMIT_S).path
        before = logprobs(client, DATA)
        steps(client, 1)
        expected = logprobs(client, DATA)
        client.save_state("two").result(LIMIT_S)
    proof.equal("the next container is called with the same run", provider.calls, [(APP, "proof")])
    break_newest(folder / "volume")
    shutil.rmtree(folder / "disk")
    # From here on the key is known from the records alone.
    del os.environ["LILO_API_KEY"]
    started = time.monotonic()
    with life(provider, lives) as url:
        proof.at_most("s until the second container serves", time.monotonic() - started, LIMIT_S)
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        client = service.create_training_client_from_state_with_optimizer(first).result(LIMIT_S)
        proof.equal("goes on with the same numbers", logprobs(client, DATA) == before, True)
        steps(client, 1)
        proof.equal(
            "and the next step, with the optimizer's state, equals the lost one",
            logprobs(client, DATA) == expected,
            True,
        )
    (resume,) = lives[1]
    proof.equal("what the second container named", resume.path, first)
    proof.equal("states it passed over", len(resume.skipped), 1)


class Told(LocalProvider):
    """Says everything to another process."""

    def __init__(self, lines: Queue) -> None:
        super().__init__()
        self.lines = lines

    def say(self, line: str) -> None:
        """Hand it on."""
        self.lines.put(line)


def container(port: int, lines: Queue) -> None:
    """What one container's process does."""
    run_trainer("killed", Told(lines), port=port)


@contextmanager
def killed_life() -> Iterator[tuple[str, Queue]]:
    """A container in a process of its own, which is killed; its address, and what it says once it serves."""
    context = multiprocessing.get_context("spawn")
    lines, port = context.Queue(), free_port()
    process = context.Process(target=container, args=(port, lines))
    process.start()
    try:
        wait_for(lines, "serving")
        yield f"http://127.0.0.1:{port}", lines
    finally:
        process.kill()
        process.join(LIMIT_S)


def wait_for(lines: Queue, words: str) -> str:
    """The next line with these words."""
    while words not in (line := lines.get(timeout=LIMIT_S)):
        pass
    return line


def kill(proof: Proof, folder: Path) -> None:
    """Train, kill the container in the middle of a step, go on in the next one on an empty disk."""
    set_surroundings(folder)
    with killed_life() as (url, _):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        client = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result(
            LIMIT_S
        )
        steps(client, 1)
        path = client.save_state("one").result(LIMIT_S).path
        before = logprobs(client, DATA)
        client.forward_backward(DATA * 50, "cross_entropy")
    shutil.rmtree(folder / "disk")
    with killed_life() as (url, lines):
        named = wait_for(lines, "goes on from").endswith(path)
        proof.equal("after a kill the next container names the newest state", named, True)
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        client = service.create_training_client_from_state_with_optimizer(path).result(LIMIT_S)
        proof.equal("and goes on with the same numbers", logprobs(client, DATA) == before, True)


def steps(client: tinker.TrainingClient, count: int) -> None:
    """Awaited steps."""
    for _ in range(count):
        client.forward_backward(DATA, "cross_entropy").result(LIMIT_S)
        client.optim_step(adam()).result(LIMIT_S)


def break_newest(volume: Path) -> None:
    """One bit of the largest file of the state `two`."""
    mine = [p for p in volume.rglob("*") if p.is_file() and "/weights/two/" in p.as_posix()]
    largest = max(mine, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def main() -> None:
    """Measure."""
    proof = Proof("deploy")
    with proof.part("objects"):
        objects(proof)
    with (
        tempfile.TemporaryDirectory(prefix="lilo-deploy-") as folder,
        proof.part("a run in two containers"),
    ):
        chain(proof, Path(folder))
    with (
        tempfile.TemporaryDirectory(prefix="lilo-deploy-") as folder,
        proof.part("a container that is killed"),
    ):
        kill(proof, Path(folder))
    proof.end()


if __name__ == "__main__":
    main()
