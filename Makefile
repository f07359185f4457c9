# make train      install into .venv, then train the demo (preset tiny, built-in corpus) into runs/demo
# make test       install into .venv, then run the tests that take no minutes and need no GPU
# make test-unit  only those that start no process      make test-processes  only those that do
# make test-benchmarks  tests of the programs in benchmarks/
# make test-long  the tests marked `long`       make test-gpu  the tests marked `gpu`
# make test-newest  the unit tests with the newest releases of all dependencies, in an environment of their own
# make test-kernels  kernels of GPUs on a CPU, in Triton's interpreter
# make test-kill  kills runs 30 times per engine and prints how each continued
# make hf-suite   transformers' own common test suite on HOPE (HF_SUITE=folder with its tests/, see CONTRIBUTING.md)
# make peft-suite  PEFT's own tests of decoder models on HOPE (PEFT_SUITE=folder with its tests/, see CONTRIBUTING.md)
# make docs       the pages of docs/ as a site, into build/site
# make lint       ruff                          make clean     remove .venv (never runs/)
#
# PYTHON=python3.12                the interpreter that .venv is made with
# PIP_ARGS="--extra-index-url …"   passed to pip, for example an index of CPU wheels
# TRAIN_ARGS="--max_train_steps 9" passed to hope-hf train
# PYTEST_ARGS="tests/data -x"      passed to pytest
# CONSTRAINTS=constraints-lowest.txt  the versions to install: here the lowest that pyproject.toml allows
PYTHON ?= python3
PIP_ARGS ?=
TRAIN_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadgroup
CONSTRAINTS ?= constraints.txt

# A test that hangs for 15 minutes ends the run with its name and stacks. Not for long tests: 30 kills take longer.
NO_HANGS := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true --max-worker-restart 0
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --constraint $(CONSTRAINTS) $(PIP_ARGS) --editable

.PHONY: train test test-unit test-processes test-benchmarks test-newest test-long test-gpu test-kernels test-kill hf-suite peft-suite docs lint clean
.DELETE_ON_ERROR:

# One process uses one GPU.
train: export CUDA_VISIBLE_DEVICES ?= 0
train: $(VENV)/.installed-plot
	$(BIN)/hope-hf train --output_dir runs/demo $(TRAIN_ARGS)

# torchao is for a test alone, in a folder of its own: where transformers finds it, every program loads it, and prints
# that its kernels fit another torch.
test test-unit test-processes test-long test-gpu: export PYTHONPATH := $(CURDIR)/$(VENV)/torchao
test test-unit test-processes test-long test-gpu: $(VENV)/torchao

# One thread per worker: two workers with a thread pool each would compete for the same cores.
test test-unit test-processes test-benchmarks test-long test-gpu test-kernels test-kill: export OMP_NUM_THREADS := 1

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(NO_HANGS) $(PYTEST_ARGS)

test-unit: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(NO_HANGS) -m "not processes and not benchmarks and not long and not gpu and not kernels" $(PYTEST_ARGS)

test-processes: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(NO_HANGS) -m "processes and not benchmarks and not long and not gpu and not kernels" $(PYTEST_ARGS)

test-benchmarks: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(NO_HANGS) -m "benchmarks and not long and not gpu and not kernels" $(PYTEST_ARGS)

test-newest:
	$(MAKE) test-unit VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

test-long: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m gpu

test-kernels: export TRITON_INTERPRET := 1
test-kernels: export PYTHONPATH := $(VENV)/kernels
test-kernels: $(VENV)/.installed-test $(VENV)/kernels
	$(BIN)/python -m pytest $(NO_HANGS) -m "kernels and not gpu" $(PYTEST_ARGS) tests/model/test_*_kernels.py

test-kill: export HOPE_KILLS := 30
test-kill: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/training/checkpoints/test_kill.py -m long --capture=no

hf-suite: $(VENV)/.installed-test
	$(BIN)/python tests/hf_suite/run.py

peft-suite: $(VENV)/.installed-test
	$(BIN)/python tests/peft_suite/run.py

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV)

# The stamp is written after pip has succeeded. A second `make` installs nothing unless pyproject.toml or the constraints
# have changed; an interrupted one starts again.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	$(INSTALL) '.[$*]'
	@touch $@

# In a folder of its own: where transformers finds flash-linear-attention, it runs its kernels, on a CPU too.
$(VENV)/kernels: $(CONSTRAINTS) | $(BIN)/pip
	rm -rf $@
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) $(PIP_ARGS) --no-deps --target $@ triton fla-core
	@touch $@

$(VENV)/torchao: $(CONSTRAINTS) | $(BIN)/pip
	rm -rf $@
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) $(PIP_ARGS) --no-deps --target $@ torchao
	@touch $@

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "hope_hf needs Python 3.11 or newer, and there is no '$(PYTHON)': install one or run make PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hope_hf needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1): run make PYTHON=/path/to/one" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed: install the venv module of this Python (on Debian and Ubuntu the package python3-venv)" >&2; exit 1; }
