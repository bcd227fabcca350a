"""Writes docs/compatibility.md: every public method of the `tinker` SDK, called for real against `lilo serve tiny`.

`--check` compares instead of writing. A method that an SDK adds makes it fail until it has a call here.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import tinker
import torch
from lilo_engine.demo.server import LocalServer
from tinker import types

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
CLIENTS: tuple[type[Any], ...] = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)
LIMIT_S = 60.0
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HEAD = """\
# What of the `tinker` SDK works

Every public method of `tinker` {version}, called against `lilo serve tiny`. Made by `scripts/make_compatibility.py`; do
not edit. What is refused is refused at once, in the words shown, and the client goes on. Beside methods: images and
audio in prompts, the loss `stable_reinforce` and the optimizer `dimuon` are refused in the same way; see the
[errors of a researcher's first day](researcher.md).

"""

Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Object, positional and named arguments of one call."""


class Stage:
    """Clients on one server, and things to call them with; each call gets what it may use up."""

    def __init__(self, server: LocalServer) -> None:
        self.address = {"base_url": server.base_url, "api_key": server.api_key}
        self.service = tinker.ServiceClient(**self.address)
        self.rest = tinker.RestClient(**self.address)
        self.admin = tinker.AdminClient(**self.address)
        self.trainer = self.service.create_lora_training_client("tiny", rank=4).result()
        self.run_id = self.trainer.get_info().model_id
        self.session_id = self.run_id.split(":train:")[0]
        self.data = [datum([10, 11, 12, 13])]
        self.prompt = types.ModelInput.from_ints([10, 11, 12])
        self.state = self.trainer.save_state("state").result().path
        self.weights = self.trainer.save_weights_for_sampler("weights").result().path
        self.download = self.trainer.save_weights_external("download").result().path
        self.sampler = self.service.create_sampling_client(model_path=self.weights).result()
        self._fresh = 0

    def name(self) -> str:
        """One that was not used yet."""
        self._fresh += 1
        return f"name-{self._fresh}"

    def disposable(self) -> str:
        """A checkpoint to delete."""
        return self.trainer.save_state(self.name()).result().path

    def passed(self) -> None:
        """Have gradients, so that a step has something to do."""
        self.trainer.forward_backward(self.data, "cross_entropy").result()


def datum(ids: list[int]) -> types.Datum:
    """Predict each token from those before it."""
    targets = types.TensorData(data=ids[1:], dtype="int64")
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": targets}
    )


def summed(data: list[types.Datum], rows: list[Any]) -> tuple[Any, dict[str, float]]:
    """A loss of the user's own."""
    return -sum(row.sum() for row in rows), {"mine": 1.0}


