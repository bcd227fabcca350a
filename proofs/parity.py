"""The trainer's numbers equal Hugging Face + PEFT and float64, in every layout: loss, gradients, AdamW, exported adapter.

On the same weights, with every B non-zero: the shipped `tiny` (tied embeddings, trained; on the sums it was trained on) and
two random Qwen3 models, tied and untied, on rows of 1 to 128 tokens. What is compared with is in
`tests/miles_backend/reference.py`. Layouts of several ranks are in `_layouts.py`; `--table FILE` also writes their table
into the documentation, between its markers.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from _proof import Proof
from lilo_definitions import get
from lilo_engine.commands.command import Destination
from lilo_engine.operations.operation import ModelId
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _layouts import markdown, parity_table

from tests.miles_backend import reference as ref

if TYPE_CHECKING:
    from lilo_definitions import Definition
    from lilo_miles_backend import MilesBackend

GRADIENTS = 1e-5
"""max|d| / max|ref| per tensor, float32 on both sides."""
ADAMW = 1e-6
EXPORT = 1e-4
LENGTHS = (1, 2, 17, 128, 17)
MODEL = ModelId("proof")
BEGIN, END = "<!-- parity table: make prove-parity -->", "<!-- end of the parity table -->"


def main() -> None:
    """All figures of all models; a part that raises is one failed figure."""
    logging.disable(logging.WARNING)
    disable_progress_bar()
    parser = argparse.ArgumentParser(description="Compare the trainer with Hugging Face + PEFT.")
    parser.add_argument("--table", type=Path, help="document whose table to write anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    proof = Proof("parity")
    with tempfile.TemporaryDirectory(prefix="lilo-proof-") as folder:
        models = {
            "tiny": get("tiny"),
            "tied": ref.write_random_model(Path(folder) / "tied", tied=True),
            "untied": ref.write_random_model(Path(folder) / "untied", tied=False),
        }
        for name, definition in models.items():
            backend = ref.start(definition, Path(folder) / "checkpoints" / name)
            for part in (against_peft, adamw, exported):
                backend.create_adapter(MODEL, ref.spec(8))
                with proof.part(f"{name}: {part.__name__}"):
                    ref.randomize(backend, MODEL)
                    part(proof, name, backend, definition)
                backend.unload(MODEL)
            backend.close()
        rows = parity_table(proof, Path(folder))
    if table := arguments.table:
        before, _, rest = table.read_text("utf-8").partition(BEGIN)
        table.write_text(f"{before}{BEGIN}\n{markdown(rows)}{END}{rest.partition(END)[2]}", "utf-8")
    proof.end()


def data(name: str, definition: Definition, seed: int) -> list[ref.Datum]:
    """Datums on which the model's numbers are well conditioned."""
    rng = np.random.default_rng(seed)
    if name == "tiny":
        return ref.sums(12, rng)
    return ref.ragged(LENGTHS, rng, vocab=definition.model.vocab_size)


def against_peft(proof: Proof, name: str, backend: MilesBackend, definition: Definition) -> None:
    """Loss, logprobs and every LoRA gradient of all eight kinds of module."""
    datums = data(name, definition, 0)
    (output,) = ref.run(backend, ref.item(MODEL, datums))
    proof.equal(f"{name}: error of the pass", output.error, None)
    reference = ref.Reference.of(definition, ref.state_of(backend, MODEL))
    expected = [reference.logprobs(one) for one in datums]
    loss = ref.cross_entropy(datums, expected)
    loss.backward()
    difference = abs(output.metrics["loss:sum"] - float(loss.detach()))
    proof.at_most(f"{name}: loss, relative", difference / abs(float(loss.detach())), GRADIENTS)
    ours = np.concatenate([tensor.numpy() for tensor in output.logprobs])
    theirs = torch.cat(expected).detach().numpy()
    proof.at_most(
        f"{name}: logprobs, max|d| / max|ref|",
        float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
        GRADIENTS,
    )
    gradients = ref.gradients_of(backend, MODEL)
    kinds = {module.rpartition(".")[2] for module in ref.modules_of(gradients)}
    proof.equal(f"{name}: kinds of module", sorted(kinds), sorted(ref.MODULES))
    errors = {
        factor: ref.relative(gradients[factor], gradient)
        for factor, gradient in reference.gradients().items()
    }
    worst = max(errors, key=errors.__getitem__)
    proof.at_most(
        f"{name}: worst of {len(errors)} LoRA gradients ({worst}), max|d| / max|ref|",
        errors[worst],
        GRADIENTS,
    )


def adamw(proof: Proof, name: str, backend: MilesBackend, definition: Definition) -> None:
    """Five steps with decay and clipping, given the trainer's own gradients."""
    params = replace(ref.ADAM, weight_decay=0.1, grad_clip_norm=1.0)
    start = ref.flat(ref.state_of(backend, MODEL).weights)
    gradients: list[np.ndarray] = []
    for step in range(5):
        ref.run(backend, ref.item(MODEL, data(name, definition, step)))
        gradients.append(ref.flat(ref.gradients_of(backend, MODEL)))
        backend.optim_step(MODEL, params)
    ours = ref.flat(ref.state_of(backend, MODEL).weights)
    theirs = ref.adamw64(start, gradients, [params] * 5)
    proof.at_most(
        f"{name}: 5 AdamW steps against float64, max|d| / max|ref|",
        float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
        ADAMW,
    )


def exported(proof: Proof, name: str, backend: MilesBackend, definition: Definition) -> None:
    """The published sampler folder, loaded by PEFT."""
    capture = backend.capture(MODEL, "sampler")
    destination = Destination(
        run_id=MODEL, kind="sampler_weights", name="s", order=1, overwrite=False
    )
    published = backend.persist(capture, destination)
    datums = data(name, definition, 9)
    (output,) = ref.run(backend, ref.item(MODEL, datums), forward_only=True)
    peft = ref.Reference.exported(definition, Path(published.folder))
    with torch.no_grad():
        theirs = torch.cat([peft.logprobs(one) for one in datums]).numpy()
    ours = np.concatenate([tensor.numpy() for tensor in output.logprobs])
    proof.at_most(
        f"{name}: exported adapter in PEFT, max|d| of logprobs",
        float(np.abs(ours - theirs).max()),
        EXPORT,
    )


if __name__ == "__main__":
    main()
