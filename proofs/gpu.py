"""What needs a GPU: exactness, speed and memory on this machine's CUDA devices, by benchmarks/gpu/run.py; minutes.

`make prove-gpu ARGS="--only slice peers --out FOLDER"`: arguments are those of that script. Without a CUDA device nothing is
measured, which is said, and the exit code is 2.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _proof import Proof

RUN = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu" / "run.py"
NO_DEVICE = 2
"""Exit code of the script where there is no CUDA device."""


def main() -> None:
    """Run the cases, then print each bound as a figure."""
    arguments = sys.argv[1:]
    proof = Proof("gpu")
    with tempfile.TemporaryDirectory(prefix="lilo-gpu-") as folder:
        out = arguments if "--out" in arguments else [*arguments, "--out", folder]
        code = subprocess.run([sys.executable, str(RUN), *out], check=False).returncode
        if code == NO_DEVICE:
            sys.exit(NO_DEVICE)
        lines = Path(out[out.index("--out") + 1]) / "lines.jsonl"
        for text in lines.read_text("utf-8").splitlines():
            line = json.loads(text)
            if "figure" in line:
                figure = f"{line['case']}: {line['figure']}"
                proof.figure(figure, line["measured"], line["required"], line["pass"])
    proof.figure("exit code of the run", code, "== 0", code == 0)
    proof.end()


if __name__ == "__main__":
    main()
