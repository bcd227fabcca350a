"""Definition: what fits, what does not, and that the numbers are in the message."""

import json

import lilo_definitions
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lilo_definitions import Definition, InvalidDefinition, InvalidSource, Lora, Topology
from pydantic import ValidationError


def changed(**parts) -> Definition:
    """tiny with some fields changed."""
    return lilo_definitions.get("tiny").derive(**parts)


def test_a_definition_cannot_be_changed():
    definition = lilo_definitions.get("tiny")
    with pytest.raises(ValidationError):
        definition.context = 5


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(ValidationError):
        changed(lora={"dropout": 0.1})


def test_a_context_over_the_model_is_refused_with_both_numbers():
    with pytest.raises(ValidationError, match=r"2048.*1024"):
        changed(context=2048)


def test_a_row_that_cannot_fit_one_microbatch_is_refused_with_both_numbers():
    with pytest.raises(ValidationError, match=r"1024.*512"):
        changed(limits={"max_tokens_per_rank": 512})


def test_context_parallel_ranks_share_a_row():
    halved = changed(limits={"max_tokens_per_rank": 512}, topology={"cp": 2})
    assert halved.topology.world_size == 2


@pytest.mark.parametrize(
    ("field", "value"), [("slots", 0), ("max_rank", 0), ("max_rank", -1), ("alpha", 0.0)]
)
def test_a_count_of_zero_is_refused(field, value):
    with pytest.raises(ValidationError):
        changed(lora={field: value})


@pytest.mark.parametrize("targets", [(), ("attn", "attn"), ("attention",)])
def test_targets_are_known_and_named_once(targets):
    with pytest.raises(ValidationError):
        Lora(slots=1, max_rank=8, alpha=32, targets=targets)


def test_ranks_and_gpus_must_be_equal_and_the_message_multiplies():
    with pytest.raises(ValidationError, match=r"4 x cp 2 x dp 1 = 8.*1 nodes x 4 GPUs = 4"):
        Topology(device="cuda", tp=4, cp=2, gpus_per_node=4)


def test_gpus_on_a_cpu_layout_are_refused():
    with pytest.raises(ValidationError):
        Topology(device="cpu", gpus_per_node=8)


def test_ranks_spread_evenly_over_nodes():
    with pytest.raises(ValidationError):
        Topology(device="cpu", nodes=2, tp=3)
    assert Topology(device="cuda", nodes=2, gpus_per_node=8, tp=2, cp=8).world_size == 16


def test_tiny_fits_its_own_model():
    config = lilo_definitions.check_fits_model(lilo_definitions.get("tiny"))
    assert (config.hidden_size, config.num_attention_heads) == (128, 4)


@pytest.mark.parametrize(
    ("parts", "numbers"),
    [
        ({"model": {"vocab_size": 300}}, r"300.*260"),
        ({"model": {"context": 2048}}, r"2048.*1024"),
        ({"lora": {"max_rank": 256}}, r"256.*128"),
        ({"topology": {"tp": 3}}, r"topology.tp 3 does not divide num_key_value_heads 2$"),
    ],
)
def test_what_does_not_fit_the_model_is_said_with_its_numbers(parts, numbers):
    with pytest.raises(InvalidDefinition, match=numbers):
        lilo_definitions.check_fits_model(changed(**parts))


def test_every_misfit_is_in_one_message():
    with pytest.raises(InvalidDefinition, match=r"(?s)300.*256"):
        lilo_definitions.check_fits_model(
            changed(model={"vocab_size": 300}, lora={"max_rank": 256})
        )


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"model_type": "qwen3"}'])
def test_an_unreadable_config_names_the_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidSource, match=r"config\.json"):
        lilo_definitions.read_model_config(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "/nowhere/at/all",
        "package:lilo_definitions",
        "package:lilo_definitions/",
        "package:lilo_definitions/data/none",
        "package:lilo_definitions/../secrets",
        "package:lilo_definitions//etc",
        "package:no_such_package_here/data",
        "package:json.decoder/data",
    ],
)
def test_a_source_that_leads_nowhere_is_refused(source):
    with pytest.raises(InvalidSource):
        lilo_definitions.resolve_source(source)


def test_a_folder_is_a_source_only_with_a_config(tmp_path):
    with pytest.raises(InvalidSource):
        lilo_definitions.resolve_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert lilo_definitions.resolve_source(str(tmp_path)) == tmp_path


def test_equal_content_has_an_equal_digest_and_other_content_another():
    tiny = lilo_definitions.get("tiny")
    again = Definition.model_validate_json(tiny.model_dump_json())
    assert lilo_definitions.digest(again) == lilo_definitions.digest(tiny)
    assert lilo_definitions.digest(changed(context=512)) != lilo_definitions.digest(tiny)
    assert len(lilo_definitions.digest(tiny)) == 64


def test_canonical_json_writes_defaults_out_and_sorts_keys():
    text = lilo_definitions.canonical_json(lilo_definitions.get("tiny"))
    content = json.loads(text)
    assert list(content) == sorted(content)
    assert content["limits"]["publication_workers"] == 2


@given(tp=st.integers(1, 16), cp=st.integers(1, 16), dp=st.integers(1, 16))
def test_any_layout_on_as_many_gpus_holds(tp, cp, dp):
    topology = Topology(device="cuda", tp=tp, cp=cp, dp=dp, gpus_per_node=tp * cp * dp)
    assert topology.world_size == topology.nodes * topology.gpus_per_node
