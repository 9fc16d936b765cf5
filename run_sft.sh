#!/usr/bin/env bash
# Train: bash run_sft.sh [N] [key=value ...]   (bash run_sft.sh --help lists the keys)
# The first call makes .venv, unless the active environment has the dependencies already.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/trainer/launch/environment.sh"
prepare_python ""
exec "$python" -m trainer.launch "$@"
