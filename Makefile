# Each target first installs what it needs into .venv. A fresh clone needs only Python 3.11 or newer with its venv module.
# `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python -m

# Options: make demo RANKS=8, make test ARGS="-k ring -x", make soak MINUTES=120 SOAK_SEED=7, make test PYTHON=python3.13
RANKS ?= 4
ARGS ?=
MINUTES ?= 30
PYTHON ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs verify soak sanitize dist clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/\1\t\2/p' Makefile | awk -F '\t' '{ printf "make %-8s %s\n", $$1, $$2 }'

demo: $(VENV)/.installed ## train one model on four processes, kill one half-way, and check that the rest end with equal weights
	@$(BIN)/gradwire run -n $(RANKS) --min 1 --restarts 1 examples/digits.py --lose 1

test: lint ## run ruff, mypy, all tests except the slow ones, and the examples in docstrings
	$(RUN) pytest -n 2 --dist loadfile -m "not slow and not soak" $(ARGS)

lint: $(VENV)/.installed-test ## run ruff and mypy only
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(VENV)/.installed-test ## format the code and fix lint errors with ruff
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

docs: $(VENV)/.installed-docs ## build the site with all pages and the API reference in build/docs; warnings are errors
	$(RUN) sphinx -q -W --keep-going -n -c docs -d build/doctrees . build/docs
	@echo "file://$(CURDIR)/build/docs/index.html"

verify: test docs $(VENV)/.installed-verify ## run test and docs, then the slow tests, some fuzzing, the examples and a short benchmark
	$(RUN) pytest -m "slow or soak" --timeout=600 -o faulthandler_timeout=660 $(ARGS)
	PYTHONPATH=tests $(RUN) fuzz.atheris --seconds 10
	@set -e; for script in examples/*.py; do \
	    echo "$$script"; timeout 60 $(BIN)/gradwire run -n 3 "$$script"; \
	done; \
	for script in examples/gpt_torchrun.py examples/fsdp2.py; do \
	    echo "$$script, by torchrun"; timeout 60 $(BIN)/torchrun --standalone --nproc-per-node 2 "$$script"; \
	done
	$(BIN)/gradwire bench --sizes 8,64Ki,1Mi --blocks 3 --transport tcp --against gloo
	$(BIN)/python benchmarks/training.py --models gpt --crews 1 --blocks 2 --peaks 0 || [ $$? -eq 2 ]  # 2: slow; too short to judge

soak: $(VENV)/.installed-verify sanitize ## run sanitize, then fuzzing, then repeat the stress tests for MINUTES (30)
	PYTHONPATH=tests $(RUN) fuzz.atheris --seconds 60
	@set -e; export HYPOTHESIS_PROFILE=soak SOAK_SECONDS=$${SOAK_SECONDS:-600}; \
	end=$$(( $$(date +%s) + $(MINUTES) * 60 )); round=0; \
	while [ $$(date +%s) -lt $$end ]; do \
	    round=$$((round + 1)); echo "soak: round $$round"; \
	    $(RUN) pytest -q -x -m soak --timeout=1800 -o faulthandler_timeout=1860 $(ARGS); \
	done; \
	echo "soak: $$round rounds passed in $(MINUTES) minutes"

sanitize: $(VENV)/.installed-build ## run the core's own tests with the address, undefined-behaviour and thread sanitizers
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; native/tests/run.sh address,undefined && native/tests/run.sh thread

dist: $(VENV)/.installed-dist ## build sdist and wheel, check them, and run the demo from a fresh installation of the wheel
	rm -rf dist build/dist-check
	$(RUN) build --outdir dist
	$(RUN) twine check --strict dist/*
	$(BIN)/python -m venv build/dist-check
	build/dist-check/bin/pip --disable-pip-version-check --quiet install dist/*.whl
	build/dist-check/bin/gradwire --version
	build/dist-check/bin/gradwire run -n $(RANKS) --min 1 --restarts 1 examples/digits.py --lose 1

clean: ## remove .venv and all build outputs and caches
	rm -rf $(VENV) build dist src/gradwire/_native.*.so src/gradwire/_build.json .pytest_cache .mypy_cache .ruff_cache .hypothesis .gradwire
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- installation: one virtual environment, with a stamp file for each set of packages in it. A set is installed again when
# its stamp is older than the files that it depends on.

$(VENV)/.installed-build: requirements/build.txt build_backend/gradwire_build.py | $(BIN)/pip
	$(call install,the build tools of the core,--requirement $<)
	@$(BIN)/python build_backend/gradwire_build.py > $(VENV)/missing.txt
	$(call install,CMake and ninja if they are missing,--requirement $< --requirement $(VENV)/missing.txt)

# Without build isolation, only changed files are compiled. GRADWIRE_PURE affects the tests, not the installation.
$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard native/*.*) $(VENV)/.installed-build
	$(call install,gradwire,--no-build-isolation --editable .)
	@env -u GRADWIRE_PURE $(BIN)/gradwire --version

$(VENV)/.installed-test: requirements/test.txt $(VENV)/.installed
	$(call install,the test tools,--requirement $<)

$(VENV)/.installed-docs: requirements/docs.txt $(VENV)/.installed
	$(call install,the documentation tools,--requirement $<)

$(VENV)/.installed-verify: requirements/verify.txt $(VENV)/.installed-test
	$(call install,the packages for make verify,--requirement $<)

$(VENV)/.installed-dist: requirements/dist.txt $(VENV)/.installed
	$(call install,the tools that build and check releases,--requirement $<)

# pip's output is shown only if it fails.
define install
@echo "installing $(1) into $(VENV) …"
@output=$$(env -u GRADWIRE_PURE $(RUN) pip --disable-pip-version-check --no-input install $(2) 2>&1) || { \
    echo "$$output"; \
    $(BIN)/python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
        echo "Python's headers are missing too. Compiling a package needs them: apt install python3-dev"; \
    exit 1; \
}
@touch $@
endef

# venv creates pip last: an environment without pip is incomplete.
$(BIN)/pip:
	@found=; for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "gradwire needs Python 3.11 or newer, but $(or $(PYTHON),python3) is older or missing:" \
	        "apt install python3 python3-venv, or name another one: make PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$found has no venv module, which creates the environment to install into: apt install python3-venv" >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$("$$found" --version) …"; "$$found" -m venv $(VENV)
