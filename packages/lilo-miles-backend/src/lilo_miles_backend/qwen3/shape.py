"""ModelShape: the sizes of a base model, read from its `config.json` and checked against what is built here.

Trainer and sampler read the same folder with it; what neither computes (scaled RoPE, a sliding window) is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from lilo_engine.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class RopeParameters(BaseModel):
    """Rotary embedding; only the unscaled form is built."""

    model_config = ConfigDict(frozen=True)

    rope_theta: float
    rope_type: Literal["default"] = "default"


class ModelShape(BaseModel):
    """The fields of a Qwen3 `config.json` that decide the computation; others are ignored."""

    model_config = ConfigDict(frozen=True)

    model_type: Literal["qwen3"]
    hidden_act: Literal["silu"]
    attention_bias: Literal[False] = False
    attention_dropout: float = Field(default=0.0, ge=0, le=0)
    use_sliding_window: Literal[False] = False
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every module that may carry an adapter, by its name inside a layer, and `lm_head`."""
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden_size),
            "self_attn.k_proj": (kv, self.hidden_size),
            "self_attn.v_proj": (kv, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, q),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
            "lm_head": (self.vocab_size, self.hidden_size),
        }

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the files must hold, by its Hugging Face name."""
        hidden, linears = (self.hidden_size,), self.linears
        head = linears.pop("lm_head")
        norms = {
            "input_layernorm": hidden,
            "post_attention_layernorm": hidden,
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
        }
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": head,
            "model.norm.weight": hidden,
        }
        if not self.tie_word_embeddings:
            found["lm_head.weight"] = head
        for layer in range(self.num_hidden_layers):
            for name, size in {**linears, **norms}.items():
                found[f"model.layers.{layer}.{name}.weight"] = size
        return found

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read `folder/config.json`.

        Raises:
            InvalidRequest: the file is missing, or names something that is not built here.
        """
        path = folder / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"cannot read the model configuration {path}: {error}") from error
        # transformers 4 wrote the rotary base as a field of its own, and "rope_scaling" for scaled forms.
        if "rope_parameters" not in config and "rope_theta" in config:
            scaling = config.get("rope_scaling") or {}
            config["rope_parameters"] = {"rope_theta": config["rope_theta"], **scaling}
        try:
            return cls.model_validate(config)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc']))} is {e['input']!r}: {e['msg']}"
                for e in error.errors()
            )
            raise InvalidRequest(
                f"{path} describes a model that is not built here: {problems}"
            ) from error
