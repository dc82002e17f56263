SHELL := bash
VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help install check lint package test bare versions matrix model bench chaos soak lock wheel

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "make %-10s%s\n", $$1, $$2 }'

install: ## .venv as requirements.lock says; the others see to it themselves
	@./run install

check: ## everything CI runs
	./run check

lint: ## format, lint, types and layers, without the tests
	./run lint

package: ## the package as the README installs it, and its app imported there
	./run package

test: ## the tests
	./run test

bare: ## the README and the guides typed into a bare Debian, as root: SUITE=trixie
	./run bare $${SUITE:-bookworm}

matrix: ## the acceptance tests on every broker and pool, for hours: BROKERS=sidejob,quorum POOLS=threads
	./run test tests/acceptance -n 2 --brokers $${BROKERS:-redis,sidejob,amqp} --pools $${POOLS:-prefork,solo,threads,gevent}

model: install ## every interleaving of the protocol's model
	$(VENV_PYTHON) tests/protocol_model/run.py

versions: ## the tests with the oldest supported versions of what we use: WHICH=newest
	./run versions $${WHICH:-oldest}

bench: ## a benchmark, or the list of them: NAME=transport
	./run bench $${NAME:-}

chaos: ## every crash point and every accident, again and again: CHAOS=10 times
	for round in $$(seq $${CHAOS:-10}); do ./run test tests/acceptance -q || exit 1; done

soak: ## mixed load with outages in every state, judged: MINUTES=120 BROKER=redis
	./run bench soak --minutes $${MINUTES:-120} --broker $${BROKER:-redis}

# hatchling and editables are there so that an editable install needs nothing that is not pinned.
lock: install ## requirements.lock anew, with the newest versions pyproject.toml allows
	@$(VENV_PYTHON) -m uv --version >/dev/null 2>&1 || $(VENV_PYTHON) -m pip install --quiet uv
	printf 'hatchling>=1.26\neditables\n' | $(VENV_PYTHON) -m uv pip compile pyproject.toml - \
		--universal --python-version 3.11 --no-python-downloads --upgrade --quiet \
		--extra embedded --extra binary --extra prometheus --group test --group check \
		--generate-hashes --no-emit-index-url --no-annotate --custom-compile-command 'make lock' \
		--output-file requirements.lock

# In a place where the tree cannot stand in for what the wheel lacks.
wheel: install ## the wheel, installed into an environment of its own and imported there
	set -euo pipefail; \
	rm -rf dist; \
	$(VENV_PYTHON) -m hatchling build --target wheel; \
	scratch=$$(mktemp -d); trap 'rm -rf -- "$$scratch"' EXIT; \
	sed '/--hash=/d; s/ *\\$$//' requirements.lock > "$$scratch/constraints.txt"; \
	$(VENV_PYTHON) -m venv "$$scratch/venv"; \
	"$$scratch/venv/bin/python" -m pip install --quiet --constraint "$$scratch/constraints.txt" dist/*.whl; \
	program='import celery_sidejob, importlib.resources as resources'; \
	program+='; migrations = resources.files(celery_sidejob) / "alembic"'; \
	program+='; assert (migrations / "env.py").is_file(), "the wheel lacks alembic/env.py"'; \
	program+='; names = [file.name for file in (migrations / "versions").iterdir() if file.name.endswith(".py")]'; \
	program+='; assert names, "the wheel lacks alembic/versions"'; \
	program+='; print(celery_sidejob.__file__.rpartition("site-packages/")[2], *sorted(names))'; \
	cd "$$scratch" && venv/bin/python -c "$$program"
