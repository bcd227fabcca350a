"""The parity table: one model in eight layouts, each against Hugging Face + PEFT. Part of the proof `parity`.

Every layout runs as real processes over gloo (`tests/miles_backend/layouts.py`); three adapters of ranks 1, 8 and 32 are
resident together, with every B non-zero. The reference computes in float64 from the same float32 weights, so that
what is measured is the trainer's error alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from lilo_miles_backend.ranks.alignment import required_multiple

from tests.miles_backend import reference as ref
from tests.miles_backend.layouts import World, laid_out, world

if TYPE_CHECKING:
    from _proof import Proof
    from lilo_definitions import Definition
    from lilo_miles_backend.adapter_state import AdapterState

LAYOUTS = (
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (1, 1, 2),
    (2, 1, 2),
    (2, 2, 2),
    (2, 3, 1),
)
"""tp, cp, dp."""
LORA_RANKS = (1, 8, 32)
NUMBERS = 1e-5
"""max|d| / max|ref| of loss, logprobs and gradients, float32 against float64."""
ADAMW = 1e-6
VANISHING = 1e-9
"""A gradient this small beside the largest is zero in exact arithmetic: that of a query with one key, say."""
ROWS = 6
"""Of each length: one row of two tokens alone has gradients that cancel to rounding."""
STEPS = 5
COMPARED = (0, 1, 2, 5)


@dataclass(slots=True)
class Row:
    """One line of the table: the worst of all lengths and adapters."""

    layout: str
    loss: float = 0.0
    logprobs: float = 0.0
    gradients: float = 0.0
    adamw: float = 0.0
    replicas: bool = False
    repeats: bool = False


@dataclass
class References:
    """What PEFT says of each case, computed once for all layouts."""

    definition: Definition
    known: dict[tuple[int, str], tuple[float, np.ndarray, dict[str, torch.Tensor]]] = field(
        default_factory=dict
    )

    def of(
        self, lora_rank: int, case: str, state: AdapterState, datums: list[ref.Datum]
    ) -> tuple[float, np.ndarray, dict[str, torch.Tensor]]:
        """Loss, logprobs and gradients."""
        if (lora_rank, case) not in self.known:
            model = ref.Reference.of(self.definition, state, torch.float64)
            logprobs = [model.logprobs(one) for one in datums]
            loss = ref.cross_entropy(datums, logprobs)
            loss.backward()
            values = torch.cat(logprobs).detach().numpy()
            self.known[lora_rank, case] = (float(loss.detach()), values, model.gradients())
        return self.known[lora_rank, case]


def parity_table(proof: Proof, folder: Path) -> list[Row]:
    """All figures of all layouts, and the table's lines."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    model = ref.write_random_model(folder / "four", tied=True, **sizes)
    references = References(model)
    rows: list[Row] = []
    for tp, cp, dp in LAYOUTS:
        name = named(tp, cp, dp)
        row = Row(name)
        with proof.part(f"{name}: runs"):
            definition = laid_out(model, tp=tp, cp=cp, dp=dp)
            with world(definition, folder) as ranks:
                numbers(row, ranks, references, required_multiple(tp, cp, False))
                states = steps(row, ranks)
            with world(definition, folder) as again:
                repeated = steps(Row(name), again)
            row.repeats = all(map(same, states, repeated))
        show(proof, row)
        rows.append(row)
    return rows


def named(tp: int, cp: int, dp: int) -> str:
    """As `TP2 x CP2`; `TP1` for one rank."""
    degrees = [f"{axis}{size}" for axis, size in (("TP", tp), ("CP", cp), ("DP", dp)) if size > 1]
    return " x ".join(degrees) or "TP1"


def cases(multiple: int) -> dict[str, tuple[int, ...]]:
    """Lengths to run, by the name under which the reference knows them."""
    single = {1, 2, 3, max(multiple - 1, 1), multiple + 1}
    mixed = (17, 128, 1, 2, 17, 13, 5)
    return {**{f"{n}": (n,) * ROWS for n in sorted(single)}, "mixed": mixed}


