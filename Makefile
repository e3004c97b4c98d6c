# make run: the main job. make test: the tests. Both install what they need first.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RECIPE := sota-implementations/vla_grpo/vla-grpo.py

.PHONY: help setup run demo-libero test check bench clean

help:
	@echo "make setup        install into $(VENV), and headless OpenGL where possible"
	@echo "make run          train on the toy task (about a minute); ARGS='option=value ...'"
	@echo "make demo-libero  improve a shipped policy on real LIBERO tasks (half an hour)"
	@echo "make test         the tests; ARGS='-m \"not libero\"' for a part, -m slow for the rest"
	@echo "make check        formatting, lints, layers, types"
	@echo "make bench        benchmarks, results in benchmarks/results"

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh $(VENV)
	@touch $(STAMP)

run: $(STAMP)
	$(BIN)/python $(RECIPE) $(ARGS)

demo-libero: $(STAMP)
	$(BIN)/python $(RECIPE) +experiment=libero_object_cpu $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
