PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python

CXX_FILES := $(shell find torch_tpu/csrc -name '*.cc' -o -name '*.h')
PY_DIRS := torch_tpu tests benchmarks examples setup.py
# Downloads fail now and then on shared networks: ask again before giving up.
PIP := $(PY) -m pip install --disable-pip-version-check --retries 10 --timeout 60

.PHONY: venv build test conformance tpu-compile demo bench models lint format clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel ninja pybind11
	$(PIP) torch==2.13.0
	$(PIP) $$($(PY) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
	  print(*p['tool']['torch_tpu']['requirements'], *p['project']['optional-dependencies']['dev'])")
	touch $@

build: $(VENV)/.editable build/.extension

# The editable install: the package's metadata and entry point, and a first build.
$(VENV)/.editable: $(VENV)/.installed pyproject.toml setup.py
	$(PIP) -e . --no-build-isolation --no-deps
	touch $@

# After that only the extension is built again, and of that only what changed.
build/.extension: $(VENV)/.editable $(CXX_FILES)
	$(PY) setup.py --quiet build_ext --inplace
	@mkdir -p $(@D) && touch $@

test: build
	$(PY) -m pytest tests -q $(shell $(PY) -c "import xdist; print('-n 2')" 2>/dev/null) $(ARGS)

# Every operator description of PyTorch against the CPU (tests/conformance); hours, and it goes on where it was stopped.
# ARGS="--ops add,nn.functional.* --dtypes float32" runs a part and leaves the table alone.
conformance: build
	$(PY) -m tests.conformance $(or $(ARGS),--table docs/ops.md)

# Every operator's programs through libtpu's compiler for one v6e chip (needs no TPU); an hour, and it goes on where it was
# stopped. Writes the results that the next table is made with (docs/ops.md: compiles for TPU). ARGS="--ops fft.*" runs a part.
tpu-compile: build
	$(PY) -m tests.conformance.tpu $(or $(ARGS),--summary tests/conformance/tpu_compile.json)

demo: build
	$(PY) examples/train_digits.py --device tpu

bench: build
	for script in $(filter-out benchmarks/models.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(PY) $$script || exit 1; done

# Tiny models of Transformers' architectures against the CPU; hours, and it goes on where it was stopped.
# ARGS="--models 'bert*' --checks forward" runs a part and leaves the table alone.
models: build
	$(PY) benchmarks/models.py $(or $(ARGS),--table docs/models.md)

lint: venv
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: venv
	$(BIN)/ruff check --fix $(PY_DIRS)
	$(BIN)/ruff format $(PY_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist *.egg-info torch_tpu/_C*.so $(VENV)/.editable .pytest_cache .mypy_cache .ruff_cache
	find torch_tpu tests -name __pycache__ -prune -exec rm -rf {} +
