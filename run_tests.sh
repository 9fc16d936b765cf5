#!/usr/bin/env bash
# Check style and types, then run the tests: bash run_tests.sh [pytest arguments]
# What needs vLLM or verl runs where VLLM_PYTHON and VERL_PYTHON name a python that has them (.ci/run makes both).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source trainer/launch/environment.sh
prepare_python dev
"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
"$python" -m mypy --no-error-summary
exec "$python" -m pytest "$@"
