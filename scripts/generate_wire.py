"""Regenerate the protobuf code of `lilo_engine.requests.proto` from its .proto file; run it after editing that.

The compiler is pinned to the oldest one whose output every protobuf runtime from 6.31 on accepts, and runs in
an environment of its own, so that the floor of lilo-engine does not follow the compiler of the day.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

COMPILER = ("grpcio-tools==1.73.1", "mypy-protobuf==3.7.0", "setuptools<81")
SOURCE_ROOT = Path(__file__).resolve().parents[1] / "packages/lilo-engine/src"
PROTO = "lilo_engine/requests/proto/tinker_public.proto"


def main() -> int:
    """Write `tinker_public_pb2.py` and its stub beside the .proto file."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        print("generate_wire: uv is not on the PATH; run `make setup` first", file=sys.stderr)
        return 1
    packages = [part for package in COMPILER for part in ("--with", package)]
    command = [
        uv,
        "run",
        "--isolated",
        "--no-project",
        *packages,
        "python",
        "-m",
        "grpc_tools.protoc",
    ]
    command += [
        f"-I{SOURCE_ROOT}",
        f"--python_out={SOURCE_ROOT}",
        f"--mypy_out={SOURCE_ROOT}",
        PROTO,
    ]
    return subprocess.run(command, check=False, cwd=SOURCE_ROOT, timeout=300).returncode


if __name__ == "__main__":
    sys.exit(main())
