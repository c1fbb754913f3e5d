# Everything runs in a virtual environment of its own, made on first use.
#   make train    train a small transformer in low precision, and in bf16 beside it
#   make test     run the tests
#   make check    lint, format and type check
#   make wheel    build a wheel into dist
#   make clean    remove the environment and everything built
# Another Python: make test PYTHON=python3.12.
# Arguments: make train ARGS="--recipe mxfp8", make test ARGS="-k mxfp8".

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c $(VENV)/constraints.txt

# An environment is made from one Python and keeps it: asking for another is not quietly ignored.
MADE_FROM := $(shell cat $(VENV)/made-from 2>/dev/null || echo $(PYTHON))
ifeq ($(filter clean help,$(MAKECMDGOALS)),)
  ifneq ($(if $(filter file,$(origin PYTHON)),$(MADE_FROM),$(PYTHON)),$(MADE_FROM))
    $(error $(VENV) was made with PYTHON=$(MADE_FROM): say make clean first)
  endif
endif

.DEFAULT_GOAL := help
.PHONY: help train test test-deep check fmt wheel clean

help:
	@sed -n 's/^#  //p' Makefile

train: $(VENV)/.ready-train
	$(BIN)/python -m minifloat train $(ARGS)

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 2 $(ARGS)

# Every test, `deep` ones included, with more examples for each property.
test-deep: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 2 -m "deep or not deep" --hypothesis-profile=deep --timeout=3600 $(ARGS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.ready-run
	$(BIN)/python -m pip --disable-pip-version-check wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: an environment is made once, and installed into again only when what it is made
# from has changed.
$(VENV)/constraints.txt: tools/make_venv.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "minifloat: no $(PYTHON) here: say make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) tools/make_venv.py $(VENV)
	@echo "$(PYTHON)" > $(VENV)/made-from

$(VENV)/.ready-run: $(VENV)/constraints.txt pyproject.toml
	$(PIP) -e . numpy  # PyTorch warns at every start where it finds no numpy
	@touch $@

$(VENV)/.ready-train: $(VENV)/.ready-run
	@$(PIP) -e ".[train]" && touch $@ || echo "minifloat: goes on without plot and progress bar"

$(VENV)/.ready-%: $(VENV)/constraints.txt pyproject.toml
	$(PIP) -e ".[$*]"
	@touch $@
