#!/usr/bin/env bash
# Check style and types, then run the tests: bash run_tests.sh [pytest arguments]
# The export in vLLM is tested where VLLM_PYTHON names the python of an environment with vLLM (.ci/run makes one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source trainer/cli/environment.sh
prepare_python dev
"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
"$python" -m mypy --no-error-summary
[ -n "${VLLM_PYTHON:-}" ] || set -- -m "not vllm" "$@"
exec "$python" -m pytest "$@"
