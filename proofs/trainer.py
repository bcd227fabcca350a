"""The trainer's speed beside Hugging Face + PEFT in the same run: tokens per CPU second at 1M, 10M and 60M parameters."""

from __future__ import annotations

import logging

from _proof import Proof
from lilo_miles_backend.bench.sizes import SIZES
from lilo_miles_backend.bench.trainer import measure

ROUNDS = 7
AGAINST_PEFT = {"1M": 0.95, "10M": 1.0, "60M": 1.0}
FOUR_AGAINST_ONE = 0.9
"""From 10M up; below, the cost of a call dominates."""


def main() -> None:
    """All figures of all sizes."""
    logging.disable(logging.WARNING)
    proof = Proof("trainer")
    for name in SIZES:
        with proof.part(f"{name}: runs"):
            figures = measure((name,), ROUNDS)[name]
            proof.at_least(
                f"{name}: one adapter against Hugging Face + PEFT, tokens per CPU second",
                figures["one_adapter_against_hf_peft"],
                AGAINST_PEFT[name],
            )
            if name != "1M":
                proof.at_least(
                    f"{name}: four adapters against one, tokens per CPU second",
                    figures["four_adapters_against_one"],
                    FOUR_AGAINST_ONE,
                )
                proof.at_least(
                    f"{name}: four adapters in one microbatch against one",
                    figures["four_adapters_packed_against_one"],
                    FOUR_AGAINST_ONE,
                )
            proof.at_most(
                f"{name}: losses of all methods, relative difference",
                figures["largest_relative_difference_of_losses"],
                1e-5,
            )
    proof.end()


if __name__ == "__main__":
    main()
