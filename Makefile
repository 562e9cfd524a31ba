# Set-up happens on first use and again only when the requirements change.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
MODEL ?= tiny-vl
ARGS ?=
BENCHMARKS ?= tests/*/test_*benchmarks.py
BASELINE ?= results/benchmarks/baseline.json

.PHONY: setup serve test test-aarch64 lint reproduce reproduce-full bench

setup: $(READY)

$(READY): requirements.txt requirements-compiler.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setting up $(VENV): 1.3 GB, a few minutes" >&2
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	@{ test -n "$$CXX" || command -v c++ || command -v g++ || command -v clang++; } >/dev/null || \
	  $(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-compiler.txt
	@$(RUN) -m models.kernels || echo "the models will run in plain JAX, slowly" >&2
	@touch $@

serve: $(READY)
	@exec $(RUN) -m serving --model $(MODEL) $(ARGS)

test: $(READY)
	$(RUN) -m pytest $(ARGS)

# For correctness on the other architecture, in emulation where this machine is not one.
test-aarch64: $(READY)
	tests/aarch64 $(if $(ARGS),-- $(ARGS))

# The documented figures beside those of this machine.
reproduce: $(READY)
	$(RUN) -m experiments.report --quick $(ARGS)

reproduce-full: $(READY)
	$(RUN) -m experiments.report $(ARGS)

# Times of small parts, compared with those of a run that was kept.
bench: $(READY)
	$(RUN) -m pytest -o addopts='-q -p no:schemathesis' -W ignore::pytest_benchmark.logger.PytestBenchmarkWarning \
	  --benchmark-only --benchmark-compare=$(BASELINE) --benchmark-storage=.benchmarks --benchmark-group-by=fullfunc \
	  --benchmark-columns=median,iqr,rounds $(ARGS) $(BENCHMARKS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
