"""The reference: Hugging Face + PEFT with the same weights, and float64 formulas. Independent of the trainer's code.

Shared by the tests here and by `proofs/parity.py`.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lilo_definitions import Definition, get, resolve_source
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, Output, WorkItem
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.tensor import Tensor
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.adapter_state import AdapterState

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
GROUPS = {"attn": MODULES[:4], "mlp": MODULES[4:7], "unembed": MODULES[7:]}
ADAM = AdamParams(
    learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
)


def spec(
    lora_rank: int = 8,
    *,
    seed: int | None = 1,
    alpha: float = 32.0,
    attn: bool = True,
    mlp: bool = True,
    unembed: bool = True,
) -> LoraSpec:
    return LoraSpec(
        lora_rank=lora_rank,
        alpha=alpha,
        seed=seed,
        train_attn=attn,
        train_mlp=mlp,
        train_unembed=unembed,
    )


def write_random_model(folder: Path, *, tied: bool, **sizes: int) -> Definition:
    """A random Qwen3 with odd sizes and three query heads per group, or other `sizes`; its definition.

    Its numbers are well conditioned at every length, which those of the trained `tiny` are only on sums.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    odd = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80}
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=2,
        head_dim=16,
        **{**odd, **sizes},
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)  # spreads the logits, so that errors in them show
    model.save_pretrained(folder)
    tiny = get("tiny")
    return tiny.model_copy(
        update={
            "name": folder.name,
            "context": 256,
            "model": tiny.model.model_copy(
                update={
                    "name": folder.name,
                    "source": str(folder),
                    "vocab_size": 97,
                    "context": 256,
                }
            ),
        }
    )


def start(definition: Definition, root: Path | None = None) -> MilesBackend:
    """A backend of this definition, its checkpoints in `root` or a fresh folder."""
    checkpoints = root or Path(tempfile.mkdtemp(prefix="lilo-test-"))
    return MilesBackend(
        BackendConfig(definition=definition, checkpoints_root=str(checkpoints), epoch=1)
    )


def datum(length: int, rng: np.random.Generator, *, vocab: int, **inputs: object) -> Datum:
    """Random tokens and targets; `inputs` are float32 arrays by name."""
    ids = rng.integers(0, vocab, length + 1)
    tensors = {"target_tokens": Tensor.of(ids[1:], "int64")}
    tensors.update({name: Tensor.of(values, "float32") for name, values in inputs.items()})
    return Datum(tokens=Tensor.of(ids[:-1], "int32"), loss_inputs=tensors)


def numbers(output: Output) -> tuple[object, ...]:
    """What of an output is the same however long it took."""
    return output.operation_id, output.error, output.logprobs, output.metrics.get("loss:sum")


def sums(count: int, rng: np.random.Generator) -> list[Datum]:
    """Text that `tiny` was trained on, as `12+34=46` and the end token: 5 to 9 tokens each."""
    datums: list[Datum] = []
    for a, b in rng.integers(0, 100, (count, 2)):
        ids = np.array([*f"{a}+{b}={a + b}".encode(), 257])
        tensors = {
            "target_tokens": Tensor.of(ids[1:], "int64"),
            "weights": Tensor.of(rng.uniform(0.5, 1.5, len(ids) - 1), "float32"),
        }
        datums.append(Datum(tokens=Tensor.of(ids[:-1], "int32"), loss_inputs=tensors))
    return datums


def ragged(lengths: Sequence[int], rng: np.random.Generator, *, vocab: int) -> list[Datum]:
    """Random datums of these lengths with weights of either sign."""
    return [datum(n, rng, vocab=vocab, weights=rng.normal(size=n)) for n in lengths]


def item(model_id: str, datums: Sequence[Datum], operation_id: str = "op") -> WorkItem:
    return WorkItem(operation_id=operation_id, model_id=ModelId(model_id), datums=tuple(datums))


