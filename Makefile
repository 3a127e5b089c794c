# Three commands matter: `make demo`, `make test`, and `make quick` while editing. Each builds `.venv` first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: venv bytecode demo compare compare-page quick test test-all extras coverage fuzz soak kills lint consistency two-hosts bench docs clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Building $(VENV) (a minute or two the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[images,transformers,search,dev]"
	@touch $@

demo: venv
	$(BIN)/shoal demo

# The peers, then both tasks by strategies and frameworks under one protocol. FOLDER keeps runs and report; it resumes.
# COMPARE="--minutes 4" does a part of it; `make compare-page` writes docs/comparison.md of what FOLDER has.
FOLDER ?= runs/compare
COMPARE ?=
compare: venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[compare]"
	$(BIN)/shoal compare language:tiny image:tiny --ranks 1,2 --seeds 3 --folder $(FOLDER) $(COMPARE) --with \
		"dp(2)" "dp(2, zero=1)" "dp(2, zero=3)" "tp(2)" "pp(2, '1f1b', micro=4)" "dp(2, sync=local(8))" \
		"dp(2, sync=diloco(8))" "dp(2, compress=powersgd(4))" "dp(2, sync=gossip('ring'))" \
		torch-ddp torch-ddp-powersgd torch-zero1 torch-fsdp2 torch-pipelining torch-tensor-parallel torch-postlocal-sgd \
		accelerate lightning hf-trainer deepspeed-zero1 deepspeed-zero3 horovod megatron-core torchtitan torchft hivemind

compare-page: venv
	$(BIN)/python benchmarks/comparison_page.py $(FOLDER)

lint: venv
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests start hundreds of processes; where Python is told to write no bytecode, each would compile what it imports.
bytecode: venv
	@$(BIN)/python -m compileall -q src tests

# Without ranks or other processes, in less than a minute.
quick: bytecode
	$(BIN)/python -m pytest -m "not slow and not processes and not long" \
		--ignore=tests/accelerator --ignore=tests/checkpoint --ignore=tests/distributed --ignore=tests/fuzz

test: lint bytecode
	$(BIN)/python -m pytest -m "not slow" --durations=15

# What is tested only where it is installed: loggers, notebooks, manifests, PostgreSQL, datasets. 0.3 GB; without a network their tests are skipped.
extras: venv
	@$(BIN)/python -c "import mlflow, nbconvert, ipykernel, wandb, kubernetes_validate, kubeflow_trainer_api, psycopg, datasets" 2>/dev/null || \
		$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable ".[wandb,mlflow,notebooks,manifests,postgresql,datasets]" || \
		echo "The tests of loggers, notebooks, manifests, PostgreSQL and Hugging Face datasets will be skipped."

test-all: extras lint bytecode
	$(BIN)/python -m pytest

# Which lines of Shoal the tests run, ranks and commands included. TESTS="-m 'not slow and not processes' tests/strategy" measures less.
TESTS ?= -m "not slow"
coverage: venv
	@rm -rf build/coverage && mkdir -p build/coverage
	-$(BIN)/python -m coverage run -m pytest $(TESTS)
	@$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report | tail -25

# Random jobs under random strategies against a plain PyTorch loop; a night's run. CASES and FIRST choose which.
CASES ?= 2000
FIRST ?= 0
fuzz: venv
	PYTHONPATH=tests $(BIN)/python -m fuzz --cases $(CASES) --first $(FIRST)

# Runs killed at random and resumed, against undisturbed ones.
MINUTES ?= 5
SEED ?= 1
soak: venv
	$(BIN)/python tests/soak.py --minutes $(MINUTES) --seed $(SEED)

# Steps to the target under every sync scheme (docs/consistency.md); stop it and go on at will.
SEEDS ?= 3
consistency: venv
	$(BIN)/python benchmarks/consistency.py --into runs/consistency --seeds $(SEEDS) --page docs/consistency.md

# Time to the target between two hosts at 100 Mb/s: DDP over Gloo, islands and compression. As root, on a quiet machine.
RATE ?= 100mbit
two-hosts: venv
	$(BIN)/python benchmarks/slow_link.py --rate $(RATE) --batch 24 --whole --only "DDP,dp(2),dp(2, sync=local(32)),\
	dp(2, sync=diloco(32)),dp(2, sync=diloco(32, momentum=0.0, lr=1.0), compress=chunktopk(0.03)),\
	dp(2, compress=powersgd(4)),dp(2, compress=topk(0.01))"

# Runs that lose a rank at random under schemes that go on without it.
KILLS ?= 50
kills: venv
	$(BIN)/python tests/kills.py --kills $(KILLS) --seed $(SEED)

# The documentation as a site, in build/site: links and anchors are checked, and nothing is fetched to read it.
docs: venv
	@$(BIN)/python -c "import mkdocstrings" 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: venv
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache runs
