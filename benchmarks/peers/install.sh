#!/usr/bin/env bash
# The environment of the trainers that the benchmarks compare with: .venv-peers in the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source trainer/launch/environment.sh
"$(find_base_python)" -m venv --clear .venv-peers
.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.17.0 accelerate==1.15.0 trl==1.16.0 datasets numpy
.venv-peers/bin/python -c "import torch, trl"
