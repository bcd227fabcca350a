"""Modal: the objects of a planned deployment. The only module that knows how Modal is told; needs the extra `modal`.

Building them needs no account and no network. `deploy` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import modal
from modal.exception import AuthError

from lilo_engine.deploy import bodies
from lilo_engine.deploy.deployment import Deployment
from lilo_engine.deploy.function_plan import FunctionPlan, ImagePlan
from lilo_engine.errors import LiloError

_client: Any = modal
"""For calls whose types the client leaves open."""
TRAINER = "trainer"
TOKEN_ADVICE = (
    "no Modal token is set up here: make one with `modal token new` (opens a browser), or set MODAL_TOKEN_ID and "
    "MODAL_TOKEN_SECRET; `--dry-run` shows what would be created without one"
)
_WHEELS = "/wheels"


class NotSignedIn(LiloError):
    """Modal does not know who asks; the message says what to do."""

    kind = "not_signed_in"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalApp:
    """What would be deployed, as Modal's own objects."""

    plan: Deployment
    app: modal.App
    trainer: modal.Function[..., Any, Any]
    sampler: modal.Function[..., Any, Any] | None


def build(plan: Deployment) -> ModalApp:
    """Make the objects; nothing is created at the provider."""
    app = modal.App(
        plan.app,
        tags={"lilo-definition": plan.definition, "lilo-digest": plan.digest[:16]},
        # Our packages come into the images as wheels; Modal must not add sources of its own choice.
        include_source=False,
    )
    trainer = _function(app, plan.trainer)
    sampler = None if plan.sampler is None else _function(app, plan.sampler)
    return ModalApp(plan=plan, app=app, trainer=trainer, sampler=sampler)


def deploy(built: ModalApp) -> str:
    """Create everything at the provider; returns the app's page.

    Raises:
        NotSignedIn: there is no token.
    """
    try:
        built.app.deploy(name=built.plan.app)
    except AuthError as error:
        raise NotSignedIn(TOKEN_ADVICE) from error
    return built.app.get_dashboard_url()


def start_run(built: ModalApp, run: str) -> str:
    """Call the trainer with a run; returns the id of the call.

    Raises:
        NotSignedIn: there is no token.
    """
    try:
        call = _client.Function.from_name(built.plan.app, TRAINER).spawn(run)
    except AuthError as error:
        raise NotSignedIn(TOKEN_ADVICE) from error
    return str(call.object_id)


def urls_name(app: str) -> str:
    """Name of the dictionary with the addresses of an app's runs."""
    return f"{app}-urls"


def image_of(plan: ImagePlan) -> modal.Image:
    """A container image; built at the provider when it is deployed."""
    image: modal.Image
    if plan.base is None:
        image = modal.Image.debian_slim(python_version=plan.python)
    else:
        image = _client.Image.from_registry(plan.base, add_python=plan.python)
    if plan.packages:
        image = image.pip_install(*plan.packages)
    if plan.wheels is None:
        return image.pip_install(*(own.requirement for own in plan.ours))
    # The files themselves, so that no package of the same name comes from an index; copied, since the next step of
    # the image reads them.
    files = " ".join(f"'{own.in_folder(_WHEELS)}'" for own in plan.ours)
    image = image.add_local_dir(plan.wheels, _WHEELS, copy=True)
    return image.run_commands(f"python -m pip install {files}")


def _function(app: modal.App, plan: FunctionPlan) -> modal.Function[..., Any, Any]:
    body = cast("Callable[..., Any]", getattr(bodies, plan.body))
    make = app.function(
        name=plan.name,
        image=image_of(plan.image),
        gpu=plan.gpu_text,
        cpu=plan.cpus,
        memory=plan.memory_mib,
        timeout=plan.timeout_s,
        startup_timeout=plan.startup_timeout_s,
        retries=plan.retries or None,
        single_use_containers=plan.single_use_containers,
        volumes={mount.path: _volume(mount.volume, mount.read_only) for mount in plan.mounts},
        secrets=[modal.Secret.from_name(name) for name in plan.secrets],
        env=dict(plan.environment),
        min_containers=plan.min_containers or None,
        max_containers=plan.max_containers,
        scaledown_window=plan.scaledown_s,
        include_source=False,
    )
    return make(_decorated(body, plan))


def _decorated(body: Callable[..., Any], plan: FunctionPlan) -> Any:  # noqa: ANN401 (Modal's own type is private)
    """The body with what Modal expresses as decorators below `app.function`, innermost first."""
    decorated: Any = body
    if plan.cluster_size > 1:
        decorated = _client.clustered(size=plan.cluster_size, rdma=plan.rdma)(decorated)
    if plan.port is not None:
        # A sampling server has no keys of its own: the provider lets in whoever has one of its proxy tokens.
        server = _client.web_server(
            plan.port, startup_timeout=float(plan.startup_timeout_s), requires_proxy_auth=True
        )
        decorated = server(decorated)
    if plan.max_inputs is not None:
        share = _client.concurrent(max_inputs=plan.max_inputs, target_inputs=plan.target_inputs)
        decorated = share(decorated)
    return decorated


def _volume(name: str, read_only: bool) -> modal.Volume:
    # Version 2: hundreds of writers, no limit on the number of files.
    volume = modal.Volume.from_name(name, create_if_missing=True, version=2)
    return volume.with_mount_options(read_only=True) if read_only else volume
