# Everything runs in .venv, which `make install` creates. ARGS passes flags on:
#   make serve ARGS="--port 9000"        make test ARGS="tests/scheduler -x"
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install serve test coverage lint check format constraints clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard moestro/kernels/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Moestro needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	  "Name another one: make install PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments." \
	  "On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

serve: install
	$(BIN)/moestro serve $(ARGS)

test: install
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: install
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --cov=moestro --cov-report=term $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict moestro
	$(BIN)/lint-imports

check: lint test

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# After a dependency changed: rm -r .venv; make install with the old pins removed; make constraints.
# Triton is left out: each CUDA build of torch asks for exactly one version of it.
constraints: install
	$(BIN)/python -m pip freeze --exclude-editable --exclude triton \
	  | sed 's/+cpu$$//' | grep -v '^nvidia-' > constraints.tmp
	mv constraints.tmp constraints.txt

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
