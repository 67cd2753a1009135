# Everything on a fresh machine: `make demo` and `make test` set up .venv themselves.
# Written for POSIX sh (dash) and GNU make 3.81 (macOS).

EXTRAS ?= test
JOBS ?= $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); \
	[ $$n -lt 4 ] && echo $$n || echo 4)
ARGS ?=

# A PYTHON that somebody names is used or refused; without one the usual names are tried in turn.
ifeq ($(origin PYTHON),undefined)
PYTHONS = python3 python3.14 python3.13 python3.12 python3.11
else
PYTHONS = "$(PYTHON)"
endif

VENV_PYTHON = .venv/bin/python
STAMP = .venv/.installed-$(EXTRAS)
MARKER = .venv/.installing

.PHONY: help demo test test-all bench lint types clean setup setup-locked

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "Variables: PYTHON=python3.12   EXTRAS=test,cuda   JOBS=2 (test processes)   ARGS='...' (demo, tests)"

demo: setup ## run the demonstration (ARGS='--help' lists its options)
	@.venv/bin/dlnsim demo $(ARGS)

# Benchmarks under several processes would time each other.
test: setup ## run the tests without the slow ones
	@$(VENV_PYTHON) -m pytest -n $(JOBS) --dist loadfile --benchmark-disable $(ARGS)

test-all: setup ## run all tests, the slow ones too
	@$(VENV_PYTHON) -m pytest -n $(JOBS) --dist loadfile --benchmark-disable -m '' $(ARGS)

# pytest exits with 5 where there are no benchmarks yet: the recipe is still worth its time.
bench: setup ## run the benchmarks, and the Monte-Carlo recipe that they are compared with
	@$(VENV_PYTHON) -m pytest benchmarks --benchmark-only -o python_files='bench_*.py test_*.py' -m '' $(ARGS) \
		|| [ $$? = 5 ]
	@$(VENV_PYTHON) benchmarks/monte_carlo_recipe.py

lint: setup ## check style and formatting
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check

types: setup ## check types
	@$(VENV_PYTHON) -m basedpyright --pythonpath $(VENV_PYTHON)

clean: ## remove .venv, caches and build products; results stay
	@rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- setting up .venv ---------------------------------------------------------------------------------

# Prints the interpreter to build .venv with. An activated .venv answers with the one below it, since
# .venv itself may have to go. Exit 1: wrong version (requires-python in pyproject.toml); 2: no venv.
define CHOOSE
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("%d.%d" % sys.version_info[:2])
    sys.exit(2)
print(getattr(sys, "_base_executable", sys.executable))
endef
export CHOOSE

# Runs its arguments under a lock that ends with them, however they end. Opened to append (never written),
# because network file systems refuse an exclusive lock on a file opened to read; some know no locks at all.
define LOCKED
import fcntl, os, sys
lock = open("constraints.txt", "a")
os.set_inheritable(lock.fileno(), True)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("Another make is setting up .venv; waiting for it.", flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
except OSError:
    pass
os.execvp(sys.argv[1], sys.argv[1:])
endef
export LOCKED

# What the stamp holds: an install is redone when these files change, not when their dates do.
STATE = cat pyproject.toml constraints.txt

# Scripts in .venv/bin hold its path: a moved or copied checkout needs a new one. The marker is there while
# pip runs, and stays when it is interrupted: pip would take a half-written package for an installed one.
HEALTHY = test ! -e $(MARKER) && grep -qF "$(CURDIR)/.venv" .venv/bin/activate 2>/dev/null && \
	$(VENV_PYTHON) -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
READY = $(HEALTHY) && $(STATE) | cmp -s - $(STAMP)

setup:
	@if $(READY); then exit 0; fi; \
	found=; novenv=; \
	for python in $(PYTHONS); do \
		if answer=$$("$$python" -c "$$CHOOSE" 2>/dev/null); then found=$$answer; break; \
		elif [ $$? = 2 ] && [ -z "$$novenv" ]; then novenv=$$answer; fi; \
	done; \
	if [ -n "$$found" ]; then \
		exec "$$found" -c "$$LOCKED" "$(MAKE)" --no-print-directory setup-locked FOUND="$$found"; \
	elif [ -n "$$novenv" ]; then \
		echo "Python $$novenv lacks its venv module: install it (Debian, Ubuntu: apt install python$$novenv-venv)" \
			"and run make again." >&2; \
	else \
		echo "Need Python 3.11 to 3.14, tried:" $(PYTHONS)". Install one, or name it:" \
			"make PYTHON=python3.12 ..." >&2; \
	fi; exit 1

# The stamp comes last, so that it never vouches for half an install. editable_mode=compat: with setuptools' own
# import hook a script beside the clone would take the clone's folder, also called dlnsim, for the package.
setup-locked:
	@set -e; if $(READY); then exit 0; fi; \
	if ! { $(HEALTHY); }; then \
		echo "Creating .venv with $(FOUND)"; rm -rf .venv; "$(FOUND)" -m venv .venv; \
	fi; \
	touch $(MARKER); rm -f $(STAMP); \
	echo "Installing dlnsim[$(EXTRAS)] into .venv: a minute or two, only when dependencies change"; \
	$(VENV_PYTHON) -m pip install -q --no-input --disable-pip-version-check \
		-c constraints.txt --config-settings editable_mode=compat -e '.[$(EXTRAS)]' \
		|| { echo "The install failed; the lines above say why." >&2; exit 1; }; \
	rm -f $(MARKER); $(STATE) > $(STAMP)
