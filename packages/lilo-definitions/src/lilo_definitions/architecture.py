"""Architecture: the sizes of a model that decide what it costs: layers, widths, heads, vocabulary.

Data for planning without the model's files; a trainer reads `config.json` instead. The counts follow transformers'
classes for the same `model_type`, and a test holds them equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Family: TypeAlias = Literal["qwen3", "qwen3_5", "llama"]
Kind: TypeAlias = Literal["softmax", "linear"]
"""Of a layer's attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """A gated delta net in place of softmax attention: Yang et al., arXiv:2412.06464."""

    key_heads: int
    value_heads: int
    key_dim: int = 128
    """Features of a key head."""
    value_dim: int = 128
    conv_kernel: int = 4
    """Tokens that the short convolution before it sees."""
    interval: int = 4
    """Every so-many-th layer has softmax attention, the others are linear."""

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        """Features of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One decoder-only model; text only, without vision towers and prediction heads that training leaves out."""

    family: Family
    layers: int
    hidden: int
    """Width of the residual stream."""
    inner: int
    """Width inside the gated MLP."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; query heads share them."""
    head_dim: int
    vocab: int
    context: int
    """Longest sequence in tokens."""
    tied: bool
    """Whether the output layer is the embedding."""
    linear: LinearAttention | None = None
    """None: every layer has softmax attention."""

    def undivided(self, tp: int) -> tuple[str, ...]:
        """Why Lilo's trainer cannot split this model over `tp` tensor-parallel ranks, in its words; empty if it can.

        Sizes go by their names in a `config.json`. Query heads are whole groups of key-value heads.
        """
        sizes = {"num_key_value_heads": self.kv_heads, "intermediate_size": self.inner}
        if self.linear is not None:
            sizes["linear_num_key_heads"] = self.linear.key_heads
        return tuple(
            f"topology.tp {tp} does not divide {name} {size}"
            for name, size in sizes.items()
            if size % tp
        )

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.family != "llama"

    @property
    def output_gate(self) -> bool:
        """Whether the query projection also makes a gate for the attention's output."""
        return self.family == "qwen3_5"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of each layer, first layer first."""
        if self.linear is None:
            return ("softmax",) * self.layers
        every = self.linear.interval
        return tuple("linear" if (i + 1) % every else "softmax" for i in range(self.layers))

    @property
    def softmax_layers(self) -> int:
        """Layers with softmax attention."""
        return self.layers if self.linear is None else self.layers // self.linear.interval

    @property
    def linear_layers(self) -> int:
        """Layers with linear attention."""
        return self.layers - self.softmax_layers

    @property
    def attention_width(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Output features of the fused projection to queries, output gate, keys and values."""
        return self.attention_width * (2 if self.output_gate else 1) + 2 * self.kv_width

    @property
    def linear_in_width(self) -> int:
        """Output features of a linear layer's projections: queries, keys, values, gate, decay and beta."""
        if self.linear is None:
            return 0
        return self.linear.conv_channels + self.linear.value_width + 2 * self.linear.value_heads

    @property
    def softmax_weights(self) -> int:
        """Matrix elements of one softmax attention: projections in and out."""
        return self.hidden * (self.qkv_width + self.attention_width)

    @property
    def linear_weights(self) -> int:
        """Matrix elements of one linear attention: projections in and out."""
        value_width = self.linear.value_width if self.linear else 0
        return self.hidden * (self.linear_in_width + value_width)

    @property
    def mlp_weights(self) -> int:
        """Matrix elements of one MLP: gate, up, down."""
        return 3 * self.hidden * self.inner

    @property
    def layer_weights(self) -> int:
        """Matrix elements of all layers."""
        return (
            self.softmax_layers * self.softmax_weights
            + self.linear_layers * self.linear_weights
            + self.layers * self.mlp_weights
        )

    @property
    def head_weights(self) -> int:
        """Matrix elements of the output layer, also where it is the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, as transformers counts them."""
        norms = self.layers * 2 * self.hidden + self.hidden
        if self.qk_norm:
            norms += self.softmax_layers * 2 * self.head_dim
        embeddings = self.head_weights * (1 if self.tied else 2)
        return embeddings + self.layer_weights + norms + self.linear_layers * self._small_linear

    @property
    def _small_linear(self) -> int:
        """Of one linear attention what is no matrix: convolution, decay and its bias, output norm."""
        if self.linear is None:
            return 0
        line = self.linear
        return line.conv_kernel * line.conv_channels + 2 * line.value_heads + line.value_dim
