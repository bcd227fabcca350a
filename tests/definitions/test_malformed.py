"""Malformed definitions, in YAML and in Python: each is one line with file, line, field, value, and what is allowed."""

import textwrap

import lilo_definitions
import pytest
from lilo_definitions import InvalidDefinition
from lilo_definitions.recipe import build

WHOLE = """\
extends: tiny
name: mine
"""

YAML = [
    # Fields: text of the file, the line at fault, and words that the message must have: field, value, what is allowed.
    ("lora:\n  slots: six\n", 4, ["lora.slots", "'six'", "a whole number"]),
    ("lora:\n  slots: 0\n", 4, ["lora.slots", "0", "greater than 0"]),
    ("lora:\n  slots: 2.5\n", 4, ["lora.slots", "2.5", "a whole number"]),
    ("lora:\n  slots: true\n", 4, ["lora.slots", "True", "a whole number"]),
    ("lora:\n  slots:\n", 4, ["lora.slots", "None", "a whole number"]),
    ("lora:\n  slotz: 6\n", 4, ["lora.slotz", "6", "did you mean slots", "max_rank"]),
    ("lora:\n  alpha: .inf\n", 4, ["lora.alpha", "inf", "finite"]),
    ("lora:\n  alpha: -1\n", 4, ["lora.alpha", "-1", "greater than 0"]),
    ("lora:\n  targets: [attn, linear_fc1x]\n", 4, ["lora.targets[1]", "'linear_fc1x'", "'mlp'"]),
    ("lora:\n  targets: [attn, linear_fc1]\n", 4, ["lora.targets", "linear_fc1", "'mlp'"]),
    ("lora:\n  targets:\n    - attn\n    - q_proj\n", 4, ["lora.targets", "q_proj", "'attn'"]),
    ("lora:\n  targets: []\n", 4, ["lora.targets", "[]", "attn, mlp, unembed"]),
    ("lora:\n  targets: [mlp, mlp]\n", 4, ["lora.targets", "mlp", "each once"]),
    ("lora:\n  targets: mlp\n", 4, ["lora.targets", "'mlp'", "a list"]),
    ("lora: 5\n", 3, ["lora", "5", "a mapping"]),
    ("dtype: float16\n", 3, ["dtype", "'float16'", "'float32' or 'bfloat16'"]),
    ("context: 4096\n", 3, ["context", "4096", "1024"]),
    ("context: '512'\n", 3, ["context", "'512'", "a whole number"]),
    ("limits:\n  max_tokens_per_rank: 100\n", 4, ["limits.max_tokens_per_rank", "100", "1024"]),
    ("limits:\n  command_s_per_token: -0.1\n", 4, ["command_s_per_token", "-0.1", "0"]),
    ("limit:\n  publication_workers: 1\n", 3, ["limit", "did you mean limits"]),
    ("topology:\n  device: gpu\n", 4, ["topology.device", "'gpu'", "'cpu' or 'cuda'"]),
    ("topology:\n  gpus_per_node: 8\n", 4, ["topology.gpus_per_node", "8", "set it to 0"]),
    (
        "topology:\n  device: cuda\n  gpus_per_node: 8\n  tp: 4\n",
        5,
        ["topology.gpus_per_node", "8", "4 ranks"],
    ),
    ("topology:\n  nodes: 2\n", 4, ["topology.nodes", "2", "multiple"]),
    ("topology:\n  rdma: true\n", 4, ["topology.rdma", "True", "nodes 1"]),
    ("topology:\n  gpu: H300\n", 4, ["topology.gpu", "'H300'", "'H200'"]),
    (
        "topology:\n  align_sequences_to_parallel_layout: yes please\n",
        4,
        ["align_sequences_to_parallel_layout", "'yes please'", "'auto', 'on' or 'off'"],
    ),
    ("trainer:\n  keep_activations: none\n", 4, ["keep_activations", "'none'", "'input'"]),
    ("trainer:\n  pack_models: on\n", 4, ["pack_models", "'on'", "true or false"]),
    ("sampler:\n  engine: sglang\n", 3, ["sampler", "None", "needs a pool"]),
    ("deployment:\n  trainer_timeout_hours: 48\n", 4, ["trainer_timeout_hours", "48", "24"]),
    ("model:\n  family: gpt2\n", 4, ["model.family", "'gpt2'", "'qwen3'"]),
    ("model:\n  vocab_size: -1\n", 4, ["model.vocab_size", "-1", "greater than 0"]),
    ("model:\n  name: ''\n", 4, ["model.name", "''", "not empty"]),
    # The file itself.
    ("context: 512\ncontext: 256\n", 4, ["context", "twice", "line 3"]),
    ("lora: {slots: 1\n", 4, ["not YAML"]),
    ("lora: &a\n  slots: 1\nlimits: *a\n", 5, ["alias", "extends"]),
    ("<<: {context: 5}\n", 3, ["<<", "extends"]),
    ("5: 6\n", 3, ["'5'", "field name"]),
    ("context: !!python/name:os.system x\n", 3, ["context"]),
    ("context: !mine 5\n", 3, ["!mine", "plain value"]),
]
"""What follows the first two lines of the file."""

