# Sourced by run_sft.sh and run_tests.sh: `prepare_python EXTRA` sets $python to an interpreter that has the package's
# dependencies (EXTRA: an optional group of pyproject.toml, or empty) and makes `trainer` importable from anywhere.

prepare_python() {
    local extra=$1 root wanted done_file installing candidate
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    # Safe path: a folder named trainer in the caller's directory must not shadow this one.
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

    python=$(command -v python3 || true)
    if [ -n "$python" ] && "$python" -m trainer.cli.requirements $extra 2>/dev/null; then return; fi

    python=$root/.venv/bin/python
    done_file=$root/.venv/.installed${extra:+-$extra}
    installing=$root/.venv/.installing
    wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)
    exec 9<"$root/pyproject.toml"
    flock 9 # two first calls at once: the second waits and finds everything installed
    if [ "$(cat "$done_file" 2>/dev/null)" != "$wanted" ]; then
        echo "setting up $root/.venv (first use or changed requirements; takes some minutes)"
        # An interrupted installation may look complete to pip: start over.
        if [ ! -x "$python" ] || [ -e "$installing" ]; then
            candidate=$(find_base_python)
            "$candidate" -m venv --clear "$root/.venv"
        fi
        touch "$installing"
        # torch first, so that no other requirement chooses its version.
        "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" torch
        "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root${extra:+[$extra]}"
        echo "$wanted" >"$done_file"
        rm "$installing"
    fi
    exec 9<&-
}

find_base_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "ERROR: no Python >= 3.11 with the venv module found (tried: ${PYTHON:-python3, python3.11 to python3.13}): install it, or name one in PYTHON" >&2
    exit 2
}