def run(
    backend: MilesBackend,
    *items: WorkItem,
    loss: str = "cross_entropy",
    config: Mapping[str, float | str] | None = None,
    forward_only: bool = False,
) -> list[Output]:
    """One forward_backward; fails the caller if the number of outputs is wrong."""
    batch = Batch(loss=loss, config=config or {}, forward_only=forward_only, items=items)
    outputs = backend.forward_backward(batch)
    assert [o.operation_id for o in outputs] == [i.operation_id for i in items]
    return outputs


def randomize(backend: MilesBackend, model_id: str, *, seed: int = 5, scale: float = 0.01) -> None:
    """Give every B random values, of a size that training reaches; A keeps its own. Then no gradient is zero."""
    adapter = backend.ranks.rank.adapter(ModelId(model_id))
    generator = torch.Generator().manual_seed(seed)
    for name, factor in adapter.named(adapter.weights).items():
        if name.endswith(".lora_B"):
            factor.copy_(torch.randn(factor.shape, generator=generator) * scale)


def state_of(backend: MilesBackend, model_id: str) -> AdapterState:
    """The adapter as a capture would freeze it."""
    adapter = backend.ranks.rank.adapter(ModelId(model_id))
    return adapter.export("reference", with_optimizer=True)


def gradients_of(backend: MilesBackend, model_id: str) -> dict[str, torch.Tensor]:
    """Copies of this window's gradients by factor."""
    adapter = backend.ranks.rank.adapter(ModelId(model_id))
    return {name: part.clone() for name, part in adapter.named(adapter.gradients).items()}


@dataclass(frozen=True)
class Reference:
    """Hugging Face's model of a definition with one PEFT adapter."""

    model: torch.nn.Module

    @classmethod
    def of(
        cls, definition: Definition, state: AdapterState, dtype: torch.dtype = torch.float32
    ) -> Reference:
        """The base model with the adapter's factors copied in by name."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(
            resolve_source(definition.model.source), dtype=dtype
        )
        modules = sorted({name.rpartition(".")[2] for name in modules_of(state.weights)})
        config = LoraConfig(
            r=state.spec.lora_rank,
            lora_alpha=state.spec.alpha,
            target_modules=modules,
            lora_dropout=0.0,
        )
        with _quiet():
            model = get_peft_model(base, config).to(dtype)
        parameters = _factors(model)
        assert parameters.keys() == state.weights.keys()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state.weights[name])
        return cls(model=model)

    @classmethod
    def exported(cls, definition: Definition, folder: Path) -> Reference:
        """The base model with a published PEFT folder, loaded by PEFT itself."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(
            resolve_source(definition.model.source), dtype=torch.float32
        )
        with _quiet():
            return cls(model=PeftModel.from_pretrained(base, folder))

    def logprobs(self, item_datum: Datum) -> torch.Tensor:
        """[n] or [n, k]: the logprob of each target; differentiable."""
        ids = torch.from_numpy(item_datum.tokens.numpy().astype(np.int64))[None]
        logits = self.model(input_ids=ids).logits[0]
        targets = torch.from_numpy(item_datum.loss_inputs["target_tokens"].numpy().copy())
        wide = targets.reshape(targets.shape[0], -1)
        return logits.log_softmax(-1).gather(1, wide).reshape(targets.shape)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the factors by the trainer's names."""
        found = {name: p.grad for name, p in _factors(self.model).items()}
        assert all(grad is not None for grad in found.values())
        return {name: grad for name, grad in found.items() if grad is not None}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what PEFT says of a head adapter on tied embeddings and of names that transformers renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        yield


