#!/usr/bin/env bash
# Fills .venv with torch, the four packages, all extras and the development tools. Needs Python >= 3.11 and a network.
#
#   scripts/setup.sh
#
# Done already (same lock, same projects, same choices below): returns within a fraction of a second.
# Choices, by environment variable:
#   PYTHON            interpreter for .venv             (default: python3, or another that is 3.11 or 3.12, else newer)
#   TORCH_SPEC        what pip is asked for             (default: torch==2.13.0)
#   TORCH_INDEX_URL   package index for torch alone     (default: whatever pip is set up to use)
#
# torch is not in uv.lock: it comes first, by pip, so that the machine decides between a CPU and a CUDA build (a local CPU
# wheel sorts above the one of the index). uv then syncs the lock, which leaves torch out, with --inexact, which leaves
# torch in place.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.lilo-setup
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
UV_SPEC='uv>=0.13,<0.14'

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

fingerprint() {
  cat uv.lock pyproject.toml packages/*/pyproject.toml scripts/setup.sh | cksum
  printf '%s %s\n' "$TORCH_SPEC" "${TORCH_INDEX_URL:-}"
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
tested() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of 3.11 or later; name one that is"
    echo "$PYTHON"
    return
  fi
  local candidate
  # Tested versions first: a python3 that is newer than them gives way to one of them, if there is one.
  for candidate in python3 python3.12 python3.11; do
    if tested "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  for candidate in python3 python3.13 python3.14 python; do
    if new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python of 3.11 or later found (python3 is $(python3 --version 2>&1 || true)); install one, or name it: make setup PYTHON=/path/to/python3.11"
}

make_venv() {
  if [ -x "$VENV/bin/python" ] && new_enough "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python=$(find_python)
  say "creating $VENV with $("$python" --version)"
  "$python" -m venv --clear "$VENV" ||
    fail "$python cannot make a virtual environment; install its venv and ensurepip modules (python3-venv on Debian)"
}

put_in_torch() {
  # Asks the installed metadata, without importing torch (which takes seconds), and without an index where it fits.
  if "$VENV/bin/python" - "$TORCH_SPEC" 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version
from pip._vendor.packaging.requirements import Requirement

sys.exit(not Requirement(sys.argv[1]).specifier.contains(version("torch"), prereleases=True))
PYTHON
  then
    return
  fi
  say "$TORCH_SPEC by pip${TORCH_INDEX_URL:+ from $TORCH_INDEX_URL} (some minutes where it has to be downloaded)"
  quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH_SPEC" ||
    fail "pip could not install $TORCH_SPEC; choose an index with TORCH_INDEX_URL or another version with TORCH_SPEC"
}

sync() {
  quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$UV_SPEC" ||
    fail "pip could not install $UV_SPEC; see the message above"
  say "four packages and the development tools by uv"
  # VIRTUAL_ENV of a calling shell would only make uv warn; it works on .venv in any case.
  quietly env -u VIRTUAL_ENV UV_PROJECT_ENVIRONMENT="$VENV" UV_PYTHON_DOWNLOADS=never \
    "$VENV/bin/uv" sync --quiet --python "$VENV/bin/python" --frozen --all-packages --all-extras --no-extra fa4 --inexact ||
    fail "uv could not sync uv.lock; see the message above"
}

# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process would compile every module again: half of
# what a short command takes. What is compiled already is left alone; a few files of others are for newer Pythons.
compile() { "$VENV/bin/python" -m compileall -q "$@" >/dev/null 2>&1 || true; }

# Runs a command up to three times, since package indexes fail now and then; shows its output only if it never worked.
quietly() {
  local log attempt
  log=$(mktemp)
  for attempt in 1 2 3; do
    if "$@" >"$log" 2>&1 </dev/null; then
      rm -f "$log"
      return 0
    fi
    [ "$attempt" = 3 ] || sleep "$attempt"
  done
  cat "$log" >&2
  rm -f "$log"
  return 1
}

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ] && [ -x "$VENV/bin/python" ]; then
  compile packages/*/src
  exit 0
fi
# Two calls at a time (make demo beside make test): the second waits, and then finds everything done.
if [ "${LILO_SETUP_LOCKED:-}" != 1 ] && command -v flock >/dev/null; then
  LILO_SETUP_LOCKED=1 exec flock scripts/setup.sh scripts/setup.sh
fi
SECONDS=0
make_venv
put_in_torch
sync
compile -j 0 "$VENV"/lib/python*/site-packages packages/*/src
fingerprint >"$STAMP"
say "done in $SECONDS s"
