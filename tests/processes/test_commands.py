"""`lilo engine` and `lilo front` at the command line: what they refuse, in one line that says what to do."""

from __future__ import annotations

import pytest
from lilo_engine.cli import front as front_module
from lilo_engine.cli.main import build
from lilo_engine.control.lease import Lease
from lilo_engine.control.records import Records
from typer.testing import CliRunner

from tests.conformance.test_serve import refused


def test_a_front_without_records_says_what_to_start_first(tmp_path):
    line = refused("front", "--port", "0", "--data-dir", str(tmp_path))
    assert str(tmp_path / "records.sqlite3") in line
    assert "start the engine first" in line
    assert not (tmp_path / "records.sqlite3").exists()


@pytest.mark.parametrize("command", [("front",), ("engine", "tiny")])
def test_a_password_is_not_taken_from_the_command_line(tmp_path, command):
    url = "postgresql+psycopg://lilo:secret@127.0.0.1/lilo"
    line = refused(*command, "--port", "0", "--data-dir", str(tmp_path), "--records", url)
    assert "LILO_RECORDS_URL" in line
    assert "secret" not in line


def test_an_engine_that_listens_everywhere_needs_an_address_for_its_fronts(tmp_path):
    arguments = ["--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path)]
    assert "--address" in refused("engine", "tiny", *arguments)


def test_records_of_another_version_are_not_touched_by_a_front(tmp_path):
    records = Records.at(tmp_path)
    with records.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    records.close()
    line = refused("front", "--port", "0", "--data-dir", str(tmp_path))
    assert "0001" in line
    assert "start an engine of the same version" in line


def test_a_front_waits_for_an_engine_and_then_names_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setattr(front_module, "FIRST_LOOK_S", 0.1)
    monkeypatch.setattr(front_module, "FIND_S", 0.1)
    records = Records.at(tmp_path)
    Lease.take(records, "lilo engine tiny (pid 1 on host)", address="http://host").give_back()
    records.close()
    key = tmp_path / "key"
    arguments = ["--port", "0", "--data-dir", str(tmp_path), "--api-key-file", str(key)]
    result = CliRunner().invoke(build("front"), ["front", *arguments], env={"LILO_API_KEY": ""})
    assert result.exit_code == 1, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 2, lines
    assert "waiting" in lines[0]
    assert "pid 1 on host" in lines[1]
    assert "lilo engine" in lines[1]
