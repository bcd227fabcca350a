"""ModelShape: the sizes of a base model and how its layers compute, whatever its family; and the tensors of its files.

Plain data that `read.py` makes from a `config.json`. Fields that Hugging Face's configurations have keep their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_definitions.architecture import Family

from lilo_miles_backend.families.linear import Linear, input_side, output_side, rows
from lilo_miles_backend.shards import Section

LayerKind: TypeAlias = Literal["softmax", "delta"]
"""What mixes tokens in a layer: softmax attention, or a gated delta net."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of a gated delta net: Yang et al., arXiv:2412.06464."""

    key_heads: int
    value_heads: int
    """Value head h uses key head h // (value_heads / key_heads)."""
    key_dim: int
    """Features of a key head, and of a query head."""
    value_dim: int
    conv_kernel: int
    """Tokens that the causal convolution sees, the current one among them."""

    @property
    def key_width(self) -> int:
        """Features of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Features of all values, and of the output."""
        return self.value_heads * self.value_dim

    @property
    def qkv_sections(self) -> tuple[Section, ...]:
        """Queries, keys and values along one dimension, each cut over heads."""
        keys = self.key_width
        return (
            Section(start=0, width=self.key_dim, count=self.key_heads),
            Section(start=keys, width=self.key_dim, count=self.key_heads),
            Section(start=2 * keys, width=self.value_dim, count=self.value_heads),
        )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One decoder-only model, text only."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerKind, ...]
    """The kind of each layer, the first one first."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_theta: float
    rotary_dim: int
    """Of a head's features, how many are rotated: the first ones."""
    qk_norm: bool
    """Queries and keys are normalised per head, before they are rotated."""
    norm_offset: bool = False
    """The files store norm weights minus one, but for a delta net's own norm."""
    output_gate: bool = False
    """`q_proj` makes a gate for attention's output too: its rows are, head by head, [query; gate]."""
    delta: DeltaShape | None = None
    """Of the delta layers; None where there are none."""
    prefix: str = "model."
    """Of all tensor names but the head's."""
    left_out: tuple[str, ...] = ()
    """Beginnings of names that the files may hold and that are not read: vision towers, prediction layers."""

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def head(self) -> Linear:
        """`lm_head`, which is the embedding where they are tied."""
        return output_side("unembed", self.hidden_size, rows(self.vocab_size))

    def linears(self, kind: LayerKind) -> dict[str, Linear]:
        """Every linear of a layer of this kind by its name in the layer; those that read one input are neighbours."""
        hidden, inner = self.hidden_size, self.intermediate_size
        mixer = self._softmax_linears() if kind == "softmax" else self._delta_linears()
        return mixer | {
            "mlp.gate_proj": output_side("mlp", hidden, rows(inner)),
            "mlp.up_proj": output_side("mlp", hidden, rows(inner)),
            "mlp.down_proj": input_side("mlp", hidden, rows(inner)),
        }

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the files must hold, by its Hugging Face name."""
        hidden, head = (self.hidden_size,), (self.head.out_features, self.head.in_features)
        found: dict[str, tuple[int, ...]] = {
            f"{self.prefix}embed_tokens.weight": head,
            f"{self.prefix}norm.weight": hidden,
        }
        if not self.tie_word_embeddings:
            found["lm_head.weight"] = head
        for index, kind in enumerate(self.layers):
            layer = f"{self.prefix}layers.{index}."
            for name, linear in self.linears(kind).items():
                found[f"{layer}{name}.weight"] = (linear.out_features, linear.in_features)
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{layer}{name}.weight"] = hidden
            found |= {f"{layer}{name}": size for name, size in self._small(kind).items()}
        return found

    @property
    def divisors(self) -> dict[str, int]:
        """Sizes that the number of tensor-parallel ranks must divide, by Hugging Face's names."""
        found = {
            "num_key_value_heads": self.num_key_value_heads,
            "intermediate_size": self.intermediate_size,
        }
        if self.delta is not None:
            found["linear_num_key_heads"] = self.delta.key_heads
        return found

    def _softmax_linears(self) -> dict[str, Linear]:
        hidden, size = self.hidden_size, self.head_dim
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        queries = (Section(start=0, width=size, count=heads),)
        if self.output_gate:
            # A rank keeps all its queries, then all its gates.
            queries = tuple(
                Section(start=start, width=size, count=heads, stride=2 * size)
                for start in (0, size)
            )
        keys = (Section(start=0, width=size, count=groups),)
        return {
            "self_attn.q_proj": output_side("attn", hidden, queries),
            "self_attn.k_proj": output_side("attn", hidden, keys),
            "self_attn.v_proj": output_side("attn", hidden, keys),
            "self_attn.o_proj": input_side(
                "attn", hidden, (Section(start=0, width=size, count=heads),)
            ),
        }

    def _delta_linears(self) -> dict[str, Linear]:
        delta, hidden = self.delta, self.hidden_size
        assert delta is not None, "a model with delta layers has their sizes"
        values = (Section(start=0, width=delta.value_dim, count=delta.value_heads),)
        heads = rows(delta.value_heads)
        return {
            "linear_attn.in_proj_qkv": output_side("attn", hidden, delta.qkv_sections),
            "linear_attn.in_proj_z": output_side("attn", hidden, values),
            # Sampling engines dropped or refused adapters of these two, so they have none.
            "linear_attn.in_proj_b": output_side("attn", hidden, heads, adaptable=False),
            "linear_attn.in_proj_a": output_side("attn", hidden, heads, adaptable=False),
            "linear_attn.out_proj": input_side("attn", hidden, values),
        }

    def _small(self, kind: LayerKind) -> dict[str, tuple[int, ...]]:
        """A mixer's tensors that belong to no linear."""
        if kind == "softmax":
            names = ("q_norm", "k_norm") if self.qk_norm else ()
            return {f"self_attn.{name}.weight": (self.head_dim,) for name in names}
        assert self.delta is not None, "a model with delta layers has their sizes"
        heads = (self.delta.value_heads,)
        return {
            "linear_attn.conv1d.weight": (self.delta.conv_channels, 1, self.delta.conv_kernel),
            "linear_attn.A_log": heads,
            "linear_attn.dt_bias": heads,
            "linear_attn.norm.weight": (self.delta.value_dim,),
        }
