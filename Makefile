# make demo   the main job, on real processes of this machine
# make test   lint, types and the default tests: fixed seeds, a few minutes
# Both set themselves up on a bare machine (Python 3.11+ with pip); see tools/venv.

PY := .venv/bin/python
TEST_WORKERS ?= $(shell nproc)
PYTEST := $(PY) -m pytest
# What torch itself requires, without the CUDA packages that the build for CPUs does without, and what fray.rl and its tests
# import beside it (torch itself must not be resolved here).
RL_NEEDS := filelock\nfsspec\njinja2\nnetworkx\nsetuptools\nsympy\ntyping-extensions\nhttpx\nhypercorn\nnumpy\nomegaconf\n
RL_NEEDS := $(RL_NEEDS)openai\nprotobuf\npsutil\nrich\nsafetensors\nstarlette\ntensorboard\ntokenizers\ntransformers\n
PARALLEL := -n $(TEST_WORKERS) --dist loadgroup
# Tests of processes wait for these more than they compute.
MORE_WORKERS ?= $(shell echo $$(( $(TEST_WORKERS) + 1 )))
MORE_PARALLEL := -n $(MORE_WORKERS) --dist loadgroup

.PHONY: help demo test test-all test-more venv-rl test-rl test-tinker test-marin network lint docs man campaign mutants bench peers clean constraints venv

help:
	@echo "make demo [ARGS='--compare --kill-worker --json report.json'] the main job: copies in the standard library"
	@echo "make test [ARGS='-k name']                                    lint, types and the default tests: fixed seeds, without Ray"
	@echo "make test-all [ARGS='--hypothesis-seed=7']                      every test: processes, Ray, random seeds (printed)"
	@echo "make test-more                                                what test-all adds to test, without what test has run"
	@echo "make test-rl [ARGS='-k losses']                               tests of fray.rl that need torch, in .venv-rl (part of test-all)"
	@echo "make test-tinker [ARGS='-k digits']                           tests of fray.tinker, with its gate and ten kills, in .venv-rl (part of test-all)"
	@echo "make test-marin                                             fray.v2 on a real Iris, Zephyr on Fray, in .venv-marin (part of test-all)"
	@echo "make network [ARGS='-k relay']                                hosts as namespaces, cut, reset, rebooted (needs root; see tests/network)"
	@echo "make docs                                                     the pages and a reference of everything public, in build/docs"
	@echo "make man                                                      manual pages of all commands, in build/man"
	@echo "make campaign                                                 1,000 seeds, 1,000 deaths, 300 kills, 10 minutes of load, 100 network faults, fuzzers, all tests with each Python"
	@echo "make mutants [ARGS='--only busy']                               deliberate bugs, and the seeds of the simulation that find them"
	@echo "make campaign HOURS=8 [SEEDS=0-9999]                          only the simulator: fresh seeds of this commit for so many hours"
	@echo "make lint                                                     lint and types alone"
	@echo "make bench                                                    calls, sync APIs, streams, arrays, tasks, actors, light actors, start-up"
	@echo "make peers                                                    .venv-peers: Ray, xoscar and Dask, to compare with (500 MB)"
	@echo "make constraints                                              pin the dependencies again (needs uv)"
	@echo "make clean                                                    remove .venv, .venv-* and what tools left behind"

venv:
	@tools/venv

demo: venv
	@$(PY) examples/corpus.py $(ARGS)

# Tests that measure times run alone, after the others. Exit status 5 of pytest means that ARGS selected none of them.
test: lint
	@$(PYTEST) $(PARALLEL) -m "not timed" $(ARGS) || [ $$? -eq 5 ]
	@$(PYTEST) -m timed $(ARGS) || [ $$? -eq 5 ]

test-all: test test-more

test-more: lint
	@tools/venv test
	@tools/venv docs
	@$(PYTEST) --more $(MORE_PARALLEL) -m "not timed" $(ARGS) || [ $$? -eq 5 ]
	@$(PYTEST) --more -m timed $(ARGS) || [ $$? -eq 5 ]
	@[ -n "$(ARGS)" ] || $(PY) -m tests.simulation --fresh 200 --limit-s 240 --jobs $(TEST_WORKERS) --progress-s 30
	@[ -n "$(ARGS)" ] || FRAY_PYTHONS=3.14 tools/pythons
	@[ -n "$(ARGS)" ] || $(MAKE) test-rl
	@[ -n "$(ARGS)" ] || $(MAKE) test-tinker ARGS='-m torch'
	@[ -n "$(ARGS)" ] || $(MAKE) test-marin ARGS='-k "constraint or marin or slices or environment or pickles or current or spec or shuffle"'

# Torch is in an environment of its own, so that nothing else waits for it.
venv-rl:
	@tools/venv rl

# Its types are checked there. The pages come first: each is one long test.
test-rl: venv-rl
	@.venv-rl/bin/python -m mypy fray/rl
	@.venv-rl/bin/python -m pytest $(MORE_PARALLEL) -m torch tests/test_docs.py tests/rl $(ARGS) || [ $$? -eq 5 ]

