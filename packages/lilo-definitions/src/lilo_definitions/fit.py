"""Does a definition fit the model that its source holds? Compared before any weight is read.

Complements the checks inside `Definition`, which see only the definition's own fields. `lilo doctor` and whoever starts
a trainer call it, so that a wrong number is a sentence and not a shape error from the middle of a rank.
"""

from __future__ import annotations

from lilo_definitions.definition import Definition
from lilo_definitions.errors import InvalidDefinition
from lilo_definitions.model_config import ModelConfig, read_model_config
from lilo_definitions.source import resolve_source


def check_fits_model(definition: Definition) -> ModelConfig:
    """Compare a definition with its model, and return what was read.

    Raises:
        InvalidSource: the source does not resolve to a readable model folder.
        InvalidDefinition: numbers do not fit; the message lists all of them.
    """
    config = read_model_config(resolve_source(definition.model.source))
    if misfits := _misfits(definition, config):
        raise InvalidDefinition(
            f"definition {definition.name!r} does not fit {definition.model.source!r}: "
            + "; ".join(misfits)
        )
    return config


def _misfits(definition: Definition, config: ModelConfig) -> list[str]:
    """Every number that does not fit, as a sentence."""
    model = definition.model
    smallest = min(config.hidden_size, config.intermediate_size)
    claims: list[tuple[bool, str]] = [
        (
            model.family == config.model_type,
            f"family is {model.family!r}, config.json says {config.model_type!r}",
        ),
        (
            model.vocab_size == config.vocab_size,
            f"vocab_size is {model.vocab_size}, config.json says {config.vocab_size}",
        ),
        (
            model.context <= config.max_position_embeddings,
            f"model context {model.context} is over the {config.max_position_embeddings} positions of config.json",
        ),
        (
            definition.lora.max_rank <= smallest,
            f"max_rank {definition.lora.max_rank} is over the smallest matrix side {smallest}",
        ),
    ]
    undivided = config.architecture().undivided(definition.topology.tp)
    return [*(sentence for holds, sentence in claims if not holds), *undivided]
