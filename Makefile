# The entry points. Every target sets up .venv first, which takes a fraction of a second when that is done already.
# Choices for the set-up (PYTHON, TORCH_SPEC, TORCH_INDEX_URL): see scripts/setup.sh.

BIN := .venv/bin
# One thread per process: the tests run several processes, and two cores are the smallest machine that must do.
ONE_THREAD := OMP_NUM_THREADS=1
# make test ARGS="tests/volume -k publish"; make demo ARGS="--seed 1"; make prove-demo ARGS=...
ARGS ?=

export PYTHON TORCH_SPEC TORCH_INDEX_URL

.PHONY: help setup demo test lint typecheck format build docs bench prove clean

help:  ## List the targets
	@grep -hE '^[a-z][a-z%-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup:  ## Fill .venv: torch, the four packages, all extras, the development tools
	@scripts/setup.sh

demo: setup  ## Watch a small model learn sums through the Tinker SDK
	@$(BIN)/lilo demo $(ARGS)

test: setup  ## Run the tests (CPU, one process per core)
	@$(ONE_THREAD) $(BIN)/python -m pytest -q -n logical --maxprocesses 8 --dist loadfile --max-worker-restart 0 $(ARGS)

lint: setup  ## Check style, import directions, spelling, words and the lock
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports >/dev/null || $(BIN)/lint-imports
	@$(BIN)/codespell
	@$(BIN)/python scripts/check_words.py
	@$(BIN)/shellcheck .ci/run scripts/*.sh examples/slurm/*.sbatch
	@$(BIN)/hadolint examples/docker/Dockerfile
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec examples/docker/compose.yaml
	@env -u VIRTUAL_ENV UV_PROJECT_ENVIRONMENT=.venv $(BIN)/uv lock --quiet --check --python $(BIN)/python
	@echo "lint: good"

typecheck: setup  ## Check types (pyright)
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: setup  ## Put imports and layout in order
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

build: setup  ## Build the four wheels and source archives into dist/
	@rm -rf dist
	@env -u VIRTUAL_ENV $(BIN)/uv build --quiet --all-packages --no-sources --out-dir dist --python $(BIN)/python
	@ls dist/*.whl dist/*.tar.gz

docs: setup  ## Build the documentation site into site/; a broken link or reference is an error
	@$(BIN)/python scripts/definitions_table.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

bench: setup  ## Drive a server of this checkout and print its figures
	@$(ONE_THREAD) $(BIN)/python benchmarks/run.py $(ARGS)

prove: setup  ## List the proofs; `make prove-NAME` runs one
	@$(BIN)/python scripts/prove.py

prove-%: setup
	@$(ONE_THREAD) $(BIN)/python scripts/prove.py $* $(ARGS)

clean:  ## Remove .venv and everything that is built
	@rm -rf .venv dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
