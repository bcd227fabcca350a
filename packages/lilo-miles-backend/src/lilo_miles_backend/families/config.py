"""Config: the fields of a `config.json` that all families share, and what none of them computes.

Pydantic checks them where the bytes enter; what is not built (scaled RoPE, biases, a sliding window) is refused by its
name. Fields that decide nothing here are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from lilo_miles_backend.families.shape import DeltaShape

Count = Annotated[int, Field(gt=0)]


class RopeParameters(BaseModel):
    """Rotary embedding; only the unscaled form is built."""

    model_config = ConfigDict(frozen=True)

    rope_theta: float = Field(gt=0)
    rope_type: Literal["default"] = Field(
        default="default", validation_alias=AliasChoices("rope_type", "type")
    )
    """`type` in older files."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """Share of a head's features that is rotated."""


class DecoderConfig(BaseModel):
    """A decoder with RMSNorm, gated MLPs and grouped-query attention."""

    model_config = ConfigDict(frozen=True)

    hidden_act: Literal["silu"]
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    attention_dropout: float = Field(default=0.0, ge=0, le=0)
    use_sliding_window: Literal[False] = False
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: Count
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, config: Any) -> Any:  # noqa: ANN401 - whatever the JSON holds
        """Fill in what older files say otherwise or leave out."""
        if not isinstance(config, dict):
            return config
        config = dict(config)
        heads = config.get("num_attention_heads")
        if config.get("num_key_value_heads") is None:
            config["num_key_value_heads"] = heads
        if config.get("head_dim") is None and isinstance(heads, int) and heads > 0:
            config["head_dim"] = int(config.get("hidden_size", 0)) // heads
        if config.get("rope_parameters") is None and "rope_theta" in config:
            # transformers 4 wrote the base as a field of its own, and "rope_scaling" for scaled forms.
            config["rope_parameters"] = {
                "rope_theta": config["rope_theta"],
                **(config.get("rope_scaling") or {}),
            }
        return config

    @model_validator(mode="after")
    def _queries_share_keys(self) -> DecoderConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated."""
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields that a `ModelShape` has under the same names, and those of the rotation."""
        same = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "max_position_embeddings",
            "tie_word_embeddings",
        )
        rotation = {"rope_theta": self.rope_parameters.rope_theta, "rotary_dim": self.rotary_dim}
        return {name: getattr(self, name) for name in same} | rotation


class DeltaConfig(BaseModel):
    """The fields of gated delta nets."""

    model_config = ConfigDict(frozen=True)

    linear_num_key_heads: Count
    linear_num_value_heads: Count
    linear_key_head_dim: Count
    linear_value_head_dim: Count
    linear_conv_kernel_dim: Count

    @model_validator(mode="after")
    def _values_share_keys(self) -> DeltaConfig:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_key_heads {self.linear_num_key_heads} does not divide "
                f"linear_num_value_heads {self.linear_num_value_heads}"
            )
        return self

    @property
    def shape(self) -> DeltaShape:
        """The same as the layers have it."""
        return DeltaShape(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_kernel=self.linear_conv_kernel_dim,
        )
