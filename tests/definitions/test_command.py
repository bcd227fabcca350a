"""`lilo definitions`, and definitions as arguments of other commands, driven as a person does."""

import json
import subprocess
import sys
from pathlib import Path

from lilo_engine.cli.main import build
from typer.testing import CliRunner

runner = CliRunner()


def test_list_shows_every_definition_with_its_size():
    done = runner.invoke(build(), ["definitions", "list"])
    assert done.exit_code == 0
    assert "tiny" in done.stdout
    assert "32 of rank 32" in done.stdout


def test_list_for_programs_is_json():
    done = runner.invoke(build(), ["definitions", "list", "--json"])
    (tiny,) = [entry for entry in json.loads(done.stdout) if entry["name"] == "tiny"]
    assert (tiny["base_model"], tiny["context"], tiny["slots"]) == ("tiny", 1024, 32)


def test_show_has_every_field_and_the_digest():
    done = runner.invoke(build(), ["definitions", "show", "tiny"])
    assert done.exit_code == 0
    for field in ("  family", "  alpha", "  max_batch_tokens", "  engine"):
        assert field in done.stdout
    assert "digest" in done.stdout


def test_show_says_values_as_yaml_has_them_and_a_text_as_it_is(tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_text('extends: tiny\nsummary: "a [/b] :train: [x]"\n')
    done = runner.invoke(build(), ["definitions", "show", str(path)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == "odd: a [/b] :train: [x]"
    shown = dict(line.split()[:2] for line in done.stdout.splitlines() if len(line.split()) > 2)
    assert (shown["pack_models"], shown["single_use_containers"]) == ("false", "true")
    assert (shown["gpu"], shown["pool"]) == ("null", "null")


def test_show_for_programs_is_a_definition_again():
    import lilo_definitions

    done = runner.invoke(build(), ["definitions", "show", "tiny", "--json"])
    content = json.loads(done.stdout)
    assert content.pop("digest") == lilo_definitions.digest(lilo_definitions.get("tiny"))
    assert lilo_definitions.Definition.model_validate(content) == lilo_definitions.get("tiny")


def test_an_unknown_name_is_one_line_on_stderr_with_the_nearest():
    done = runner.invoke(build(), ["definitions", "show", "tinny"])
    assert done.exit_code == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "tinny" in line
    assert "tiny" in line.removeprefix("lilo definitions: there is no definition 'tinny'")


def test_commands_print_what_is_wrong_with_a_file_in_one_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: tiny\nname: mine\nlora:\n  slots: 0\n")
    lilo = Path(sys.executable).parent / "lilo"
    for command in (["plan"], ["definitions", "show"], ["serve"]):
        done = subprocess.run(
            [lilo, *command, str(path)], capture_output=True, text=True, timeout=50, check=False
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert f"{path}:4: lora.slots is 0" in line
