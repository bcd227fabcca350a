"""Qwen3.5, 3.6 and 3.8: gated delta nets, with gated softmax attention in every fourth layer. Text only.

Their files come in two forms: of the text model alone, and of the multimodal class, whose `config.json` holds the text
model's as `text_config` and whose tensors lie under `model.language_model.`. The vision tower and the layers that
predict several tokens ahead are left out by name.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from lilo_miles_backend.families.config import DecoderConfig, DeltaConfig
from lilo_miles_backend.families.shape import LayerKind, ModelShape

KINDS: dict[str, LayerKind] = {"full_attention": "softmax", "linear_attention": "delta"}
"""Layer kinds by the names in `layer_types`."""

PREDICTION, VISION = "mtp.", "model.visual."
"""Beginnings of the tensors that are left out."""


class Qwen35Config(DecoderConfig, DeltaConfig):
    """The text model's part of a `config.json` of this family."""

    model_type: Literal["qwen3_5_text"]
    layer_types: tuple[Literal["full_attention", "linear_attention"], ...]
    attn_output_gate: Literal[True] = True
    output_gate_type: Literal["swish", "silu"] = "silu"
    """Of the delta nets' gate; both names mean x sigmoid(x)."""
    mlp_only_layers: tuple[int, ...] = Field(default=(), max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _with_layer_types(cls, config: Any) -> Any:  # noqa: ANN401 - whatever the JSON holds
        """Without `layer_types`, every so-many-th layer has softmax attention."""
        if not isinstance(config, dict):
            return config
        config = dict(config)
        interval = config.pop("full_attention_interval", 4)
        if config.get("layer_types") is None:
            config["layer_types"] = [
                "linear_attention" if (index + 1) % interval else "full_attention"
                for index in range(config.get("num_hidden_layers", 0))
            ]
        rope = config.get("rope_parameters")
        if isinstance(rope, dict):
            share = config.get("partial_rotary_factor", 0.25)
            config["rope_parameters"] = {"partial_rotary_factor": share, **rope}
        return config

    @model_validator(mode="after")
    def _every_layer_has_a_kind(self) -> Qwen35Config:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers of {self.num_hidden_layers}"
            )
        return self


def read_qwen3_5(config: dict[str, Any]) -> ModelShape:
    """The shape, from a parsed `config.json`; pydantic's ValidationError where it is not built."""
    text = config.get("text_config")
    prefix, left_out = "model.", (PREDICTION,)
    if isinstance(text, dict):
        # Of the two that may be there, transformers goes by the one of the whole model.
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {"model_type": "qwen3_5_text", **text, **tied}
        prefix, left_out = "model.language_model.", (PREDICTION, VISION)
    found = Qwen35Config.model_validate(config)
    return ModelShape(
        family="qwen3_5",
        layers=tuple(KINDS[name] for name in found.layer_types),
        qk_norm=True,
        norm_offset=True,
        output_gate=True,
        delta=found.shape,
        prefix=prefix,
        left_out=left_out,
        **found.sizes,
    )
