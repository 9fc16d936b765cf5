# Sourced by run_sft.sh and run_tests.sh: `prepare_python EXTRA` sets $python to an interpreter that has the package's
# dependencies (EXTRA: an optional group of pyproject.toml, or empty) and makes `trainer` importable from anywhere.

prepare_python() {
    local extra=$1 root venv wanted candidate
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    venv=$root/.venv
    # Safe path: a folder named trainer in the caller's directory must not shadow this one.
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

    wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)
    python=$(command -v python3 || true)
    if [ -n "$python" ] && has_requirements; then return; fi
    python=$venv/bin/python
    if is_installed; then return; fi
    exec 9<"$root/pyproject.toml"
    flock 9 # two first calls at once: the second waits and finds everything installed
    if ! is_installed; then install_requirements; fi
    exec 9<&-
}

has_requirements() { "$python" -m trainer.launch.requirements $extra 2>/dev/null; }

is_installed() { [ "$(cat "$venv/.installed${extra:+-$extra}" 2>/dev/null)" = "$wanted" ]; }

# Only an environment that carries a mark of this script is ever changed or removed; anyone else's is used or refused.
install_requirements() {
    if [ -e "$venv" ] && [ ! -e "$venv/.installed" ] && [ ! -e "$venv/.installing" ]; then
        if has_requirements; then return; fi
        echo "ERROR: $venv was not made by this script and lacks the requirements of pyproject.toml${extra:+, extra '$extra'}:" \
            "install them there (pip install -e '$root${extra:+[$extra]}' -c constraints.txt), or move it away" >&2
        exit 2
    fi
    echo "setting up $venv (first use or changed requirements; takes some minutes)"
    # An interrupted installation may look complete to pip: start over.
    if [ ! -x "$python" ] || [ -e "$venv/.installing" ]; then
        candidate=$(find_base_python)
        rm -rf "$venv"
        if ! mkdir "$venv"; then
            echo "ERROR: $venv cannot be made: activate an environment that has the requirements" \
                "(pip install -e '$root${extra:+[$extra]}' -c constraints.txt), or take a checkout of your own" >&2
            exit 73
        fi
        touch "$venv/.installing"
        "$candidate" -m venv "$venv"
    fi
    touch "$venv/.installing"
    # torch first, so that no other requirement chooses its version.
    pip_install torch
    pip_install -e "$root${extra:+[$extra]}"
    echo "$wanted" | tee "$venv/.installed" >"$venv/.installed${extra:+-$extra}"
    rm "$venv/.installing"
}

# Python itself writes the bytecode of the modules that it imports. Where it may not, pip writes it now; otherwise every
# process would compile torch and transformers at its start.
pip_install() {
    local compile=--no-compile
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then compile=--compile; fi
    "$python" -m pip install -qq $compile --disable-pip-version-check -c "$root/constraints.txt" "$@"
}

find_base_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "ERROR: no Python >= 3.11 with the venv module (tried: ${PYTHON:-python3, python3.13 to python3.11}):" \
        "install one, or name one in PYTHON" >&2
    exit 2
}
