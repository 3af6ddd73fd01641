# `make demo` and `make test` set everything up by themselves; `make help` lists the rest.
# scripts/setup installs what is missing, CMakePresets.json says how things are built.
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory
export JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
RUN_TESTS = ctest --preset $(1) --parallel $(JOBS)
RUN_SANITIZED = if [ -e /proc/self/environ ]; then scripts/build $(1) && $(RUN_TESTS); \
  else echo "make $(1): skipped: sanitizers read /proc, which is not mounted"; fi

.NOTPARALLEL:
.PHONY: build demo test check lint asan tsan gpu worklog bench wheel python site course install format clean help setup-build setup-test setup-python setup-site setup-course

build: setup-build ## build the library and the program: build/release
	@scripts/build release $(if $(wildcard build/release/build.ninja),,-DFA3_BUILD_TESTS=OFF)

demo: build ## run attention on a real model's query, key and value, and check the result
	@scripts/demo

test: check ## everything that a change has to pass, the six targets below
	@scripts/once lint asan tsan python course
	@echo "make test: everything passed (CUDA kernels: by tests/gpu/receipt.json, see make gpu)"

check: setup-test ## the tests of the optimised build
	@scripts/build release -DFA3_BUILD_TESTS=ON
	@$(call RUN_TESTS,release)

lint: setup-test ## clang-format and clang-tidy
	@scripts/format --check
	@scripts/build lint

asan: setup-test ## the tests with AddressSanitizer and UBSan, and a short run of the fuzzers
	@$(call RUN_SANITIZED,asan)

tsan: setup-test ## the tests with ThreadSanitizer
	@$(call RUN_SANITIZED,tsan)

python: wheel ## the Python package's tests on CPU tensors (a big download, the first time)
	@scripts/test_python

course: setup-test setup-course site ## the course's pages and what is on them, in headless Chromium
	@scripts/build release -DFA3_BUILD_TESTS=ON
	@build/site-venv/bin/python tests/site/pages.py build/site
	@build/site-venv/bin/python tests/site/faults.py build/site
	@build/site-venv/bin/python tests/site/toys.py build/site build/release/tests/site/libfa3_toys.so

site: setup-site ## build the course, a static site: build/site
	@build/site-venv/bin/python docs/site/build.py

wheel: setup-python ## build the Python package: build/dist
	@scripts/wheel

gpu: export FA3_CUDA = REFERENCE
gpu: setup-test ## on a machine with a Hopper GPU: the GPU tests, and the receipt that they pass
	@scripts/build release -DFA3_BUILD_TESTS=ON
	@python3 tests/gpu/suite.py build/release tests/gpu/receipt.json

bench: setup-test ## time the CPU engine beside PyTorch's (a big download, the first time)
	@scripts/setup bench
	@scripts/build release -DFA3_BUILD_TESTS=ON
	@build/bench-venv/bin/python bench/cpu.py

worklog: ## on a machine with a Hopper GPU: check and time the ladder of worklog/
	@$(MAKE) -C worklog

install: build ## install into PREFIX (/usr/local)
	@cmake --install build/release --prefix $(PREFIX)

format: setup-test ## format the sources in place
	@scripts/format

clean: ## remove all that was built
	rm -rf build

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

setup-build:
	@scripts/setup build

setup-test:
	@scripts/setup test

setup-python:
	@scripts/setup python

setup-site:
	@scripts/setup site

setup-course:
	@scripts/setup course
