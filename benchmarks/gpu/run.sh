#!/bin/sh
# Measure hotshoe on an NVIDIA GPU; see measure.py. Needs a Python with torch and triton: PYTHON, that
# of .venv, or python3. If hotshoe isn't installed there, the wheels that fetch_wheels.sh brought
# are unpacked into a temporary folder, and hotshoe runs from this tree.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$(dirname "$here")")
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$repository/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
is_installed='import importlib.metadata as m; m.version("hotshoe")'
if ! "$PYTHON" -c "$is_installed" 2>/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    if [ -d "$here/wheels" ]; then
        "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
            --disable-pip-version-check --upgrade --target "$site" "$here"/wheels/*.whl
    fi
    roots=$("$PYTHON" "$here/prepare.py" "$site")
    PYTHONPATH=$roots:$site${PYTHONPATH:+:$PYTHONPATH}
fi
# --output is relative to where the command was given
HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 \
    PYTHONPATH=$here:$repository/benchmarks${PYTHONPATH:+:$PYTHONPATH} \
    "$PYTHON" "$here/measure.py" "$@"