def numbers(row: Row, ranks: World, references: References, multiple: int) -> None:
    """Loss, logprobs and every gradient, for all lengths and adapters in one batch each."""
    for lora_rank in LORA_RANKS:
        ranks.create(f"r{lora_rank}", ref.spec(lora_rank))
    for case, lengths in cases(multiple).items():
        rng = np.random.default_rng(len(lengths) * 1000 + lengths[0])
        datums = {r: weighted(lengths, rng) for r in LORA_RANKS}
        outputs = ranks.run(*(ref.item(f"r{r}", datums[r]) for r in LORA_RANKS))
        for lora_rank, output in zip(LORA_RANKS, outputs, strict=True):
            assert output.error is None, output.error
            model_id = f"r{lora_rank}"
            loss, logprobs, gradients = references.of(
                lora_rank, case, ranks.state(model_id), datums[lora_rank]
            )
            ours = np.concatenate([one.numpy() for one in output.logprobs])
            found = ranks.gradients(model_id)
            worst = float(np.abs(ours - logprobs).max() / np.abs(logprobs).max())
            # Python's own max leaves out what is no number.
            row.loss = largest(row.loss, abs(output.metrics["loss:sum"] - loss) / abs(loss))
            row.logprobs = largest(row.logprobs, worst)
            row.gradients = largest(row.gradients, worst_gradient(found, gradients))
            ranks.drop_gradients(model_id)
    for lora_rank in LORA_RANKS:
        ranks.unload(f"r{lora_rank}")


def weighted(lengths: tuple[int, ...], rng: np.random.Generator) -> list[ref.Datum]:
    """Random rows with weights of either sign around 1: their sum, the loss, must not cancel to rounding itself."""
    return [ref.datum(n, rng, vocab=97, weights=rng.normal(1, 1, size=n)) for n in lengths]


def worst_gradient(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest max|d| / max|ref| over all factors."""
    most = max(float(one.abs().max()) for one in wanted.values())
    errors: list[float] = []
    for name, one in wanted.items():
        scale = float(one.abs().max())
        difference = float((found[name].double() - one).abs().max())
        errors.append(difference / (most if scale < VANISHING * most else scale))
    return largest(*errors)


def largest(*errors: float) -> float:
    """NaN if one of them is."""
    return float(np.max(errors))


def steps(row: Row, ranks: World) -> list[AdapterState]:
    """Five steps of each adapter with decay and clipping; their states, whose replicas were compared."""
    params = replace(ref.ADAM, weight_decay=0.1, grad_clip_norm=1.0)
    states: list[AdapterState] = []
    for lora_rank in LORA_RANKS:
        model_id = f"r{lora_rank}"
        ranks.create(model_id, ref.spec(lora_rank))
        # Reading a state compares what several ranks hold, bit for bit.
        start = end = ranks.state(model_id)
        gradients: list[dict[str, torch.Tensor]] = []
        for step in range(STEPS):
            rng = np.random.default_rng(step)
            ranks.run(ref.item(model_id, ref.ragged((17, 2, 40), rng, vocab=97)))
            gradients.append(ranks.gradients(model_id))
            metrics = ranks.step(model_id, params)
            assert all(one == metrics[0] for one in metrics), "ranks report different steps"
            if step + 1 in COMPARED:
                end = ranks.state(model_id)
        names = list(start.weights)
        flat = [ref.flat({name: one[name] for name in names}) for one in gradients]
        theirs = ref.adamw64(ref.flat(start.weights), flat, [params] * STEPS)
        ours = ref.flat({name: end.weights[name] for name in names})
        row.adamw = largest(row.adamw, float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
        states.append(end)
    row.replicas = True
    return states


def same(left: AdapterState, right: AdapterState) -> bool:
    """Whether two states are equal bit for bit, moments included."""
    return all(
        torch.equal(ours[name], theirs[name])
        for ours, theirs in (
            (left.weights, right.weights),
            (left.exp_avg, right.exp_avg),
            (left.exp_avg_sq, right.exp_avg_sq),
        )
        for name in ours
    )


def show(proof: Proof, row: Row) -> None:
    """One line's figures."""
    lengths = "lengths 1, 2, 3, multiple - 1, multiple + 1, mixed; ranks 1, 8, 32"
    proof.at_most(f"{row.layout}: loss, relative ({lengths})", row.loss, NUMBERS)
    proof.at_most(f"{row.layout}: logprobs, max|d| / max|ref|", row.logprobs, NUMBERS)
    proof.at_most(f"{row.layout}: worst LoRA gradient, max|d| / max|ref|", row.gradients, NUMBERS)
    proof.at_most(f"{row.layout}: {STEPS} steps against float64 AdamW", row.adamw, ADAMW)
    proof.equal(f"{row.layout}: replicas bit-equal at steps {COMPARED}", row.replicas, True)
    proof.equal(f"{row.layout}: a second run has the same bits", row.repeats, True)


def markdown(rows: list[Row]) -> str:
    """The table for the documentation."""
    lines = [
        "| layout | loss | logprobs | worst gradient | 5 steps of AdamW | replicas | repeated |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.layout} | {row.loss:.1e} | {row.logprobs:.1e} | {row.gradients:.1e} | {row.adamw:.1e} | "
        f"{'equal' if row.replicas else 'differ'} | {'same bits' if row.repeats else 'differs'} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
