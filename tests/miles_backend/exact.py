"""Exact: the models of all families in float64, written out from their definitions; reads a folder, knows no other code.

transformers computes parts of the hybrids in float32 whatever it is asked, so that it can be no more exact than what is
compared with it. This is slow, token by token, and as plain as it can be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lilo_engine.operations.datum import Datum
from lilo_miles_backend.adapter_state import AdapterState
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]


class Exact:
    """One model with one adapter."""

    def __init__(self, folder: Path, state: AdapterState) -> None:
        config = json.loads((folder / "config.json").read_bytes())
        self._config: dict[str, Any] = config.get("text_config") or config
        self._hybrid = self._config["model_type"].startswith("qwen3_5")
        self._weights = {
            name: tensor.double()
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        embedding = next(name for name in self._weights if name.endswith("embed_tokens.weight"))
        self._prefix = embedding.removesuffix("embed_tokens.weight")
        self._scale = state.spec.alpha / state.spec.lora_rank
        self._factors = {
            name: tensor.double().requires_grad_() for name, tensor in state.weights.items()
        }

    def logprobs(self, datum: Datum) -> torch.Tensor:
        """[n] or [n, k], differentiable."""
        ids = torch.from_numpy(datum.tokens.numpy().astype(np.int64))
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"].numpy().copy())
        wide = targets.reshape(targets.shape[0], -1)
        return self._logits(ids).log_softmax(-1).gather(1, wide).reshape(targets.shape)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of every factor."""
        found = {name: factor.grad for name, factor in self._factors.items()}
        return {name: grad for name, grad in found.items() if grad is not None}

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        embedding = self._weights[f"{self._prefix}embed_tokens.weight"]
        x = embedding[ids]
        for index in range(self._config["num_hidden_layers"]):
            layer = f"{self._prefix}layers.{index}."
            normed = self._norm(x, f"{layer}input_layernorm")
            is_delta = f"{layer}linear_attn.A_log" in self._weights
            x = x + (self._delta(normed, layer) if is_delta else self._attention(normed, layer))
            normed = self._norm(x, f"{layer}post_attention_layernorm")
            gate, up = (self._linear(normed, f"{layer}mlp.{n}_proj") for n in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"{layer}mlp.down_proj")
        x = self._norm(x, f"{self._prefix}norm")
        head = self._weights.get("lm_head.weight", embedding)
        return x @ head.t() + self._lora(x, "lm_head")

    def _attention(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        size = self._config["head_dim"]
        q, k, v = (
            self._linear(x, f"{layer}self_attn.{n}_proj").unflatten(-1, (-1, size)) for n in "qkv"
        )
        gate = None
        if self._hybrid:  # head by head: query, gate
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        if f"{layer}self_attn.q_norm.weight" in self._weights:
            q = self._norm(q, f"{layer}self_attn.q_norm")
            k = self._norm(k, f"{layer}self_attn.k_norm")
        q, k = self._rotated(q), self._rotated(k)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * size**-0.5
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        out = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        if gate is not None:
            out = out * gate.sigmoid()
        return self._linear(out.flatten(1), f"{layer}self_attn.o_proj")

    def _delta(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        name, config = f"{layer}linear_attn.", self._config
        heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
        qkv, z, b, a = (self._linear(x, f"{name}in_proj_{part}") for part in ("qkv", "z", "b", "a"))
        kernel = self._weights[f"{name}conv1d.weight"][:, 0]
        width = kernel.shape[1]
        longer = F.pad(qkv, (0, 0, width - 1, 0))
        y = torch.stack([(longer[t : t + width] * kernel.t()).sum(0) for t in range(len(x))])
        keys = groups * config["linear_key_head_dim"]
        q, k, v = (
            part.unflatten(-1, (count, -1))
            for part, count in zip(
                F.silu(y).split((keys, keys, y.shape[1] - 2 * keys), -1),
                (groups, groups, heads),
                strict=True,
            )
        )
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(heads // groups, 1) for t in (q, k))
        speed = self._weights[f"{name}A_log"].exp()
        decay = (-speed * F.softplus(a + self._weights[f"{name}dt_bias"])).exp()
        out = _recurrence(q * q.shape[-1] ** -0.5, k, v, decay, b.sigmoid())
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
        normed = normed * self._weights[f"{name}norm.weight"]
        gated = normed * F.silu(z.unflatten(-1, (heads, -1)))
        return self._linear(gated.flatten(1), f"{name}out_proj")

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        rope = self._config["rope_parameters"]
        size = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        # Angles are float32 by definition: at far positions their rounding is more than that of anything else.
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        angles = torch.outer(torch.arange(len(x)).float(), 1.0 / rope["rope_theta"] ** exponents)
        cos, sin = (t.double()[:, None] for t in (angles.cos(), angles.sin()))
        first, second, rest = x.split((size // 2, size // 2, x.shape[-1] - size), -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"] + (1 if self._hybrid else 0)
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return x * inverse * weight

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._weights[f"{name}.weight"].t() + self._lora(x, name)

    def _lora(self, x: torch.Tensor, name: str) -> torch.Tensor | float:
        a, b = (self._factors.get(f"{name}.lora_{factor}") for factor in "AB")
        return 0.0 if a is None or b is None else self._scale * (x @ a.t()) @ b.t()


def _recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule, one token after another; arXiv:2412.06464, equation 10."""
    state = q.new_zeros(v.shape[1], k.shape[-1], v.shape[-1])
    outs: list[torch.Tensor] = []
    for t in range(len(q)):
        state = state * decay[t][:, None, None]
        error = v[t] - (k[t][:, :, None] * state).sum(1)
        state = state + k[t][:, :, None] * (beta[t][:, None] * error)[:, None]
        outs.append((q[t][:, :, None] * state).sum(1))
    return torch.stack(outs)
