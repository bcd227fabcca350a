"""Pool: the command line of one replica of an external sampling engine. Pure.

Flags as SGLang 0.5.23 and vLLM 0.32.0 document them. Adapters are loaded while the server runs, so both get the
switches that allow it; every field of `lilo_definitions.Pool` that an engine has a flag for is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping

from lilo_definitions import Definition, Pool

from lilo_engine.deploy.places import SAMPLER_PORT

SGLANG = "sglang[all]==0.5.23"
VLLM = "vllm==0.32.0"


def command_of(definition: Definition, pool: Pool, model_folder: str) -> tuple[str, ...]:
    """What a replica runs."""
    return (
        _sglang(definition, pool, model_folder)
        if definition.sampler.engine == "sglang"
        else _vllm(definition, pool, model_folder)
    )


def environment_of(definition: Definition) -> Mapping[str, str]:
    """Variables of a replica's process: log-probabilities before temperature on both, adapters at run time."""
    if definition.sampler.engine == "sglang":
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def package_of(definition: Definition) -> str:
    """What the replica's image installs."""
    return SGLANG if definition.sampler.engine == "sglang" else VLLM


def _sglang(definition: Definition, pool: Pool, model_folder: str) -> tuple[str, ...]:
    flags: dict[str, object] = {
        "--model-path": model_folder,
        "--host": "0.0.0.0",  # The container can only be reached through the provider.
        "--port": SAMPLER_PORT,
        "--tp-size": pool.gpus_per_replica,
        "--context-length": definition.context,
        "--dtype": definition.dtype,
        "--mem-fraction-static": pool.memory_fraction,
        "--max-running-requests": definition.sampler.sequences,
        "--max-queued-requests": pool.max_queued,
        "--max-lora-rank": definition.lora.max_rank,
        "--max-loras-per-batch": pool.adapters_per_batch,
        "--max-loaded-loras": definition.sampler.max_adapters,
        "--lora-target-modules": "all",
    }
    head = ("python", "-m", "sglang.launch_server", "--enable-lora", "--skip-tokenizer-init")
    return (*head, *_flat(flags))


def _vllm(definition: Definition, pool: Pool, model_folder: str) -> tuple[str, ...]:
    flags: dict[str, object] = {
        "--host": "0.0.0.0",
        "--port": SAMPLER_PORT,
        "--tensor-parallel-size": pool.gpus_per_replica,
        "--max-model-len": definition.context,
        "--dtype": definition.dtype,
        "--gpu-memory-utilization": pool.memory_fraction,
        "--max-num-seqs": definition.sampler.sequences,
        "--max-lora-rank": definition.lora.max_rank,
        "--max-loras": pool.adapters_per_batch,
        "--max-cpu-loras": definition.sampler.max_adapters,
    }
    head = ("vllm", "serve", model_folder, "--enable-lora", "--skip-tokenizer-init")
    return (*head, "--enable-scale-out", *_flat(flags))


def _flat(flags: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(part for flag, value in flags.items() for part in (flag, str(value)))
