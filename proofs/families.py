"""Every family trains with the numbers of its definition: loss, logprobs, LoRA gradients, in float32 and every layout.

Small random models of Llama, Qwen3 and the Qwen3.5 hybrids (text and multimodal files), rows of odd lengths packed into
one stream, in four layouts of real processes over gloo; compared with the models written out in float64
(`tests/miles_backend/exact.py`) and with transformers + PEFT. Then faults are put in on purpose, and the same comparison
must see them; weights go to Hugging Face files and back bit for bit; published sizes have the published counts.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from _proof import Proof
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _families import Compared, Errors, exported, published, round_trip, same_weights

from tests.miles_backend import reference as ref
from tests.miles_backend.broken import FAULTS, break_rank
from tests.miles_backend.layouts import laid_out, world
from tests.miles_backend.random_families import MODELS, write_model
from tests.miles_backend.test_saved_layouts import load, save

if TYPE_CHECKING:
    from lilo_definitions import Definition

LAYOUTS = {"TP1": (1, 1), "TP2": (2, 1), "CP2": (1, 2), "TP2 x CP2": (2, 2)}
"""tp, cp."""
LIMITS = {"llama": 1e-5, "qwen3": 1e-5, "qwen3_5": 2e-5}
"""max|d| / max|ref| of a tensor, by family; transformers itself is about 1e-5 from float64 on hybrids."""
EXPORT = 1e-5
SEEN = 100
"""Times the limit that an injected fault must be off at least."""


def main() -> None:
    """All models, faults, files and counts; a part that raises is one failed figure."""
    logging.disable(logging.WARNING)
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(1)
    proof = Proof("families")
    with tempfile.TemporaryDirectory(prefix="lilo-proof-") as folder:
        root = Path(folder)
        for name in MODELS:
            definition = write_model(root / name.replace(" ", "-"), name)
            with proof.part(f"{name}: runs"):
                compared = parity(proof, name, definition, root)
                if name == "qwen3_5":
                    faults(proof, definition, compared, root)
                    saved(proof, definition, root / "saved")
        with proof.part("weights: runs"):
            files(proof, root)
    with proof.part("published sizes: runs"):
        counts(proof)
    proof.end()


def parity(proof: Proof, name: str, definition: Definition, root: Path) -> Compared:
    """One model in all layouts; what it was compared with."""
    limit = LIMITS[definition.model.family]
    compared: Compared | None = None
    for layout, (tp, cp) in LAYOUTS.items():
        with world(laid_out(definition, tp=tp, cp=cp), root) as ranks:
            ranks.create("m", ref.spec(8))
            if compared is None:
                compared = Compared.of(definition, ranks.state("m"))
            errors = compared.errors(ranks)
        _show(proof, f"{name}, {layout}", errors, limit)
    assert compared is not None, "there are layouts"
    if name != "qwen3_5 multimodal":  # whose adapters PEFT knows by other names
        theirs = compared.against_transformers()
        _show(proof, f"{name}: transformers + PEFT itself", theirs, limit)
    return compared


def _show(proof: Proof, what: str, errors: Errors, limit: float) -> None:
    proof.at_most(f"{what}: loss, relative, against float64", errors.loss, limit)
    proof.at_most(f"{what}: logprobs, max|d| / max|ref|", errors.logprobs, limit)
    proof.at_most(
        f"{what}: worst of {errors.num_gradients} LoRA gradients ({errors.worst}), max|d| / max|ref|",
        errors.gradients,
        limit,
    )


def faults(proof: Proof, definition: Definition, compared: Compared, root: Path) -> None:
    """What is wrong on purpose is seen by the comparison that finds everything right."""
    limit = SEEN * LIMITS["qwen3_5"]
    for fault, (what, tp, cp) in FAULTS.items():
        with world(laid_out(definition, tp=tp, cp=cp), root) as ranks:
            ranks.create("m", ref.spec(8))
            ranks.call(break_rank, fault)
            errors = compared.errors(ranks)
        proof.at_least(f"injected: {what}: worst gradient is off by", errors.gradients, limit)


def saved(proof: Proof, definition: Definition, root: Path) -> None:
    """A hybrid's adapter, of which two ranks hold the heads in their own order, in files that have the model's."""
    root.mkdir()
    with world(laid_out(definition, tp=2), root) as ranks:
        ranks.create("m", ref.spec(4))
        state = ranks.state("m")
        save(ranks, "weights", "two")
        snapshot = save(ranks, "sampler_weights", "two")
    for tp in (1, 2):
        with world(laid_out(definition, tp=tp), root) as ranks:
            load(ranks)
            label = f"qwen3_5: saved by TP2, loaded by TP{tp}"
            proof.equal(f"{label}: same bits", same_weights(ranks.state("m"), state), True)
    proof.at_most(
        "qwen3_5: snapshot of TP2 loaded by PEFT, max|d| of logprobs against the factors in float64",
        exported(definition, state, Path(snapshot.folder)),
        EXPORT,
    )


def files(proof: Proof, root: Path) -> None:
    """Read, written and compared with what was read, in the dtypes that files come in."""
    for name in MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            source = root / f"{name.replace(' ', '-')}-{dtype}".replace("torch.", "")
            definition = write_model(source, name, dtype=dtype)
            for tp in (1, 2):
                different = round_trip(laid_out(definition, tp=tp), source, root / "written")
                label = f"{name}, {str(dtype).removeprefix('torch.')}, TP{tp}"
                proof.equal(f"{label}: tensors that differ after a round trip", different, [])


def counts(proof: Proof) -> None:
    """Published sizes on the meta device: transformers' classes, our files, our model, and what plans count with."""
    for name, found in published().items():
        same = len(set(found.values())) == 1
        billions = found["transformers"] / 1e9
        proof.figure(
            f"{name}: {billions:.2f} B parameters by {', '.join(found)}",
            sorted(set(found.values())),
            "one number",
            same,
        )
        if name.endswith("3.8-27B"):
            proof.equal(f"{name}: billions of text", float(np.round(billions, 2)), 26.9)


if __name__ == "__main__":
    main()
