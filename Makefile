# make demo      ask vLLM with and without semkv in turns: repeats and traps, a document and a picture after a restart
# make install   install into .venv, next to vLLM for this machine
# make test      run the tests
# make check     lint and type-check
# make bench     compare answers from stored KV and encoder outputs with computed ones, 500 pictures
# make ablation  32 runs of the bundled model: what each tier is worth, at which threshold
.DEFAULT_GOAL := help
.PHONY: help install demo test check bench ablation clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# CUDA vLLM where an NVIDIA driver answers, vLLM's CPU build elsewhere; DEVICE=cpu or DEVICE=gpu overrides.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
UV := $(shell command -v uv 2>/dev/null || echo $(BIN)/uv)
STAMP := $(VENV)/.installed-$(DEVICE)
DEMO_STAMP := $(VENV)/.installed-demo-$(DEVICE)
NEEDED := pyproject.toml $(wildcard packages/*/pyproject.toml) constraints-$(DEVICE).txt overrides-cpu.txt
COMMA := ,
EXTRAS := $(DEVICE),bucket,encoders,sentence-transformers,otel,server,redis,dev
PARTS := dashboard demo gateway guards stores vllm

ifeq ($(DEVICE),cpu)
OVERRIDES := --overrides overrides-cpu.txt
# CPU torch: from pip's find-links where the machine has them, else from where uv knows it to be.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
else
export UV_TORCH_BACKEND := cpu
endif
endif

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# $(1): extras of semkv, $(2): of the lab, $(3): more for uv
define install_into_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "semkv needs Python 3.11 or newer; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v $(UV) >/dev/null || $(BIN)/python -m pip install --quiet uv
	$(UV) pip install --quiet $(3) --python $(BIN)/python $(OVERRIDES) --constraint constraints-$(DEVICE).txt \
		$(foreach part,semkv semkv-lab $(PARTS:%=semkv-%),--reinstall-package $(part)) \
		--editable '.[$(1)]' --editable 'packages/lab$(2)' $(PARTS:%=--editable packages/%)
$(if $(filter cpu,$(DEVICE)),	$(UV) pip install --quiet --python $(BIN)/python --no-deps torchvision==0.28.0)
	touch $@
endef

$(STAMP): $(NEEDED)
	$(call install_into_venv,$(EXTRAS),[mlflow$(COMMA)pandas],--compile-bytecode)

# What the demo needs, which is half of it. Python compiles what is imported.
$(DEMO_STAMP): $(NEEDED)
	$(call install_into_venv,$(DEVICE)$(COMMA)encoders$(COMMA)server)

install: $(STAMP)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/semkv demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python bench/identity.py --models minigqa --samples 500 --out bench/results/identity-$(DEVICE).json

ablation: $(STAMP)
	$(BIN)/semkv sweep --specs specs/ablation-minigqa.json --log-file runs/ablation/sweep.csv \
		--samples-dir runs/ablation/samples --purge-cache-between-runs --resume
	$(BIN)/semkv report runs/ablation/sweep.csv --out runs/ablation/report.html

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
