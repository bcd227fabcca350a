"""The tiny model, adapters on it made by PEFT, and every sampling engine."""

from __future__ import annotations

import warnings
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from lilo_definitions import Definition, get, resolve_source
from lilo_engine.sampling.engine import SamplerConfig
from lilo_engine.sampling.launcher import MemorySamplerLauncher, ProcessSamplerLauncher

from tests.sampling.managers import running

ATTN_MLP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS = {
    "all": (8, [*ATTN_MLP, "lm_head"], 1),
    "linears": (4, ATTN_MLP, 2),
    "mlp": (16, ["gate_proj", "down_proj"], 3),
    "head": (2, ["lm_head"], 4),
}
"""name -> LoRA rank, targets, seed."""


@pytest.fixture(scope="session")
def definition() -> Definition:
    return get("tiny")


@pytest.fixture(scope="session")
def reference():
    """The tiny model in transformers."""
    import torch
    from transformers import Qwen3ForCausalLM

    folder = resolve_source(get("tiny").model.source)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory) -> dict[str, str]:
    """Folders written by PEFT with B far from zero, one per entry of `ADAPTERS`."""
    return {
        name: make_adapter(tmp_path_factory.mktemp(name), *spec) for name, spec in ADAPTERS.items()
    }


def make_adapter(folder: Path, rank: int, targets: list[str], seed: int) -> str:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    source = resolve_source(get("tiny").model.source)
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32)
    with warnings.catch_warnings():
        # PEFT warns that an adapter of a tied head cannot be merged (it is not), and uses deprecated names.
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=32, target_modules=targets))
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        peft.save_pretrained(str(folder))
    return str(folder)


@asynccontextmanager
async def memory_engine(definition, log_folder):
    async with MemorySamplerLauncher(definition).launch() as running:
        yield running.engine


@asynccontextmanager
async def embedded_engine(definition, log_folder):
    from lilo_miles_backend.sampler import EmbeddedSampler

    engine = EmbeddedSampler(SamplerConfig(definition=definition))
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def remote_engine(definition, log_folder):
    launcher = ProcessSamplerLauncher(
        definition=definition, log_file=Path(log_folder) / "sampler.log"
    )
    async with launcher.launch() as running:
        yield running.engine


ENGINES = {"memory": memory_engine, "embedded": embedded_engine, "remote": remote_engine}


@pytest.fixture
async def embedded(definition, tmp_path):
    """A fresh embedded engine with nothing loaded."""
    async with embedded_engine(definition, tmp_path) as engine:
        with anyio.fail_after(50):
            yield engine


@pytest.fixture
async def manager(definition):
    """A serving manager with an engine in memory."""
    async with running(definition, MemorySamplerLauncher(definition)) as manager:
        yield manager