# Each release of the SDK has an environment, too: pip makes one on each processor.
test-tinker:
	@{ tools/venv tinker-0.25 && tools/venv tinker-0.38 || echo "tests of the Tinker SDK are skipped"; \
	tools/venv schemathesis || echo "the test with schemathesis is skipped"; } & others=$$!; \
	$(MAKE) venv-rl; status=$$?; wait $$others; exit $$status
	@.venv-rl/bin/python -m pytest $(MORE_PARALLEL) tests/tinker $(ARGS)

# A real Iris, started by the tests, in an environment of its own; `make test-all` runs a selection, as the contract of all
# clients takes four minutes.
test-marin:
	@FRAY_PYTHONS=3.12 FRAY_VENV=.venv-marin FRAY_EXTRAS=marin tools/pythons -n 2 --dist loadgroup tests/v2/test_v2_iris.py tests/v2/test_v2_zephyr.py $(ARGS)

# Scenarios wait more than they compute, but their times are measured: two at a time.
network: venv
	@$(PYTEST) --network -n 2 tests/network $(ARGS)

lint: venv
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# Of what `--help` prints.
man: venv
	@$(PY) -m fray.cli man build/man/man1

docs: venv
	@tools/venv docs
	@$(PY) tools/build_docs.py
	@echo "build/docs/index.html"

bench: venv
	@$(PY) -m bench.calls $(ARGS)
	@$(PY) -m bench.facade $(ARGS)
	@$(PY) -m bench.streams $(ARGS)
	@$(PY) -m bench.data $(ARGS)
	@$(PY) -m bench.tasks $(ARGS)
	@$(PY) -m bench.actors $(ARGS)
	@$(PY) -m bench.light $(ARGS)
	@$(PY) -m bench.start $(ARGS)

peers: venv
	@$(PY) -m bench.peers

constraints:
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-header --quiet -o constraints.txt
	uv pip compile pyproject.toml --extra ray --extra examples --extra notebook --extra types -c constraints.txt --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o constraints-test.txt
	uv pip compile pyproject.toml --extra docs -c constraints.txt -c constraints-test.txt --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o constraints-docs.txt
	uv pip compile tools/marin-wheels.txt pyproject.toml --extra dev --python-version 3.12 \
		--python-platform x86_64-manylinux_2_28 --prerelease if-necessary-or-explicit --no-emit-package marin-fray \
		--generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o constraints-marin.txt
	printf 'tinker==0.38.0\n' | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-header --no-annotate --quiet -o constraints-tinker.txt
	printf 'tinker==0.25.0\n' | uv pip compile - --no-deps --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --quiet -o constraints-tinker-0.25.txt
	printf 'schemathesis\n' | uv pip compile - -c constraints.txt -c constraints-test.txt -c constraints-tinker.txt --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o constraints-schemathesis.txt
	printf '$(RL_NEEDS)' | uv pip compile - -c constraints.txt -c constraints-test.txt -c constraints-docs.txt --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o constraints-rl.txt
	printf 'ray\nxoscar\nuvloop\ndistributed\nnumpy\n' | uv pip compile pyproject.toml - -c constraints.txt --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o bench/peers.txt

# With HOURS only the simulation: fresh seeds of this commit, or those of SEEDS=A-B, as many as it gets done.
ifdef HOURS
campaign: venv
	@mkdir -p build
	@$(PY) -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS),--fresh 1000000) --jobs $(TEST_WORKERS) \
		--limit-s $$(awk 'BEGIN { print $(HOURS) * 3600 }') --coverage build/coverage.json || [ $$? -eq 3 ]
else
# Exit status 3 of the simulation: no violation, but rows of its tables that never occurred, which it names.
campaign: venv
	@FRAY_EXTRAS=test tools/pythons --all $(PARALLEL) -m "not timed" tests
	@NETWORK_COMPUTE_S=600 $(MAKE) network
	@$(PY) -m tests.network.campaign --cuts 100
	@$(PY) -m tests.fuzz --seconds 300
	@mkdir -p build
	@$(PY) -m tests.simulation --seeds 0-999 --jobs $(TEST_WORKERS) --coverage build/coverage.json
	@$(PY) -m tests.rl.actor_simulation --seeds 1000-1499
	@$(PY) -m bench.restarts --count 1000
	@$(PY) -m bench.faults --kills 300
	@tools/venv rl
	@.venv-rl/bin/python -m pytest --all -m "torch and full" tests/rl
	@.venv-rl/bin/python -m bench.faults.rl_kills --kills 200
	@.venv-rl/bin/python -m bench.faults.rl_kills --kills 100 --varied
	@tools/venv tinker-0.38
	@.venv-rl/bin/python -m bench.faults.tinker_kills --kills 200
	@$(PY) -m bench.soak --minutes 10
endif

# Deliberate bugs, and within how many seeds of the simulation each is found.
mutants: venv
	@$(PY) -m tests.simulation.mutants $(ARGS)

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
