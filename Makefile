# make demo, make quick, make test: each sets up what it needs in .venv and does not install again until the requirements change.
PYTHON ?= python3
VENV := .venv
LOWEST := .venv-lowest
QUICK := tests/config tests/tasks tests/results tests/training/test_inputs.py tests/training/test_evaluate.py \
	tests/training/techniques/test_ema.py tests/training/techniques/test_curriculum.py tests/model/test_transformer.py \
	tests/engine/test_masks.py tests/cli/test_train_options.py tests/test_imports.py tests/test_stats.py
PIP_INSTALL := $(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test quick lint types pytest gpu-test lowest clean

demo: $(VENV)/demo.ready
	$(VENV)/bin/entp demo

test: lint
	$(MAKE) -j2 types pytest

quick: lint
	$(VENV)/bin/pytest -n auto -m "not slow" $(QUICK)

lint: $(VENV)/test.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/test.ready
	$(VENV)/bin/mypy

pytest: $(VENV)/test.ready
	$(VENV)/bin/pytest -n auto --dist worksteal

gpu-test:
	$(PYTHON) -m pytest -m gpu -v --tb=short

# The tests with the oldest versions that pyproject.toml allows.
lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(LOWEST) $(LOWEST)/bin/uv pip install --quiet --resolution lowest-direct -e '.[test]'
	$(LOWEST)/bin/pytest -n auto --dist worksteal

clean:
	rm -rf $(VENV) $(LOWEST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "entp needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing entp into $(VENV) (torch is large: this takes a while the first time)"
	$(PIP_INSTALL) -e '.[plot]'
	@touch $@

$(VENV)/test.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing entp and its test tools into $(VENV) (torch is large: this takes a while the first time)"
	$(PIP_INSTALL) -e '.[test]'
	@touch $@
