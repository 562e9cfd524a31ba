# Set-up happens on first use and again only when requirements.txt changes.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
MODEL ?= tiny-vl
ARGS ?=

.PHONY: setup serve test lint

setup: $(READY)

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

serve: $(READY)
	@exec $(RUN) -m serving --model $(MODEL) $(ARGS)

test: $(READY)
	$(RUN) -m pytest $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
