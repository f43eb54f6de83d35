# Every target but gpu and gpu-all makes .venv and installs what it needs when missing.
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.installed

.PHONY: train check test gpu gpu-all lab docs export notebooks

train: $(READY)
	@$(VENV)/bin/mamba3lite train --config tiny

check: $(READY)
	@$(PY) tools/stages.py check

test: $(READY)
	@$(PY) tools/stages.py test

# On a machine with a GPU, with the Python that has torch there: no .venv is made.
gpu:
	@python3 tools/gate.py

gpu-all:
	@python3 tools/gate.py --all $(PART)

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
