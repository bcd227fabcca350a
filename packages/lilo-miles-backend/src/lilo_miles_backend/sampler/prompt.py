"""PromptScores: what a request asks about its own prompt, filled in piece by piece while the prompt is computed.

Row i stands for the distribution after prompt token i, so it is about token i + 1. A piece may be written twice, since a
group that failed is tried again: random draws depend on the row alone.

Legend: T prompt tokens, R rows of one piece, V vocabulary, K cells per row, C listed cells.
"""

from __future__ import annotations

import random
import secrets

import numpy as np
import torch
from lilo_engine.sampling.engine import (
    UNUSED_LOGPROB,
    AltTokens,
    SampleRequest,
    TargetScores,
    TopK,
)

from lilo_miles_backend.sampler import logprobs


class PromptScores:
    """The tables that one request asks for; those that it does not are empty."""

    def __init__(self, request: SampleRequest, prompt: list[int]) -> None:
        """Allocate the tables, all cells unused."""
        self._request = request
        self._prompt = prompt
        num_rows = len(prompt) - 1
        targets = request.prompt_targets
        self._suffix = max(0, num_rows - (request.prompt_logprobs_last_n or num_rows))
        self._logprobs_T = np.full(len(prompt), np.nan, dtype="<f4")
        k = request.topk_prompt_logprobs
        self._top_ids_TK = np.zeros((len(prompt), k), dtype="<i4")
        self._top_TK = np.full((len(prompt), k), UNUSED_LOGPROB, dtype="<f4")
        self._alt_ids_RK = np.zeros((num_rows, request.prompt_alt_tokens_k), dtype="<i4")
        self._alt_RK = np.zeros(self._alt_ids_RK.shape, dtype="<f4")
        self._rows_C = np.frombuffer(targets.rows if targets else b"", dtype="<i4")
        self._ids_C = np.frombuffer(targets.token_ids if targets else b"", dtype="<i4")
        self._targets_C = np.zeros(self._ids_C.shape, dtype="<f4")
        seed = request.params.seed
        self._seed = f"alternatives {secrets.randbits(64) if seed is None else seed}"
        self.first_row = self._first_row(num_rows)

    def _first_row(self, num_rows: int) -> int:
        """Rows before it are asked nothing about, and need no logits."""
        request, first = self._request, num_rows
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            first = min(first, self._suffix)
        named = self._rows_C[self._ids_C >= 0]
        if named.size:
            first = min(first, int(named.min()))
        return 0 if request.prompt_alt_tokens_k else first

    @property
    def wanted(self) -> bool:
        """Whether anything was asked for."""
        return self.first_row < len(self._prompt) - 1

    def fill(self, first: int, logits_RV: torch.Tensor) -> None:
        """Take rows `first` .. `first` + R."""
        values_RV = logits_RV.log_softmax(dim=-1)
        past = first + len(values_RV)
        self._fill_scores(first, past, values_RV)
        if self._request.prompt_alt_tokens_k:
            self._fill_alternatives(first, past, logits_RV, values_RV)
        cells = (self._rows_C >= first) & (self._rows_C < past) & (self._ids_C >= 0)
        if cells.any():
            rows = torch.from_numpy(self._rows_C[cells] - first).long()
            ids = torch.from_numpy(self._ids_C[cells].copy()).long()
            self._targets_C[cells] = values_RV[rows, ids].cpu().numpy()

    def logprobs(self) -> bytes | None:
        """float32 [T]; None if not asked for."""
        return self._logprobs_T.tobytes() if self._request.prompt_logprobs else None

    def topk(self) -> TopK | None:
        """The most likely tokens at each of the T positions."""
        k = self._request.topk_prompt_logprobs
        if not k:
            return None
        ids, values = self._top_ids_TK.tobytes(), self._top_TK.tobytes()
        return TopK(k=k, length=len(self._prompt), token_ids=ids, logprobs=values)

    def targets(self) -> TargetScores | None:
        """One log-probability per cell that was sent."""
        targets = self._request.prompt_targets
        if targets is None:
            return None
        return TargetScores(layout=targets.layout, logprobs=self._targets_C.tobytes())

    def alternatives(self) -> AltTokens | None:
        """Draws in place of each token but the first."""
        k = self._request.prompt_alt_tokens_k
        if not k:
            return None
        ids, values = self._alt_ids_RK.tobytes(), self._alt_RK.tobytes()
        return AltTokens(k=k, length=len(self._prompt) - 1, token_ids=ids, logprobs=values)

    def _fill_scores(self, first: int, past: int, values_RV: torch.Tensor) -> None:
        begin = max(first, self._suffix)
        if begin >= past:
            return
        part = values_RV[begin - first :]
        tokens = self._prompt[begin + 1 : past + 1]
        self._logprobs_T[begin + 1 : past + 1] = logprobs.of_tokens(part, tokens)
        k = self._request.topk_prompt_logprobs
        if k:
            ids, tops = logprobs.most_likely(part, k)
            self._top_ids_TK[begin + 1 : past + 1, : len(ids[0])] = ids
            self._top_TK[begin + 1 : past + 1, : len(ids[0])] = tops

    def _fill_alternatives(
        self, first: int, past: int, logits_RV: torch.Tensor, values_RV: torch.Tensor
    ) -> None:
        """Inverse-transform draws, k per row, at the request's temperature; 0 = the most likely token."""
        k, temperature = self._request.prompt_alt_tokens_k, self._request.params.temperature
        if temperature == 0:
            ids_RK = logits_RV.argmax(dim=-1, keepdim=True).expand(-1, k)
        else:
            scaled = logits_RV.double()
            scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / temperature
            cumulative_RV = scaled.exp().cumsum(dim=-1)
            uniform_RK = torch.tensor(
                [self._numbers(row, k) for row in range(first, past)],
                dtype=torch.float64,
                device=logits_RV.device,
            )
            ids_RK = torch.searchsorted(
                cumulative_RV, uniform_RK * cumulative_RV[:, -1:], right=True
            )
        self._alt_ids_RK[first:past] = ids_RK.cpu().numpy()
        self._alt_RK[first:past] = values_RV.gather(-1, ids_RK).cpu().numpy()

    def _numbers(self, row: int, k: int) -> list[float]:
        stream = random.Random(f"{self._seed} {row}")
        return [stream.random() for _ in range(k)]
