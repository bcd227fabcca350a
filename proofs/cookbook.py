"""Two recipes of tinker-cookbook 0.6.1, unmodified, train against `lilo serve tiny`."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tinker
from _packages import install
from _proof import Proof, tiny_server
from lilo_engine.demo.server import LocalServer

HERE = Path(__file__).resolve().parent
COOKBOOK = "tinker-cookbook==0.6.1"
NEEDS = (
    "chz",
    "datasets",
    "blobfile",
    "termcolor",
    "cloudpickle",
    "pylatexenc",
    "tiktoken",
    "pyarrow",
    "dill",
    "multiprocess",
    "xxhash",
    "pandas",
    "python-dateutil",
    "pytz",
    "six",
    "lxml",
    "pycryptodomex",
    "regex",
    "pillow",
)
"""What the two recipes import and the environment of this repository has not: the cookbook asks for more, and one of
its needs cannot be had from the index."""
STEPS = 6
SETTINGS = {
    "sl_loop": ["batch_size=8", "max_length=128", "learning_rate=0.01"],
    "rl_loop": ["batch_size=4", "group_size=4", "max_tokens=8", "loss_fn=importance_sampling"],
}
LIMIT_S = 300.0


def main() -> None:
    """Install, check that nothing was changed, run both."""
    proof = Proof("cookbook")
    with tempfile.TemporaryDirectory(prefix="lilo-cookbook-") as folder:
        site = Path(folder) / "site"
        with proof.part("packages"):
            # In a folder of its own, beside this environment.
            install("--no-deps", "--target", str(site), COOKBOOK, *NEEDS)
        with tiny_server() as server:
            for recipe in SETTINGS:
                with proof.part(recipe):
                    proof.equal(f"{recipe}: as its authors wrote it", changed(site, recipe), False)
                    run(proof, server, site, Path(folder) / recipe, recipe)
    proof.end()


def changed(site: Path, recipe: str) -> bool:
    """Whether a recipe's file is another than the wheel's own list says."""
    name = f"tinker_cookbook/recipes/{recipe}.py"
    (record,) = site.glob("tinker_cookbook-*.dist-info/RECORD")
    listed = {row[0]: row[1] for row in csv.reader(record.read_text("utf-8").splitlines())}
    digest = hashlib.sha256((site / name).read_bytes()).digest()
    return listed[name] != "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def run(proof: Proof, server: LocalServer, site: Path, log: Path, recipe: str) -> None:
    """Run a recipe to its end and look at what it measured and left."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "TINKER_API_KEY": server.api_key,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    common = [f"base_url={server.base_url}", "model_name=tiny", "lora_rank=8", "save_every=4"]
    settings = [*common, f"log_path={log}", f"max_steps={STEPS}", *SETTINGS[recipe]]
    command = [sys.executable, HERE / "_cookbook_recipe.py", recipe, *settings]
    ended = subprocess.run(
        command, env=environment, timeout=LIMIT_S, check=False, capture_output=True, text=True
    )
    print(ended.stderr, file=sys.stderr)
    proof.equal(f"{recipe}: exit status", ended.returncode, 0)
    rows = metrics(log)
    proof.equal(f"{recipe}: steps", len(rows), STEPS)
    if recipe == "sl_loop":
        first, last = rows[0]["train_mean_nll"], rows[-1]["train_mean_nll"]
        proof.figure("sl_loop: loss of the last step", last, f"below {first:.3f}", last < first)
    else:
        rewards = {row["reward/total"] for row in rows}
        proof.figure("rl_loop: rewards", sorted(rewards), "not all equal", len(rewards) > 1)
    proof.equal(f"{recipe}: checkpoints left", saved(server, log), ["000004", "final", "final"])


def metrics(log: Path) -> list[dict[str, Any]]:
    """What the recipe logged, step by step."""
    lines = (log / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def saved(server: LocalServer, log: Path) -> list[str]:
    """Names of the checkpoints that the recipe noted and the server lists."""
    lines = (log / "checkpoints.jsonl").read_text("utf-8").splitlines()
    noted = {
        value
        for line in lines
        for key, value in json.loads(line).items()
        if key.endswith("_path") and value
    }
    rest = tinker.RestClient(base_url=server.base_url, api_key=server.api_key)
    listed = rest.list_user_checkpoints(limit=100).result().checkpoints
    return sorted(one.tinker_path.split("/")[-1] for one in listed if one.tinker_path in noted)


if __name__ == "__main__":
    main()
