"""Sampling, peer: transformers' `generate` with PEFT, as a user would set it up: adapters beside the weights, or one merged.

One static batch a call, all rows of one length, torch's SDPA and transformers' own cache. Ours answers with a logprob of
every token; `generate` computes none here, which is in its favour.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lilo_engine.errors import InvalidRequest
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from lilo_miles_backend.families.read import read_shape

_STD = 0.02
"""Of B: far enough from zero that an adapter which is not applied shows."""


class Peer:
    """A model with some random adapters, and one with the first of them merged."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        *,
        names: Sequence[str],
        lora_rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make the adapters, on every linear of the layers, and write them as PEFT folders.

        Args:
            source: the base model's files.
            folder: adapters are written below it, see `folder_of`.
            names: of the adapters.
            lora_rank: of each; alpha is the same.
            device: where to compute.
            dtype: of base weights and activations.

        Raises:
            InvalidRequest: PEFT is not installed.
        """
        try:
            from peft import LoraConfig, PeftModel, get_peft_model  # noqa: PLC0415 - only the peer needs it
        except ImportError as error:
            raise InvalidRequest(
                "the peer of this measurement, PEFT, is not installed: pip install 'lilo-miles-backend[bench]'"
            ) from error
        disable_progress_bar()
        self._folder, self._device = folder, device
        torch.manual_seed(0)
        config = LoraConfig(
            r=lora_rank,
            lora_alpha=lora_rank,
            target_modules=_targets(source),
            task_type="CAUSAL_LM",
        )
        with _quiet():
            self._beside: Any = get_peft_model(
                _base(source, device, dtype), config, adapter_name=names[0]
            )
            for name in names[1:]:
                self._beside.add_adapter(name, config)
            for key, parameter in self._beside.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(parameter, std=_STD)
            self._beside.save_pretrained(str(folder))
            merged: Any = PeftModel.from_pretrained(
                _base(source, device, dtype), self.folder_of(names[0])
            )
            self._merged: Any = merged.merge_and_unload()
        self._beside.eval()

    def folder_of(self, name: str) -> str:
        """Where PEFT wrote an adapter."""
        return str(self._folder / name)

    def beside(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, adapters: Sequence[str]
    ) -> None:
        """Generate with adapters that stand beside the weights, one for each row.

        Args:
            prompts: token ids, of one length.
            new_tokens: of each row.
            adapters: one for each row.
        """
        if len(set(adapters)) == 1:
            self._beside.set_adapter(adapters[0])
            _generate(self._beside, self._tensor(prompts), new_tokens)
        else:
            _generate(self._beside, self._tensor(prompts), new_tokens, adapter_names=list(adapters))

    def merged(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        """Generate with weights that the first adapter was added to."""
        _generate(self._merged, self._tensor(prompts), new_tokens)

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], adapter: str) -> np.ndarray:
        """Log-probability of every token of a prompt but the first, float32, with an adapter beside the weights."""
        self._beside.set_adapter(adapter)
        ids = self._tensor([prompt])
        values = self._beside(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return values.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def publish(self, folder: Path, prompt: Sequence[int], name: str, new: str) -> None:
        """Write adapter `name`, load what was written as `new`, and generate one token with it."""
        self._load(folder, name, new)
        _generate(self._beside, self._tensor([prompt]), 1)

    def publish_merged(self, folder: Path, prompt: Sequence[int], name: str, new: str) -> None:
        """Likewise with the new weights added to those of the base model, where they stay until `forget`."""
        self._load(folder, name, new)
        self._beside.merge_adapter([new])
        _generate(self._beside, self._tensor([prompt]), 1)

    def forget(self, new: str) -> None:
        """Undo a publication."""
        with _quiet():
            self._beside.unmerge_adapter()
            self._beside.delete_adapter(new)

    def _load(self, folder: Path, name: str, new: str) -> None:
        with _quiet():
            self._beside.save_pretrained(str(folder), selected_adapters=[name])
            self._beside.load_adapter(str(folder / name), new)
            self._beside.set_adapter(new)

    def _tensor(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(prompts, device=self._device)


def _base(source: Path, device: torch.device, dtype: torch.dtype) -> Any:  # noqa: ANN401 - untyped library
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation="sdpa"
    )
    return model.to(device).eval()


def _generate(model: Any, ids: torch.Tensor, new_tokens: int, **more: object) -> None:  # noqa: ANN401 - as above
    """Draw from the whole distribution, to the full length.

    Raises:
        RuntimeError: something ended a row early, so that times would not compare.
    """
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **more
        )
    if out.shape[1] != ids.shape[1] + new_tokens:
        raise RuntimeError(f"generate gave {out.shape[1] - ids.shape[1]} tokens, not {new_tokens}")


def _targets(source: Path) -> list[str]:
    """Names of the linears that adapters stand at: all of every layer that adapters act on."""
    shape = read_shape(source)
    linears = [shape.linears(kind) for kind in set(shape.layers)]
    return sorted(
        {
            name.rpartition(".")[2]
            for of_layer in linears
            for name, linear in of_layer.items()
            if linear.adaptable
        }
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # PEFT's own: about tied embeddings, names of its own, and what is active after a deletion.
        warnings.simplefilter("ignore")
        yield
