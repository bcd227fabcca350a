"""New environments with one package of ours in them, for the tests of wheels, READMEs and releases."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

UV = Path(sys.executable).with_name("uv")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def clean_environment(**more: str) -> dict[str, str]:
    """Without the traces of the environment that runs the tests, and without progress bars."""
    hidden = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH", "LILO_DATA_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "UV_NO_PROGRESS": "1", "OMP_NUM_THREADS": "1", **more}


def run(*command: str | Path, cwd: Path, timeout_s: float = 240, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_all(root: Path, folder: Path) -> Path:
    """Four wheels and four source archives, without leaning on the workspace."""
    run(
        *(UV, "build", "--quiet", "--all-packages", "--no-sources"),
        *("--python", sys.executable, "--out-dir", folder),
        cwd=root,
    )
    return folder


def one_wheel(dist: Path, name: str) -> Path:
    """The wheel of a package."""
    (path,) = dist.glob(f"{name.replace('-', '_')}-*.whl")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A new environment and the folder it lies in."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    def compile(self) -> None:
        """Write bytecode, as pip does where uv leaves it to the first run; a file may be for another Python."""
        command = [self.python, "-m", "compileall", "-q", self.folder / "venv" / "lib"]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=240, check=False)

    def installed(self) -> set[str]:
        """Names of the distributions in it."""
        lines = run(UV, "pip", "freeze", "--python", self.python, cwd=self.folder).splitlines()
        return {re.split(r"[=@ ]", line)[0].lower() for line in lines if line}


def install(
    folder: Path, dist: Path, name: str, *, extra: str = "", options: tuple[str, ...] = ()
) -> Environment:
    """A new environment with one wheel and what it asks for. Siblings come from `dist`, the rest from the index."""
    made = Environment(folder=folder)
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    wheel = str(one_wheel(dist, name)) + (f"[{extra}]" if extra else "")
    what = [wheel]
    if name == "lilo-miles-backend":
        # The torch that the set-up chose for this machine, a CPU build as a rule, instead of the newest for CUDA.
        what.append(f"torch=={version('torch')}")
    run(
        *(UV, "pip", "install", "--quiet", "--python", made.python, *options),
        *("--find-links", dist, *_where_torch_is(), *what),
        cwd=folder,
        timeout_s=550,
    )
    run(UV, "pip", "check", "--quiet", "--python", made.python, cwd=folder)
    return made


def _where_torch_is() -> tuple[str, ...]:
    """What pip was told by the machine, for uv, which reads other variables."""
    links = tuple(
        part for folder in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("-f", folder)
    )
    index = os.environ.get("TORCH_INDEX_URL")
    return (*links, "--index", index) if index else links


def blocks(readme: Path) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks of a README that can be run: python and sh."""
    found = FENCE.findall(readme.read_text(encoding="utf-8"))
    return [(language, text) for language, text in found if language in ("python", "sh")]


def run_readme(readme: Path, environment: Environment, folder: Path) -> int:
    """Run every block as it is written, top to bottom, in one folder; how many there were."""
    found = blocks(readme)
    path = f"{environment.bin}:{os.environ['PATH']}"
    for number, (language, text) in enumerate(found):
        if language == "sh":
            command: tuple[str | Path, ...] = ("bash", "-euo", "pipefail", "-c", text)
        else:
            script = folder / f"block_{number}.py"
            script.write_text(text, encoding="utf-8")
            command = (environment.python, script)
        run(*command, cwd=folder, PATH=path, timeout_s=280)
    return len(found)
