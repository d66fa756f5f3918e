#!/bin/sh
# Download what hotshoe needs beside torch, triton and transformers, for run.sh on a machine that
# reaches no package index. For other Pythons: PYTHON_VERSION=3.11 benchmarks/gpu/fetch_wheels.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python_version=${PYTHON_VERSION:-3.12}
platforms=
for number in 34 28 27 24 17 12 5; do
    platforms="$platforms --platform manylinux_2_${number}_x86_64"
done
rm -rf "$here/wheels"
mkdir "$here/wheels"
# shellcheck disable=SC2086  # several words
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --python-version "$python_version" --implementation cp \
    $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any \
    --constraint "$here/../../constraints.txt" --requirement "$here/wheels.txt" \
    --dest "$here/wheels"
size=$(du -sm "$here/wheels" | cut -f1)
echo "$(ls "$here/wheels" | wc -l) wheels, $size MB, in $here/wheels"
[ "$size" -le 60 ] || { echo "error: more than 60 MB" >&2; exit 1; }
