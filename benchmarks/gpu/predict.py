"""Prediction of the whole 27B from measured layers. Pure arithmetic; every assumption is a line here.

- 16 softmax layers and 48 delta nets, each as its kind was measured, and the head, embedding and optimizer once.
- Weights: 26.9 B in bf16 over TP2; one adapter of rank 32 (222 M parameters, 18 bytes each, over TP2 but for what every
  rank holds whole); 3 GiB for the CUDA context, communication and the allocator's fragments; and what the model of two layers
  takes for a moment beyond what its layers keep.
- Layers keep everything as long as memory lasts, delta nets first or softmax layers first as it comes; the rest keep
  q, k, v. Limit: 0.93 of 141e9 bytes.
- Traffic per pass, none of it hidden: keys and values of softmax layers gathered forward and their gradients
  scattered backward (2 x KV heads / TP x head x 2 bytes, of all other ranks' tokens); the delta nets' maps forward and
  backward (2 chunks x value heads / TP x 128 x 256 x 4 bytes, of all other ranks, and forward again where a layer keeps its
  input only); the residual stream over TP four times a layer (gather and scatter, forward and backward). 150e9 bytes a second inside a node; 45e9 where 8
  context-parallel ranks lie on two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SOFTMAX, DELTA = 16, 48
WEIGHTS_GIB = 26.9e9 * 2 / 2 / 2**30
ADAPTER_GIB, OTHER_GIB = 2.3, 3.0
HELD_GIB = WEIGHTS_GIB + ADAPTER_GIB + OTHER_GIB
LIMIT_GIB = 0.93 * 141e9 / 2**30
HIDDEN, KV_WIDTH, TP = 5120, 4 * 256, 2
MAP_BYTES = 48 / TP * 128 * (128 + 128) * 4
INSIDE, BETWEEN = 150e9, 45e9
PUBLISHED: Mapping[str, Any] = {
    "setting": "published: prediction's peer, 16 GPUs (TP2 x CP8), keep input",
    "tokens": 250_400,
    "step_s": 17.4,
    "tokens_s_gpu": 814.0,
    "gib": 82.4e9 / 2**30,
}
"""Another trainer's run on 16 H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of one kind, on one rank."""

    seconds: float
    gib: float
    """Kept until its backward."""


def predictions(
    cp: int, tokens: int, kinds: Mapping[str, Mapping[str, Layer]], two_layers: Layer
) -> Iterable[dict[str, Any]]:
    """One line a choice of what is kept.

    Args:
        cp: context-parallel ranks.
        tokens: of the one row.
        kinds: by level, each kind's layer.
        two_layers: step and peak of the model with two softmax layers that keep everything; gives the head's time, and
            what is held for a moment.
    """
    if "all" not in kinds:
        return
    softmax = kinds["all"]["softmax"]
    head = max(two_layers.seconds - 2 * softmax.seconds, 0.0)
    moment = max(two_layers.gib - 2 * softmax.gib, 0.0)
    for choice in ("input", "qkv", "most"):
        parts = _most(kinds, moment) if choice == "most" else _uniform(kinds, choice)
        if parts is None:
            continue
        layers_s, gib, words = parts
        network = traffic_s(cp, tokens, maps=3 if choice == "input" else 2)
        seconds = head + layers_s + network
        yield {
            "setting": f"prediction: 64 layers, {TP * cp} GPUs (TP2 x CP{cp}), {words}",
            "tokens": tokens,
            "step_s": seconds,
            "tokens_s_gpu": tokens / seconds / (TP * cp),
            "gib": HELD_GIB + moment + gib,
            "network_s": network,
        }


def traffic_s(cp: int, tokens: int, maps: int) -> float:
    """Seconds that one rank's links are busy in one forward and backward, in which it gathers maps so many times."""
    here = tokens / cp
    gathered = 2 * (KV_WIDTH / TP) * 2 * here * (cp - 1)
    states = DELTA * maps * 2 * MAP_BYTES * (cp - 1)
    between = (SOFTMAX * 2 * gathered + states) / (BETWEEN if cp > 4 else INSIDE)
    residual = (SOFTMAX + DELTA) * 4 * 2 * HIDDEN * here * 2 * (TP - 1) / TP / INSIDE
    return between + residual


def _uniform(
    kinds: Mapping[str, Mapping[str, Layer]], keep: str
) -> tuple[float, float, str] | None:
    if keep not in kinds:
        return None
    softmax, delta = kinds[keep]["softmax"], kinds[keep]["delta"]
    return (
        SOFTMAX * softmax.seconds + DELTA * delta.seconds,
        SOFTMAX * softmax.gib + DELTA * delta.gib,
        f"keep {keep}",
    )


def _most(
    kinds: Mapping[str, Mapping[str, Layer]], moment: float
) -> tuple[float, float, str] | None:
    """As many layers as fit keep everything, those that save the most seconds a GiB first; the others the next level."""
    less = next((kinds[keep] for keep in ("qkv", "input") if keep in kinds), None)
    if less is None:
        return None
    room = LIMIT_GIB - HELD_GIB - moment
    layers = ["softmax"] * SOFTMAX + ["delta"] * DELTA
    layers.sort(key=lambda kind: _worth(kinds["all"][kind], less[kind]), reverse=True)
    gib = sum(less[kind].gib for kind in layers)
    seconds, full = 0.0, 0
    for kind in layers:
        more = kinds["all"][kind].gib - less[kind].gib
        if gib + more <= room:
            gib, full = gib + more, full + 1
            seconds += kinds["all"][kind].seconds
        else:
            seconds += less[kind].seconds
    return seconds, gib, f"{full} of 64 layers keep everything"


def _worth(everything: Layer, less: Layer) -> float:
    return (less.seconds - everything.seconds) / max(everything.gib - less.gib, 1e-9)
