# SPDX-License-Identifier: Apache-2.0
# make demo   the main job on a real model      make test   all tests      make lint   format, types, style
# make corpus   every architecture through every exporter      make scores   what the gates and the seeded faults say
# make wheel    the wheel for others, tried in an environment of its own
# The first of them makes .venv and builds the native parts; later ones only rebuild what changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# A release of its own, first: without it a dependency would pull in whichever torch is newest.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NATIVE := build/native
NATIVE_SOURCES := CMakeLists.txt $(shell find cmake plugin tests/plugin -name '*.py' -prune -o -type f -print 2>/dev/null)
PYTHON_SOURCES := conftest.py exporter python tests samples scripts benchmarks

.PHONY: all demo test test-native test-python scores wheel corpus lint format clean
all: demo

demo: $(INSTALLED)
	$(BIN)/python samples/01_sentence_encoder/sentence_encoder.py --out build/demo

test: test-native test-python

test-native: $(INSTALLED)
	$(BIN)/ctest --test-dir $(NATIVE) --output-on-failure -j 2
	awk '/ Testing: /{name = $$3} /^[0-9]+ passed,|nothing found$$|^stat::number_of_executed_units/{print name ": " $$0}' \
	  $(NATIVE)/Testing/Temporary/LastTest.log

test-python: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# What tests only pass or fail, as figures: the gates' table, the share of seeded faults caught, the CPU's cases under ASan.
scores: $(INSTALLED)
	$(BIN)/python scripts/kernel_table.py $(NATIVE)/lib/libflash_attention_plugin.so
	$(BIN)/python scripts/mutate_kernels.py --sample 12
	LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
	  $(BIN)/python tests/plugin/cpu/cpu_library.py $(NATIVE)/lib/libcpu_door_address.so table

wheel: $(INSTALLED)
	rm -rf build/wheel
	$(BIN)/python scripts/build_wheel.py build/wheel
	$(BIN)/python scripts/try_wheel.py build/wheel/*.whl

corpus: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m corpus tests/corpus

lint: $(INSTALLED)
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

# pip is silent unless something fails: `make V=1` lets it talk.
QUIET := $(if $(V),,@)
PIP := $(BIN)/pip --disable-pip-version-check $(if $(V),,--quiet --quiet)

$(BIN)/pip:
	@echo "$(VENV): a new environment"
	$(QUIET)$(PYTHON) -m venv $(VENV)
	$(QUIET)$(PIP) install --upgrade pip

$(VENV)/.tools: pyproject.toml | $(BIN)/pip
	@echo "$(VENV): PyTorch and the build tools, a minute or two"
	$(QUIET)$(PIP) install '$(TORCH)'
	$(QUIET)$(PIP) install 'scikit-build-core>=1.1,<2' 'cmake>=3.25,<4' 'ninja>=1.11,<2'
	@touch $@

$(INSTALLED): $(VENV)/.tools $(NATIVE_SOURCES)
	@echo "$(VENV): flash-export with its native parts, compiled where they changed: up to some minutes"
	$(QUIET)PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-build-isolation -C build-dir=$(NATIVE) \
	  -C cmake.define.FLASH_EXPORT_TESTS=ON -e '.[torch,rtx,dev]'
	@touch $@

clean:
	rm -rf build $(VENV)
