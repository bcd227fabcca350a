"""`lilo cluster` and `--ray` as they are typed: what cannot work is one line that says what to do."""

from __future__ import annotations

import pytest
from lilo_engine.cli.main import build
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.launcher import ProcessLauncher
from lilo_engine.errors import BackendLost, InvalidRequest
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.launch import launch
from typer.testing import CliRunner

from tests.cluster.conftest import world_of_two


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["join"], "give --head HOST:PORT"),
        (["join", "--head", "nowhere"], "'nowhere'"),
        (["join", "--head", "127.0.0.1:1", "--wait", "0.1"], "within 0.1 s"),
        (["head", "--address", "8.8.8.8"], "public address"),
        (["head", "--address", "10.99.99.99"], "does not have the address"),
        (["head", "--containers", "2"], "no container of a Modal cluster"),
    ],
)
def test_what_cannot_work_is_one_line(words: list[str], told: str) -> None:
    result = CliRunner().invoke(build("cluster"), ["cluster", *words])
    assert result.exit_code == 1
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def over_two_nodes():
    definition = world_of_two()
    topology = definition.topology.model_copy(update={"nodes": 2})
    return definition.model_copy(update={"topology": topology})


def test_several_nodes_without_a_cluster_are_refused_with_the_way_to_one(tmp_path) -> None:
    config = BackendConfig(definition=over_two_nodes(), checkpoints_root=str(tmp_path), epoch=1)
    with pytest.raises(InvalidRequest, match="--ray ADDRESS"):
        launch(config, BackendSettings())


@pytest.mark.anyio
async def test_a_trainer_that_cannot_be_built_is_told_in_its_own_words_and_no_others(
    tmp_path,
) -> None:
    launcher = ProcessLauncher(
        definition=over_two_nodes(), checkpoints_root=tmp_path, log_path=tmp_path / "log"
    )
    with pytest.raises(BackendLost, match="lilo cluster head") as caught:
        await launcher.start(1)
    assert "Traceback" not in caught.value.message
    assert "the last lines" not in caught.value.message
