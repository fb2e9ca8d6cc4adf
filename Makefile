# Two targets do everything on a fresh machine: `make demo` and `make test`. Both go through `make setup`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

BENCHMARKS := discovery apply population alignment geometry inference compact pruning fitting discrepancy diversity scale \
	faults fuzz

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types unit bench docs site format clean

help:  ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /	/' | expand -t 10

setup: $(STAMP)  ## one .venv with the pinned packages; nothing to do when it is up to date

# pip rather than uv: the index of the pinned CPU build of torch is in pip's own settings.
$(STAMP): pyproject.toml constraints.txt oracles.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]' -c constraints.txt
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r oracles.txt
	@touch $@

demo: setup  ## the whole idea on handwritten digits in three minutes, ending with the path of a report
	@$(BIN)/onebasin demo

test: lint types unit  ## lint, types, all tests and doctests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Two workers, one torch thread each (tests/conftest.py): the tests are many small models.
unit: setup
	$(BIN)/pytest -n 2 $(TESTS)

bench: setup  ## the benchmarks, one table each; peers get environments of their own in .peers
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit 1; done

docs: setup  ## rewrite what is generated: docs/cli.md, docs/results.md, lists in docs/architecture.md, output and picture of README.md
	$(BIN)/python -m docs.generate

site: setup  ## the documentation as pages with search, gallery and reference: site/index.html
	$(BIN)/python -m docs.site.pictures
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

format: setup  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything that make made
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .peers .cache site
	rm -rf onebasin-demo reproduce-compact-quick reproduce-symmetry-quick
	find onebasin tests benchmarks docs examples -name __pycache__ -type d -prune -exec rm -rf {} +
