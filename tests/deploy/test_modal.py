"""Modal's own objects, looked at offline, and the trainer's own body with what a cluster would say."""

import json
from contextlib import contextmanager

import lilo_definitions
import modal
import pytest
from lilo_engine.cli.main import build as build_cli
from lilo_engine.cluster.bring_up import BringUp
from lilo_engine.deploy import bodies, plan
from lilo_engine.deploy.modal import ModalApp, build, image_of
from lilo_engine.errors import ServerError
from typer.testing import CliRunner

from tests.deploy.fields import changed, fields_of
from tests.deploy.local_provider import LocalProvider, newer_client, older_client

BIG = lilo_definitions.get("qwen3_8_27b_miles_lora_256k")
WITHOUT_POOL = BIG.derive(sampler={"engine": "embedded", "pool": None})
"""A cluster whose sampling engine is installed where the tests run."""


def built(definition, **options) -> ModalApp:
    return build(plan(definition, **options))


def seen(function) -> dict:
    """What Modal will be asked for, as it tells itself."""
    info = function.info()
    cluster = info.cluster_info
    return {
        "gpu": info.gpus,
        "cpu": info.cpu,
        "memory": info.memory_mib,
        "timeout": info.timeout,
        "startup": info.startup_timeout,
        "retries": info.max_retries or 0,
        "single_use": info.single_use_containers,
        "cluster": (cluster.size, cluster.rdma) if cluster else (1, False),
        "volumes": {path: (v.name, v.read_only) for path, v in info.volumes.items()},
        "secrets": info.secrets,
        "inputs": info.concurrency_info and (info.concurrency_info.target_inputs,
                                             info.concurrency_info.max_inputs),
    }  # fmt: skip


def wanted(function) -> dict:
    """The same, from the plan."""
    named = [f"modal.Secret.from_name({name!r})" for name in function.secrets]
    return {
        "gpu": [(function.gpu, function.num_gpus)] if function.gpu else [],
        "cpu": function.cpus,
        "memory": function.memory_mib,
        "timeout": function.timeout_s,
        "startup": function.startup_timeout_s,
        "retries": function.retries,
        "single_use": function.single_use_containers,
        "cluster": (function.cluster_size, function.rdma),
        "volumes": {mount.path: (mount.volume, mount.read_only) for mount in function.mounts},
        "secrets": [*named, f"Secret.from_dict([{', '.join(function.environment)}])"],
        "inputs": function.max_inputs and (function.target_inputs, function.max_inputs),
    }


@pytest.mark.parametrize("name", lilo_definitions.names())
def test_modal_is_asked_for_what_the_plan_says(name):
    app = built(lilo_definitions.get(name))
    assert seen(app.trainer) == wanted(app.plan.trainer)
    assert (app.sampler is None) == (app.plan.sampler is None)
    if app.sampler is not None:
        assert seen(app.sampler) == wanted(app.plan.sampler)


def test_the_256k_trainer_is_a_cluster_of_two_hosts_with_rdma():
    info = built(BIG).trainer.info()
    assert info.gpus == [("H200", 8)]
    assert (info.cluster_info.size, info.cluster_info.rdma) == (2, True)
    assert {v.name for v in info.volumes.values() if not v.read_only} == {
        BIG.deployment.checkpoints_volume,
        BIG.deployment.bulletin_volume,
    }


def test_a_replica_is_open_only_to_holders_of_a_token_of_the_provider():
    assert not built(BIG).sampler.info().web_info.unauthenticated


def test_every_field_changes_what_modal_gets_or_is_refused(monkeypatch):
    given = record_functions(monkeypatch)

    def asked(definition):
        given.clear()
        build(plan(definition))
        return json.dumps(given, default=str, sort_keys=True)

    same = asked(BIG)
    assert asked(BIG) == same
    for path, value in fields_of(BIG):
        try:
            other = BIG.derive(**changed(path, value))
            assert asked(other) != same, path
        except ValueError:
            continue  # Refused, by name: test_deployment.py.


def record_functions(monkeypatch) -> list[dict]:
    """What `App.function` is called with; the call goes through."""
    given: list[dict] = []
    real = modal.App.function

    def recording(self, **options):
        shown = {k: v for k, v in options.items() if k not in ("image", "secrets", "volumes")}
        volumes = {path: volume.name for path, volume in options["volumes"].items()}
        given.append({**shown, "volumes": volumes, "num_secrets": len(options["secrets"])})
        return real(self, **options)

    monkeypatch.setattr(modal.App, "function", recording)
    return given