FILES = [
    ("", 1, ["empty", "mapping"]),
    ("- tiny\n", 1, ["a list", "mapping"]),
    ("extends: tinny\n", 1, ["extends", "'tinny'", "tiny"]),
    ("extends: [tiny]\n", 1, ["extends", "['tiny']", "expected"]),
    ("name: x\nextends: other.yaml\n", 2, ["extends", "'other.yaml'", "no file"]),
    ("name: x\nextends: mine.yaml\n", 2, ["mine.yaml", "circle"]),
    ("name: mine\nsummary: alone\n", 1, ["model is missing", "lora is missing"]),
    ("name: no spaces\nextends: tiny\n", 1, ["name", "'no spaces'", "letters, digits"]),
]

PYTHON = [
    # Body of a function that returns a definition; the line at fault is the one marked `# here`.
    ("return Lora(slots=0, max_rank=8, alpha=32.0)  # here", ["lora.slots", "0", "greater than 0"]),
    ("return tiny().derive(lora={'slots': '6'})  # here", ["lora.slots", "'6'", "whole number"]),
    ("return tiny().derive(contxt=5)  # here", ["contxt", "5", "did you mean context"]),
    ("return tiny().derive(context=2048)  # here", ["context", "2048", "1024"]),
    ("x = tiny()\nreturn Topology(tp=0)  # here", ["topology.tp", "0", "greater than 0"]),
    (
        "return Topology(device='cuda', gpus_per_node=4)  # here",
        ["topology.gpus_per_node", "4", "1 ranks"],
    ),
    (
        "return Pool(gpu='H200', gpus_per_replica=1, min_replicas=3, max_replicas=2, target_sequences=1)  # here",
        ["sampler.pool.min_replicas", "3", "max_replicas"],
    ),
    ("return ModelSpec(name='m')  # here", ["model.source is missing", "model.family is missing"]),
    (
        "return tiny().derive(lora={'targets': ('mlp', 'lm_head')})  # here",
        ["lm_head", "'unembed'"],
    ),
    ("return tiny(5)  # here", ["TypeError", "mine"]),
    ("return undefined_name  # here", ["NameError", "undefined_name"]),
]

HEAD = "from lilo_definitions import *\nfrom lilo_definitions.families.tiny import tiny\n\ndef mine():\n"


def refusal(call) -> str:
    with pytest.raises(InvalidDefinition) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [(WHOLE + text, line, words) for text, line, words in YAML] + FILES,
)
def test_a_yaml_file_is_refused_with_file_line_field_value_and_what_is_allowed(
    text, line, words, tmp_path
):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    message = refusal(lambda: lilo_definitions.get(str(path)))
    assert f"{path}:{line}: " in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("body", "words"), PYTHON)
def test_a_python_recipe_is_refused_with_file_line_field_value_and_what_is_allowed(
    body, words, tmp_path
):
    path = tmp_path / "recipes.py"
    path.write_text(HEAD + textwrap.indent(body, "    ") + "\n")
    space: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    message = refusal(lambda: build("mine", space["mine"]))
    lines = path.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# here"))
    assert f"{path}:{line}: " in message
    for word in words:
        assert word in message


def test_a_recipe_that_returns_something_else_is_refused_where_it_is_written():
    message = refusal(lambda: build("mine", lambda: {"name": "mine"}))
    assert message.startswith(f"{__file__}:")
    assert "dict" in message


@pytest.mark.parametrize(
    ("text", "asked", "words"),
    [
        ("def mine(:\n", ":mine", [":1: ", "not Python"]),
        ("x = 1\nimport a_module_that_is_not_there\n", ":mine", [":2: ", "ModuleNotFoundError"]),
        (HEAD + "    return tiny()\n", ":yours", [":1: ", "'yours'", "there are: mine"]),
        (HEAD + "    return tiny()\ndef two(): ...\n", "", [":1: ", "mine, two"]),
        (
            HEAD + "    return tiny()\nlarge = Lora(slots=0, max_rank=1, alpha=1.0)\n",
            "",
            [":6: ", "lora.slots is 0"],
        ),
    ],
)
def test_a_python_file_that_cannot_be_run_says_where(text, asked, words, tmp_path):
    path = tmp_path / "recipes.py"
    path.write_text(text)
    message = refusal(lambda: lilo_definitions.get(f"{path}{asked}"))
    assert message.startswith(f"{path}{words[0]}")
    for word in words[1:]:
        assert word in message


def test_a_python_file_stands_for_a_name(tmp_path):
    path = tmp_path / "recipes.py"
    path.write_text(HEAD + "    return tiny().derive(name='mine', lora={'slots': 64})\n")
    assert lilo_definitions.get(f"{path}:mine").lora.slots == 64
    assert lilo_definitions.get(str(path)) == lilo_definitions.get(f"{path}:mine")


def test_there_are_more_than_forty():
    assert len(YAML) + len(FILES) + len(PYTHON) >= 40


def test_every_problem_of_a_file_is_in_the_one_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(WHOLE + "lora:\n  slots: 0\n  max_rank: x\n")
    message = refusal(lambda: lilo_definitions.get(str(path)))
    assert f"{path}:4: lora.slots" in message
    assert f"{path}:5: lora.max_rank" in message


def test_a_file_that_is_not_text_says_where(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"name: x\nsummary: \xff\n")
    assert f"{path}:2: " in refusal(lambda: lilo_definitions.get(str(path)))


def test_a_file_that_is_not_there_says_so():
    assert "cannot be read" in refusal(lambda: lilo_definitions.get("nowhere/mine.yaml"))
