# Two commands on a fresh machine: `make demo` and `make test`. Both set up ./.venv first.
PYTHON ?= python3
# Processes that test at the same time, each of up to 2 GB.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test demo lint soak clean

$(STAMP): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

test: $(STAMP) lint
	TVMCAP_CHECK=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: $(STAMP)
	$(BIN)/python examples/demo.py

soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --seconds 600

clean:
	rm -rf $(VENV) build dist *.egg-info
