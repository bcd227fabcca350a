"""The argument list of the raw-Miles run that a definition is compared with: same model, layout, lengths, adapters.

For whoever measures a baseline; Lilo's own trainer takes none of it. Names are those of Miles' and Megatron's argument
parsers. Options that the definition decides cannot be given beside it, also not abbreviated: a baseline that differs in one
of them is no baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from lilo_definitions.definition import Definition
from lilo_definitions.errors import InvalidDefinition
from lilo_definitions.lora import TargetGroup

_TARGETS: Mapping[TargetGroup, tuple[str, ...]] = MappingProxyType(
    {
        "attn": ("linear_qkv", "linear_proj"),
        "mlp": ("linear_fc1", "linear_fc2"),
        "unembed": ("output_layer",),
    }
)
"""Megatron's names of the linears of each group."""

_LEARNING_RATE = "1e-4"
"""The parser wants one; each optimizer step brings its own."""

OWNED = (
    "--accumulate-allreduce-grads-in-fp32",
    "--actor-num-gpus-per-node",
    "--actor-num-nodes",
    "--bf16",
    "--colocate",
    "--context-parallel-size",
    "--debug-train-only",
    "--distributed-timeout-minutes",
    "--deterministic-mode",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--fp16",
    "--hf-checkpoint",
    "--load",
    "--lora-alpha",
    "--lora-dropout",
    "--lora-rank",
    "--max-tokens-per-gpu",
    "--megatron-to-hf-mode",
    "--multi-lora-n-adapters",
    "--optimizer",
    "--pipeline-model-parallel-size",
    "--pretrained-checkpoint",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--rollout-num-gpus",
    "--save",
    "--save-interval",
    "--seq-length",
    "--sequence-parallel",
    "--target-modules",
    "--tensor-model-parallel-size",
    "--train-backend",
    "--use-dynamic-batch-size",
    "--use-dynamic-global-batch-size",
    "--virtual-pipeline-model-parallel-size",
)
"""Options that the definition decides, or that would make another kind of run of it."""


def miles_args(definition: Definition, extra: Sequence[str] = ()) -> tuple[str, ...]:
    """The arguments, in order; `extra` last.

    Args:
        definition: what the baseline has to match.
        extra: options of the user's own.

    Raises:
        InvalidDefinition: raw Miles cannot match the definition, or `extra` names an option that the definition decides.
    """
    _check_matchable(definition)
    _check_extra(definition, extra)
    return (
        *_model(definition),
        *_adapters(definition),
        *_layout(definition),
        *_numbers(definition),
        *_memory(definition),
        *extra,
    )


def _model(definition: Definition) -> list[str]:
    source = definition.model.source.removeprefix("hf:")
    return [
        *("--train-backend", "megatron"),
        *("--hf-checkpoint", source),
        *("--load", source),
        *("--pretrained-checkpoint", source),
        *("--megatron-to-hf-mode", "bridge"),
        "--debug-train-only",
        *("--rollout-num-gpus", "0"),
    ]


def _adapters(definition: Definition) -> list[str]:
    lora = definition.lora
    modules = [name for group in lora.targets for name in _TARGETS[group]]
    return [
        *("--multi-lora-n-adapters", str(lora.slots)),
        *("--lora-rank", str(lora.max_rank)),
        *("--lora-alpha", str(int(lora.alpha))),
        *("--lora-dropout", "0.0"),
        *("--target-modules", ",".join(modules)),
        "--no-gradient-accumulation-fusion",
        *("--optimizer", "adam"),
        *("--lr", _LEARNING_RATE),
    ]


def _layout(definition: Definition) -> list[str]:
    topology = definition.topology
    arguments = [
        *("--actor-num-nodes", str(topology.nodes)),
        *("--actor-num-gpus-per-node", str(topology.gpus_per_node)),
        *("--tensor-model-parallel-size", str(topology.tp)),
        *("--pipeline-model-parallel-size", "1"),
        *("--context-parallel-size", str(topology.cp)),
        *("--expert-model-parallel-size", "1"),
        *("--expert-tensor-parallel-size", "1"),
    ]
    if topology.tp > 1:
        arguments.append("--sequence-parallel")
    minutes = definition.limits.distributed_timeout_minutes
    return [*arguments, "--distributed-timeout-minutes", f"{minutes:g}"]


def _numbers(definition: Definition) -> list[str]:
    arguments = [
        *("--attention-dropout", "0.0"),
        *("--hidden-dropout", "0.0"),
        "--accumulate-allreduce-grads-in-fp32",
        "--attention-softmax-in-fp32",
        *("--attention-backend", "flash"),
    ]
    if definition.dtype == "bfloat16":
        arguments.append("--bf16")
    if definition.trainer.deterministic:
        arguments.append("--deterministic-mode")
    return arguments


def _memory(definition: Definition) -> list[str]:
    arguments = [
        *("--seq-length", str(definition.context)),
        "--use-dynamic-batch-size",
        "--use-dynamic-global-batch-size",
        *("--max-tokens-per-gpu", str(definition.limits.max_tokens_per_rank)),
    ]
    if definition.trainer.keep_activations == "input":
        arguments += [
            *("--recompute-granularity", "full"),
            *("--recompute-method", "uniform"),
            *("--recompute-num-layers", "1"),
        ]
    return arguments


def _check_matchable(definition: Definition) -> None:
    """Refuse what the raw run has nothing for."""
    name, keep = definition.name, definition.trainer.keep_activations
    if definition.topology.device != "cuda":
        raise InvalidDefinition(
            f"definition {name!r} has topology.device cpu, and raw Miles trains on CUDA only; "
            "there is no baseline to match"
        )
    if keep not in ("input", "all"):
        raise InvalidDefinition(
            f"definition {name!r} has trainer.keep_activations {keep}, which Megatron's recompute has no level for; "
            "compare with input or all"
        )
    if definition.trainer.offload_inputs:
        raise InvalidDefinition(
            f"definition {name!r} has trainer.offload_inputs, and the raw run keeps inputs on the GPU; "
            "compare without it"
        )
    if definition.lora.alpha != int(definition.lora.alpha):
        raise InvalidDefinition(
            f"definition {name!r} has lora.alpha {definition.lora.alpha}; --lora-alpha takes whole numbers"
        )


def _check_extra(definition: Definition, extra: Sequence[str]) -> None:
    """Refuse owned options, in full, abbreviated (argparse takes any prefix), or as --option=value."""
    for argument in extra:
        option = argument.partition("=")[0]
        if len(option) < 3 or not option.startswith("--"):
            continue
        owned = next((one for one in OWNED if one.startswith(option)), None)
        if owned is not None:
            raise InvalidDefinition(
                f"{argument!r} cannot be given: definition {definition.name!r} decides {owned}; "
                "change the definition (a YAML file that extends it) instead"
            )