def custom(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss for the server to compute, where it can."""
    loss = -logprobs.sum()
    return loss, {"custom/mine:sum": loss}


def _service(s: Stage) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    other = tinker.ServiceClient(**s.address)
    grouped = tinker.ServiceClient(**s.address, project_id="a-project")
    service = s.service
    yield "close", lambda: (other, ("success",), {})
    yield "copy_weights", lambda: (grouped, (s.state,), {})
    yield "create_custom_loss", lambda: (service, (custom, {"logprobs": 1}), {})
    yield "create_lora_training_client", lambda: (service, ("tiny",), {"rank": 4})
    yield "create_rest_client", lambda: (service, (), {})
    yield "create_sampling_client", lambda: (service, (), {"model_path": s.weights})
    yield "create_training_client_from_state", lambda: (service, (s.state,), {})
    yield "create_training_client_from_state_with_optimizer", lambda: (service, (s.state,), {})
    for name in ("get_console_url", "get_server_capabilities", "get_telemetry"):
        yield name, lambda: (service, (), {})


def _trainer(s: Stage) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    t = s.trainer
    adam = types.AdamParams(learning_rate=1e-3)

    def step() -> Arguments:
        s.passed()
        return t, (adam,), {}

    yield "create_sampling_client", lambda: (t, (s.weights,), {})
    yield "forward", lambda: (t, (s.data, "cross_entropy"), {})
    yield "forward_backward", lambda: (t, (s.data, "cross_entropy"), {})
    yield "forward_backward_custom", lambda: (t, (s.data, summed), {})
    for name in ("get_console_url", "get_info", "get_telemetry", "get_tokenizer"):
        yield name, lambda: (t, (), {})
    yield "load_state", lambda: (t, (s.state,), {})
    yield "load_state_with_optimizer", lambda: (t, (s.state,), {})
    yield "optim_step", step
    for name in ("save_state", "save_weights_external", "save_weights_for_sampler"):
        yield name, lambda: (t, (s.name(),), {"ttl_seconds": 3600})
    yield "save_weights_and_get_sampling_client", lambda: (t, (), {})


def _sampler(s: Stage) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    c = s.sampler
    params = types.SamplingParams(max_tokens=2, seed=1)
    yield "compute_logprobs", lambda: (c, (s.prompt,), {"prompt_logprobs_last_n": 1})
    creation = {"sampling_session_id": c._sampling_session_id}
    yield "create", lambda: (tinker.SamplingClient, (s.service.holder,), creation)
    key = {"api_key": s.address["api_key"]}
    yield "from_sampler_handle", lambda: (c, (c.get_sampler_handle(),), key)
    for name in ("get_base_model", "get_sampler_handle", "get_telemetry", "get_tokenizer"):
        yield name, lambda: (c, (), {})
    yield "sample", lambda: (c, (s.prompt, 1, params), {"prompt_alt_tokens_k": 2})


def _rest(s: Stage) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    r = s.rest
    by_path = lambda: (r, (s.state,), {})  # noqa: E731 - said in the table's own form
    yield "assign_session_project", lambda: (r, (s.session_id, "a-project"), {})
    yield "copy_weights", lambda: (r, (s.weights, "a-project"), {})
    yield "delete_checkpoint", lambda: (r, (s.run_id, "/".join(s.disposable().split("/")[3:])), {})
    yield "delete_checkpoint_from_tinker_path", lambda: (r, (s.disposable(),), {})
    yield "export_session_trace", lambda: (r, (s.session_id,), {})
    yield "get_external_weights_urls", lambda: (r, (s.download,), {})
    yield "get_sampler", lambda: (r, (s.sampler._sampling_session_id,), {})
    yield "get_session", lambda: (r, (s.session_id,), {})
    yield "get_training_run", lambda: (r, (s.run_id,), {})
    yield "list_checkpoints", lambda: (r, (s.run_id,), {})
    yield "search_sessions", lambda: (r, (types.SessionSearchRequest(),), {})
    yield "set_checkpoint_ttl_from_tinker_path", lambda: (r, (s.state, 3600), {})
    for name in (
        "get_training_run_by_tinker_path",
        "get_weights_info_by_tinker_path",
        "publish_checkpoint_from_tinker_path",
        "unpublish_checkpoint_from_tinker_path",
    ):
        yield name, by_path
    for name in (
        "get_server_capabilities",
        "get_telemetry",
        "list_sessions",
        "list_training_runs",
        "list_user_checkpoints",
        "whoami",
    ):
        yield name, lambda: (r, (), {})
    yield from ((name, _with(call, r)) for name, call in _admin(s))


def _admin(s: Stage) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    begin, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    yield "get_audit_log", lambda: (s.admin, ("api_key.created", date(2026, 1, 1)), {})
    yield "get_billing_usage", lambda: (s.admin, (begin, end), {})
    yield "get_current_checkpoint_storage_usage", lambda: (s.admin, (), {})
    yield "get_telemetry", lambda: (s.admin, (), {})


def _with(call: Callable[[], Arguments], target: object) -> Callable[[], Arguments]:
    return lambda: (target, *call()[1:])


TABLES = (_service, _trainer, _sampler, _rest, _admin)
NOTES = {
    "SamplingClient.get_tokenizer": "the SDK asks the hub for a model of the definition's name, which `tiny` is not; "
    "TrainingClient.get_tokenizer reads it where the server has it",
    "whoami": "the SDK reads it from a token that this server does not use; an API key says nothing of its holder",
}
"""Why, where the error that the SDK raises does not say it."""
NOT_CALLS = {"on_queue_state_change": "called by the SDK itself"}
"""Methods that are public for the SDK's own sake."""


@dataclass(frozen=True)
class Row:
    """One line of the page."""

    method: str
    verdict: str
    why: str = ""


def public_methods(client: type[Any]) -> list[str]:
    """What a user may call."""
    found = (name for name in dir(client) if not name.startswith("_"))
    return [name for name in found if callable(getattr(client, name))]


def rows_of(client: type[Any], calls: dict[str, Callable[[], Arguments]]) -> list[Row]:
    """Call everything a client has; the `_async` forms with the arguments of the plain ones."""
    rows: list[Row] = []
    for method in public_methods(client):
        plain = method.removesuffix("_async")
        if method in NOT_CALLS:
            rows.append(Row(method, "works", NOT_CALLS[method]))
        elif plain not in calls:
            sys.exit(f"{client.__name__}.{method} has no call in {Path(__file__).name}; add one")
        else:
            row = _called(method, calls[plain])
            note = NOTES.get(method) or NOTES.get(f"{client.__name__}.{method}")
            rows.append(replace(row, why=note) if note and row.verdict == "refused" else row)
    return rows


def _called(method: str, arguments: Callable[[], Arguments]) -> Row:
    target, positional, named = arguments()
    try:
        _finish(getattr(target, method)(*positional, **named))
    except Exception as error:  # a refusal is an answer here
        return Row(method, "refused", _words(error))
    return Row(method, "works")


def _finish(value: object) -> None:
    """Wait for what a call gave, in whatever form it is to be waited for."""
    if inspect.iscoroutine(value):
        _finish(asyncio.run(value))
    elif callable(result := getattr(value, "result", None)):
        _finish(result(timeout=LIMIT_S))


def _words(error: Exception) -> str:
    body = getattr(error, "body", None)
    text = body["detail"] if isinstance(body, dict) and "detail" in body else str(error)
    return _ID.sub("...", " ".join(text.split())).replace("|", "/")[:300]


def page(server: LocalServer) -> str:
    """The whole page."""
    stage = Stage(server)
    lines = [_HEAD.format(version=tinker.__version__)]
    for client, table in zip(CLIENTS, TABLES, strict=True):
        rows = rows_of(client, dict(table(stage)))
        lines.append(f"## {client.__name__}\n\n| method | | why |\n| --- | --- | --- |\n")
        lines += [f"| `{row.method}` | {row.verdict} | {row.why} |\n" for row in rows]
        lines.append("\n")
    stage.service.close("success").result(timeout=LIMIT_S)
    return "".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or compare it."""
    warnings.simplefilter("ignore")
    # Read by the hub client when it is imported, which the SDK does late.
    os.environ.update(HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0")
    with (
        tempfile.TemporaryDirectory(prefix="lilo-compatibility-") as folder,
        LocalServer("tiny", Path(folder)) as server,
    ):
        text = page(server)
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not what the SDK finds; run scripts/make_compatibility.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