def test_workers_get_the_variables_of_the_plan(monkeypatch):
    given = record_functions(monkeypatch)
    planned = plan(BIG)
    build(planned)
    assert [options["env"] for options in given] == [
        dict(planned.trainer.environment),
        dict(planned.sampler.environment),
    ]


def test_images_take_our_wheels_from_a_folder_where_one_is_given(tmp_path):
    (tmp_path / "lilo_engine-0.1.0-py3-none-any.whl").touch()
    for function in (plan(BIG, wheels=str(tmp_path)).trainer, plan(BIG).trainer):
        assert isinstance(image_of(function.image), modal.Image)


@pytest.mark.parametrize("client", [newer_client, older_client])
def test_the_body_joins_its_cluster_by_either_of_the_providers_ways(monkeypatch, client):
    for name, value in plan(WITHOUT_POOL).trainer.environment.items():
        monkeypatch.setenv(name, value)
    places = []

    def note(cluster):
        places.append(cluster)
        return BringUp(cluster=cluster, start=_no_ray)

    provider = LocalProvider(client=client(0, ["127.0.0.1", "127.0.0.2"]))
    with pytest.raises(ServerError, match="no ray here"):
        bodies.run_trainer("r", provider, bring_up_of=note)
    assert places[0].is_head
    assert places[0].addresses == ("127.0.0.1", "127.0.0.2")


def _no_ray(command, environment):
    raise OSError("no ray here")


def test_modals_own_function_runs_our_body_and_reads_modals_cluster(monkeypatch):
    app = built(WITHOUT_POOL)
    for name, value in app.plan.trainer.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(modal, "Cluster", newer_client(0, ["127.0.0.1"]).Cluster)
    with (
        pytest.warns(UserWarning, match="executing locally"),
        pytest.raises(ServerError, match="has 1 containers"),
    ):
        app.trainer.local("r")


def test_outside_a_cluster_the_providers_own_error_is_seen(monkeypatch):
    for name, value in plan(WITHOUT_POOL).trainer.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(modal.exception.InvalidError):
        bodies.run_trainer("r", LocalProvider(client=modal))


def test_the_provider_makes_addresses_public_and_calls_the_next_container(monkeypatch):
    from lilo_engine.deploy.modal_provider import ModalProvider

    spawned, written = [], {}

    class Function:
        @staticmethod
        def from_name(app, name):
            return type(
                "F", (), {"spawn": staticmethod(lambda run: spawned.append((app, name, run)))}
            )

    class Dict:
        @staticmethod
        def from_name(name, create_if_missing):
            return written.setdefault(name, {})

    @contextmanager
    def forward(port):
        yield type("Tunnel", (), {"url": f"https://{port}.example"})

    monkeypatch.setattr(modal, "Function", Function)
    monkeypatch.setattr(modal, "Dict", Dict)
    monkeypatch.setattr(modal, "forward", forward)
    provider = ModalProvider()
    with provider.forward(8010) as url:
        provider.publish_url("lilo-tiny", "r", url)
    provider.call_again("lilo-tiny", "r")
    assert written == {plan(lilo_definitions.get("tiny")).urls: {"r": "https://8010.example"}}
    assert spawned == [("lilo-tiny", "trainer", "r")]


def test_without_a_token_deploy_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(build_cli("deploy"), ["deploy", "tiny"])
    assert done.exit_code == 1
    assert "modal token new" in done.stderr


def test_a_dry_run_prints_one_json_object_with_resources_and_cost():
    done = CliRunner().invoke(build_cli("deploy"), ["deploy", BIG.name, "--dry-run", "--json"])
    said = json.loads(done.stdout)
    assert done.exit_code == 0
    assert said["trainer"]["cluster_size"] == 2
    assert said["usd_per_hour"]["least"] > said["usd_per_hour"]["trainer"] > 0
    assert said["volumes"]
    table = CliRunner().invoke(build_cli("deploy"), ["deploy", BIG.name, "--dry-run"])
    assert "H200:8" in table.stdout


def test_an_unknown_definition_and_an_empty_wheels_folder_are_one_line(tmp_path):
    for arguments in (["nonsense"], ["tiny", "--wheels", str(tmp_path)]):
        done = CliRunner().invoke(build_cli("deploy"), ["deploy", *arguments, "--dry-run"])
        assert done.exit_code == 1
        assert len(done.stderr.splitlines()) == 1
