"""Kernels that write where they read: no store may overtake another thread's load.

Which thread loads and stores an element is the compiler's choice, and need not be the same one. A value that was
computed from the load of an element is stored after it, through a barrier where it changes threads; any other value may
be there before a slower thread has loaded. Triton's interpreter has one thread, so the compiled program is looked at;
that takes no GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

pytest.importorskip("triton", reason="it comes with the CUDA builds of torch")

KERNELS = "lilo_miles_backend.ranks.kernels"
COMPILE = """
import importlib, json, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, name, types, constants = json.loads(sys.argv[1])
kernel = getattr(importlib.import_module(module), name)
signature = {one: types.get(one, "constexpr" if one in constants else "fp32") for one in kernel.arg_names}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
print(compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"])
"""
BUFFERS = dict.fromkeys(("weights", "gradients", "exp_avg", "exp_avg_sq"), "*fp32")
ADAMW = {**BUFFERS, "copy": "*bf16", "norm": "*fp64", "count": "i32"}
SWIGLU = {
    "gate_up": "*bf16",
    "grad": "*bf16",
    "inner": "i32",
    "stride": "i32",
    "grad_stride": "i32",
}


@pytest.mark.parametrize(
    ("module", "kernel", "types", "constants", "stored"),
    [
        (
            "triton_optimizer",
            "_adamw",
            ADAMW,
            {"BLOCK": 2048, "COPY": True},
            {"weights", "exp_avg", "exp_avg_sq", "copy"},
        ),
        ("triton_elementwise", "_swiglu_backward", SWIGLU, {"BLOCK": 1024}, {"gate_up"}),
    ],
)
def test_what_is_stored_over_an_input_was_computed_from_it(
    module: str,
    kernel: str,
    types: Mapping[str, str],
    constants: Mapping[str, int],
    stored: set[str],
) -> None:
    told = json.dumps((f"{KERNELS}.{module}", kernel, types, constants))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE, told],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert compiled.returncode == 0, compiled.stderr
    found = _stores(compiled.stdout)
    assert found.keys() >= stored, "the program was understood"
    assert [name for name, ordered in found.items() if not ordered] == []


def _stores(program: str) -> dict[str, bool]:
    """Of each argument that is stored to: whether every value was computed from a load of it, if there is any."""
    operands: dict[str, list[str]] = {}
    loads: dict[str, str] = {}
    stores: list[tuple[str, str]] = []
    for line in program.splitlines():
        text = line.strip().partition(" : ")[0]
        result, _, rest = text.partition(" = ") if text.startswith("%") else ("", "", text)
        names = re.findall(r"%[\w#]+", rest)
        if result:
            operands[result] = names
        if rest.startswith("tt.load"):
            loads[result] = names[0]
        elif rest.startswith("tt.store"):
            stores.append((names[0], names[1]))

    def behind(name: str) -> set[str]:
        found, waiting = {name}, [name]
        while waiting:
            new = set(operands.get(waiting.pop(), ())) - found
            found |= new
            waiting += new
        return found

    def argument(pointer: str) -> str:
        while pointer in operands:
            pointer = operands[pointer][0]
        return pointer.removeprefix("%")

    loaded = {load: argument(pointer) for load, pointer in loads.items()}
    ordered: dict[str, bool] = {}
    for pointer, value in stores:
        target = argument(pointer)
        computed_from = {loaded[name] for name in behind(value) & loaded.keys()}
        good = target in computed_from or target not in loaded.values()
        ordered[target] = ordered.get(target, True) and good
    return ordered
