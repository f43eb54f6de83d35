# Every target makes .venv and installs what it needs when that is missing.
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.installed

.PHONY: train check test lab docs export notebooks

train: $(READY)
	@$(VENV)/bin/mamba3lite train --config tiny

check: $(READY)
	@$(PY) tools/stages.py check

test: $(READY)
	@$(PY) tools/stages.py test

lab: $(READY)
	$(VENV)/bin/jupyter lab --config tools/lab/jupyter_server_config.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

export: $(READY)
	$(PY) tools/export.py

notebooks: $(READY)
	$(PY) tools/notebooks.py --force

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
