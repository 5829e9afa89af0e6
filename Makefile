# Everything is installed into $(VENV) and nowhere else; a fresh machine needs Python 3.10 or newer, and make.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
DATA ?=
DEVICE ?= cpu
ARGS ?=
PY := $(VENV)/bin/python
# Each test worker computes on one core; more threads than cores only get in each other's way.
# A worker without tests takes some of another: no core is left idle at the end.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help train test test-gpu lint slow fuzz bench bench-gpu docs examples format clean
.DEFAULT_GOAL := help

help:
	@echo "make train            train a small network on handwritten digits (under a minute)"
	@echo "make train DATA=path  the same on a folder of MNIST-format files"
	@echo "make train DEVICE=gpu the same on a GPU"
	@echo "make test             lint, type check and test everything"
	@echo "make test-gpu         test the CUDA engine on this machine's GPU: six minutes at most, and a summary"
	@echo "make slow             the tests that take minutes"
	@echo "make fuzz             feed damaged files to the readers, for hours (counts and findings: fuzzing-results/)"
	@echo "make bench            training steps beside PyTorch, JAX, tinygrad and MLX (ARGS=--quick: two minutes)"
	@echo "make bench-gpu        the same on a GPU, beside PyTorch and JAX: 8 minutes (ARGS=--quick: 3)"
	@echo "make docs             build the documentation into docs/_build/html"
	@echo "make examples         run every example"
	@echo "make lint, format     ruff and mypy; ruff's formatter"
	@echo "make clean            remove $(VENV) and everything that was built"

train: $(VENV)/.has-examples $(if $(filter-out cpu,$(DEVICE)),$(VENV)/.has-cuda)
	$(PY) examples/train_digits.py --device $(DEVICE) $(if $(DATA),--data "$(DATA)") $(ARGS)

# mypy is one of the tests: it takes one core for a minute, beside the others.
test: $(VENV)/.has-test
	$(PY) -m ruff check .
	$(PYTEST) -m "not slow" $(ARGS)

test-gpu: $(VENV)/.has-test $(VENV)/.has-cuda
	$(PY) -m tests.on_gpu $(ARGS)

slow: $(VENV)/.has-test
	$(PYTEST) -m slow $(ARGS)

fuzz: $(VENV)/.has-fuzz
	$(PY) -m tests.fuzzing $(or $(FOLDER),fuzzing-results) $(ARGS)

bench: $(VENV)/.has-bench
	$(PY) -m benchmarks $(ARGS)

bench-gpu: $(VENV)/.has-bench-gpu
	$(PY) -m benchmarks.gpu $(ARGS)

docs: $(VENV)/.has-docs
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

lint: $(VENV)/.has-test
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(VENV)/.has-test
	$(PY) -m ruff format .

# One of them needs more than `make train`: all that the tests need is enough. blocks.py and images.py are shared.
examples: $(VENV)/.has-test
	@set -e; for example in $(filter-out %/blocks.py %/images.py,$(wildcard examples/*.py examples/programs/*.py)); do \
		echo "== $$example"; $(PY) $$example; done

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mlcompute needs Python 3.10 or newer, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# One stamp per extra of pyproject.toml, newer than it once the extra is installed.
$(VENV)/.has-%: pyproject.toml | $(PY)
	@echo "installing into $(VENV), once: mlcompute and what its extra '$*' needs"
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
