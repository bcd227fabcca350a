"""The recipe for two machines, run as the page for platform engineers has it, on two network namespaces."""

import re
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, end, namespaces_refused, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/platform.md"
LILO = str(Path(sys.executable).parent / "lilo")
KEY = "tml-two-machines"
LIMIT_S = 150.0
"""For one program to say that it is ready: Ray and torch are read from a cold disk by two busy cores."""
LOOP = """
import tinker
from tinker import types

ids = list(b"2+2=4")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]}
)
service = tinker.ServiceClient(base_url="http://127.0.0.1:8010")
client = service.create_lora_training_client(base_model="tiny", rank=4).result(60)
client.forward_backward([datum] * 3, "cross_entropy").result(60)
client.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
client.save_state("one").result(60)
service.close("success").result(20)
"""
"""What a researcher runs on the first machine. A process of its own: the SDK's threads would outlive the namespace."""


def recipe(hosts: tuple[Host, Host], folder: Path) -> list[list[str]]:
    """The commands of the page, with the addresses and the folder that are there."""
    block = PAGE.read_text("utf-8").partition("<!-- recipe: start -->")[2]
    text = block.partition("<!-- recipe: end -->")[0]
    for written, there in (
        ("10.0.0.1", hosts[0].address),
        ("10.0.0.2", hosts[1].address),
        ("/shared/lilo", str(folder / "shared")),
    ):
        assert written in text, f"the recipe has no {written}"
        text = text.replace(written, there)
    return [line.split() for line in text.split("\n") if re.match(r" +(\S+=\S+ )*lilo ", line)]


def test_the_recipe_for_two_machines_trains_and_ends_with_its_head(tmp_path):
    if reason := namespaces_refused():
        pytest.skip(reason)
    running = []

    def start(host: Host, command: list[str], words: bytes):
        log = tmp_path / f"{len(running)}.log"
        log.touch()
        program = command.index("lilo")
        variables = dict(word.split("=", 1) for word in command[:program])
        process = host.run([LILO, *command[program + 1 :]], log, LILO_API_KEY=KEY, **variables)
        running.append(process)
        until = time.monotonic() + LIMIT_S
        while words not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        return process

    with two_hosts(apart=True) as hosts:
        head, join, serve = recipe(hosts, tmp_path)
        try:
            first = start(hosts[0], head, b"the head of a cluster is at")
            second = start(hosts[1], join, b"lends its devices")
            server = start(hosts[0], serve, b"serving two-nodes at http://127.0.0.1:8010")
            log = tmp_path / "loop.log"
            loop = hosts[0].run([sys.executable, "-c", LOOP], log, TINKER_API_KEY=KEY)
            running.append(loop)
            assert loop.wait(LIMIT_S) == 0, log.read_text()
            assert {path.name for path in (tmp_path / "shared").rglob("*.distcp")} == {
                "__0_0.distcp",
                "__1_0.distcp",
            }
            end(server)
            end(first)
            assert second.wait(20) == 0
        finally:
            for process in reversed(running):
                end(process)
