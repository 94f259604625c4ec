# Two commands do everything on a fresh machine with Python ≥ 3.11:
#   make quickstart   install, then train, evaluate and export a small drafter of a real model on the CPU
#   make test         install, then run the tests (make test-long: those that repeat a case at greater length)
PYTHON ?= python3
# Any torch ≥ 2.11 will do. For a smaller download on Linux without a GPU, name a CPU wheel here.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
TARGET := models/smollm2-135m
RUN := runs/quickstart

.PHONY: quickstart test test-long check format docs clean

quickstart: $(VENV)/.main $(TARGET)/config.json
	@echo "== 1/4 prepare: conversations → tokens and a loss mask"
	$(BIN)/draftmill prepare examples/quickstart/conversations.jsonl --model $(TARGET) --output prepared/quickstart
	@echo "== 2/4 train: at most 6 minutes"
	$(BIN)/draftmill train configs/quickstart.yaml --resume
	@echo "== 3/4 evaluate: held-out prompts, decoded with and without the drafter (about 2 minutes)"
	$(BIN)/draftmill evaluate $(RUN) --prompts examples/quickstart/heldout_prompts.jsonl --max-new-tokens 96 --limit 24
	@echo "== 4/4 export: the checkpoint that serving engines load"
	$(BIN)/draftmill export $(RUN) --overwrite --check
	@echo
	@echo "Made:  $(RUN)/export         the drafter, in the layout of z-lab's client, vLLM and SGLang"
	@echo "       $(RUN)/report.png     loss, τ over steps, acceptance per slot"
	@echo "       $(RUN)/evaluation.json"
	@echo "Next:  your own data and model:"
	@echo "       $(BIN)/draftmill prepare YOUR.jsonl --model YOUR_MODEL --output prepared/mine --preview 3"

# In the order of the folders: by default files with few tests go last, and the longest of them would run alone.
test: $(VENV)/.dev $(TARGET)/config.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: $(VENV)/.dev $(TARGET)/config.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.main
	$(BIN)/python -m draftmill.run.reference > docs/configuration.md

clean:
	rm -rf $(VENV) build models prepared runs .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.main: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("draftmill needs Python 3.11 or newer; name one with make PYTHON=…") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing torch and draftmill (a few minutes) …"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[gguf]"
	touch $@

# z-lab's client pins every dependency; it is the referee of our exports and goes in beside what is there.
$(VENV)/.dev: $(VENV)/.main
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $@

$(TARGET)/config.json: | $(VENV)/.main
	$(BIN)/python examples/quickstart/fetch_target.py $(TARGET)
