"""Scripts, images and workflows outside the packages: linted, what they call is there, and the Slurm job is run."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import lilo_definitions
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SHELL = [ROOT / ".ci/run", *sorted((ROOT / "scripts").glob("*.sh"))]
SLURM = ROOT / "examples/slurm/lilo.sbatch"
COMPOSE = ROOT / "examples/docker/compose.yaml"
DOCKERFILE = ROOT / "examples/docker/Dockerfile"


def linter(name: str, *arguments: object, text: str | None = None) -> None:
    """Run a linter of the environment; its finds are the failure."""
    done = subprocess.run(
        [str(BIN / name), *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", [*SHELL, SLURM], ids=lambda path: path.name)
def test_shell_scripts_are_clean(script):
    linter("shellcheck", script)


def test_the_dockerfile_is_clean_and_copies_only_what_is_sent():
    linter("hadolint", DOCKERFILE)
    copied = re.findall(r"^COPY (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert copied == ["dist/*.whl"]
    assert "!dist/*.whl" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_compose_file_is_valid_and_gives_the_server_its_records():
    linter("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    lilo, records = services["lilo"], services["records"]
    assert (COMPOSE.parent / lilo["build"]["context"] / lilo["build"]["dockerfile"]).is_file()
    assert lilo["environment"]["LILO_RECORDS_URL"].startswith("postgresql+psycopg://lilo:")
    assert records["environment"]["POSTGRES_USER"] == "lilo"
    assert lilo["depends_on"]["records"]["condition"] == "service_healthy"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples/cluster").glob("*.yaml")), ids=lambda p: p.name
)
def test_definitions_among_the_examples_hold(path):
    assert lilo_definitions.get(str(path)).name == path.stem


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_valid_and_their_steps_are_clean_shell(workflow):
    linter("check-jsonschema", "--builtin-schema", "vendor.github-workflows", workflow)
    linter(
        "check-jsonschema", "--builtin-schema", "custom.github-workflows-require-timeout", workflow
    )
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        for step in job["steps"]:
            if "run" in step:
                # What the workflow puts in is text of its own file, never a stranger's.
                script = re.sub(r"\$\{\{ matrix\.\w+ \}\}", "value", step["run"])
                assert "${{" not in script, f"put {script!r} into env: it could run as shell"
                linter("shellcheck", "--shell=bash", "-", text=f"set -e\n{script}\n")


def test_what_workflows_call_is_there():
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    for path in re.findall(r"(?<![\w/])(?:scripts|tests|\.ci)/[\w./-]+", text):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z][a-z-]*)%?:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert target in targets or (ROOT / f"proofs/{target.removeprefix('prove-')}.py").is_file()


def test_publishing_sees_no_source_and_holds_no_other_right():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("run" in step or "checkout" in step["uses"] for step in publish["steps"])
    assert "id-token" not in jobs["build"].get("permissions", {})


@pytest.fixture
def job(tmp_path):
    """The Slurm job with a `lilo` that serves until it is told to end, and an `sbatch` that notes its call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    _program(
        folder / "lilo",
        """
        [ "$1" = cluster ] && echo "lilo: the head of a cluster is at 10.0.0.1:6379"
        [ "$1" = cluster ] && LILO_DATA_DIR=$LILO_DATA_DIR/head && mkdir -p "$LILO_DATA_DIR"
        trap 'echo ended >> "$LILO_DATA_DIR/said"; exit 0' TERM
        echo "$@" > "$LILO_DATA_DIR/said"
        echo serving
        while :; do read -r -t 1 _ <> <(:) || true; done
        """,
    )
    _program(folder / "sbatch", 'echo "$LILO_CHAIN $*" > "$LILO_DATA_DIR/next"')
    _program(folder / "srun", 'echo "$*" > "$LILO_DATA_DIR/joined"')
    return tmp_path


def _program(path: Path, body: str) -> None:
    path.write_text("#!/usr/bin/env bash\n" + textwrap.dedent(body))
    path.chmod(0o755)


def run_job(job: Path, **variables: str) -> list[str]:
    """Run it until it serves, end it as Slurm does, and return what the server noted."""
    environment = {
        **os.environ,
        "PATH": f"{job / 'bin'}:{os.environ['PATH']}",
        "LILO_DATA_DIR": str(job / "data"),
        "LILO_VENV": str(job),
        "SLURM_JOB_ID": "77",
        **variables,
    }
    with subprocess.Popen(
        ["bash", str(SLURM)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        while "serving" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    return (job / "data/said").read_text().splitlines()


@pytest.mark.parametrize(("chain", "following"), [("2", "1 --export=ALL"), ("0", None)])
def test_a_slurm_job_ends_its_server_in_order_and_is_followed_by_the_next(job, chain, following):
    said = run_job(job, LILO_CHAIN=chain)
    assert said[0].startswith("serve tiny --host 0.0.0.0 --port 20077 --api-key-file")
    assert "--ray" not in said[0]
    assert said[1:] == ["ended"]
    note = job / "data/next"
    assert (note.read_text().startswith(following) if following else not note.exists()) is True


def test_a_slurm_job_of_several_nodes_makes_a_cluster_of_them_and_ends_it(job):
    said = run_job(job, SLURM_JOB_NUM_NODES="3", SLURMD_NODENAME="first")
    assert said[0].endswith("--ray 10.0.0.1:6379")
    joined = (job / "data/joined").read_text()
    assert "--nodes=2" in joined
    assert "--exclude=first" in joined
    assert joined.rstrip().endswith("lilo cluster join --head 10.0.0.1:6379")
    head = (job / "data/head/said").read_text().splitlines()
    assert head[0] == "cluster head --port 40077"
    assert head[1:] == ["ended"]