def _factors(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """PEFT's parameters under slot-free names: `base_model.model.X.lora_A.default.weight` -> `X.lora_A`."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


def modules_of(factors: Mapping[str, object]) -> set[str]:
    """`model.layers.0.mlp.up_proj.lora_A` -> `model.layers.0.mlp.up_proj`."""
    return {name.rpartition(".")[0] for name in factors}


def cross_entropy(datums: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """-sum w p; weights are ones where a datum has none."""
    total = torch.zeros(())
    for one, p in zip(datums, logprobs, strict=True):
        weights = one.loss_inputs.get("weights")
        w = torch.ones(()) if weights is None else torch.from_numpy(weights.numpy().copy())
        total = total - (w * p).sum()
    return total


def worst(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Largest max|d| / max|ref| over all tensors."""
    assert ours.keys() == theirs.keys()
    return max(relative(ours[name], theirs[name]) for name in theirs)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """max|d| / max|ref| of one tensor; infinite where it is no number, which the largest of several would hide."""
    off = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
    return math.inf if math.isnan(off) else off


def loss_and_slope(
    name: str, p: np.ndarray, inputs: Mapping[str, np.ndarray], config: Mapping[str, float]
) -> tuple[float, np.ndarray]:
    """Loss of one sequence and d loss / d p, float64, token by token from the written formulas (1-D inputs)."""
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    q, a = inputs.get("logprobs"), inputs.get("advantages")
    shared = None
    if name == "gspo":
        on = inputs["sequence_ratio_mask"] != 0
        shared = math.exp(float((p - q)[on].mean())) if on.any() else 1.0
    total, slope = 0.0, np.zeros_like(p, dtype=np.float64)
    for t in range(len(p)):
        lo = float(inputs["clip_low_threshold"][t]) if "clip_low_threshold" in inputs else low
        hi = float(inputs["clip_high_threshold"][t]) if "clip_high_threshold" in inputs else high
        if name == "cross_entropy":
            w = float(inputs["weights"][t]) if "weights" in inputs else 1.0
            loss, slope[t] = -w * p[t], -w
        elif name == "importance_sampling":
            r = math.exp(p[t] - q[t])
            loss, slope[t] = -r * a[t], -r * a[t]
        elif name in ("ppo", "gspo"):
            r = math.exp(p[t] - q[t]) if shared is None else shared
            clipped = min(max(r, lo), hi)
            loss = -min(r * a[t], clipped * a[t])
            slope[t] = -r * a[t] if (r * a[t] <= clipped * a[t]) else 0.0
        elif name == "cispo":
            weight = min(max(math.exp(p[t] - q[t]), lo), hi)
            loss, slope[t] = -weight * p[t] * a[t], -weight * a[t]
        elif name == "dro":
            beta = config.get("beta", 0.05)
            loss = -(p[t] * a[t] - 0.5 * beta * (p[t] - q[t]) ** 2)
            slope[t] = -(a[t] - beta * (p[t] - q[t]))
        else:
            raise AssertionError(name)
        total += loss
    return total, slope


def adamw64(
    weights: np.ndarray, gradients: Sequence[np.ndarray], params: Sequence[AdamParams]
) -> np.ndarray:
    """AdamW over several steps in float64, all factors flattened together (so that clipping is global)."""
    w, m, v = weights.astype(np.float64), np.zeros(weights.size), np.zeros(weights.size)
    for step, (given, p) in enumerate(zip(gradients, params, strict=True), start=1):
        g = given.astype(np.float64)
        norm = math.sqrt(float((g * g).sum()))
        if p.grad_clip_norm > 0 and norm > p.grad_clip_norm:
            g = g * (p.grad_clip_norm / norm)
        m = p.beta1 * m + (1 - p.beta1) * g
        v = p.beta2 * v + (1 - p.beta2) * g * g
        m_hat, v_hat = m / (1 - p.beta1**step), v / (1 - p.beta2**step)
        w = w - p.learning_rate * p.weight_decay * w
        w = w - p.learning_rate * m_hat / (np.sqrt(v_hat) + p.eps)
    return w


def flat(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """All tensors of a mapping one after another."""
    return np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors.values()])
