"""Definitions in YAML: inheritance, what a file may leave out, and texts that YAML would misread."""

import lilo_definitions
import pytest


def get(path, text):
    path.write_text(text)
    return lilo_definitions.get(str(path))


def test_a_file_changes_what_it_names_and_inherits_the_rest(tmp_path):
    mine = get(tmp_path / "wide.yaml", "extends: tiny\nlora: {slots: 64}\n")
    assert mine == lilo_definitions.get("tiny").derive(name="wide", lora={"slots": 64})


def test_a_file_extends_a_file_beside_it(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: tiny\nsummary: Base\nlora: {slots: 64}\n")
    mine = get(tmp_path / "mine.yaml", "extends: base.yaml\nlora: {max_rank: 8}\n")
    assert (mine.name, mine.summary) == ("mine", "Base")
    assert (mine.lora.slots, mine.lora.max_rank) == (64, 8)


def test_a_problem_is_reported_in_the_file_that_wrote_the_field(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: tiny\nlora: {slots: 0}\n")
    with pytest.raises(lilo_definitions.InvalidDefinition, match=r"base\.yaml:2: lora\.slots"):
        get(tmp_path / "mine.yaml", "extends: base.yaml\n")


def test_a_whole_definition_needs_no_base(tmp_path):
    import yaml

    tiny = lilo_definitions.get("tiny").model_dump(mode="json")
    assert get(tmp_path / "tiny.yaml", yaml.safe_dump(tiny)) == lilo_definitions.get("tiny")


def test_off_is_a_text_and_numbers_may_have_exponents(tmp_path):
    mine = get(
        tmp_path / "mine.yaml",
        "extends: tiny\n"
        "topology: {align_sequences_to_parallel_layout: off}\n"
        "limits: {command_s_per_token: 1e-3, max_batch_tokens: 65_536}\n",
    )
    assert mine.topology.align_sequences_to_parallel_layout == "off"
    assert (mine.limits.command_s_per_token, mine.limits.max_batch_tokens) == (0.001, 65536)


def test_a_value_can_be_taken_away(tmp_path):
    mine = get(
        tmp_path / "mine.yaml",
        "extends: qwen3_8_27b_miles_lora_256k\nlimits: {max_forward_backward_batch: null}\n",
    )
    assert mine.limits.max_forward_backward_batch is None


def test_a_relative_model_folder_is_relative_to_the_file(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    path = tmp_path / "mine.yaml"
    path.write_text("extends: tiny\nmodel: {source: ./model}\n")
    monkeypatch.chdir(tmp_path.parent)
    assert lilo_definitions.get(str(path)).model.source == str(folder)
