#!/usr/bin/env bash
# Create a virtual environment with everything in it, and make headless OpenGL available.
#   scripts/setup.sh [folder of the environment]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

python=
for candidate in "${PYTHON:-python3}" python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "error: no Python >= 3.10 found; install one, or set PYTHON=/path/to/python" >&2
    exit 1
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)

if ! nvidia-smi >/dev/null 2>&1; then
    # Without a GPU the CUDA libraries of a plain torch would be gigabytes for nothing.
    "${pip[@]}" "torch==2.13.0"
fi
"${pip[@]}" --editable ".[libero,openvla,demos,wandb,dev]"

# Headless rendering: EGL on a GPU, otherwise EGL or OSMesa in software.
packages="libegl1 libgl1 libosmesa6"
has_library() {
    "$venv/bin/python" -c "import ctypes.util, sys; sys.exit(not ctypes.util.find_library('$1'))"
}
if ! has_library EGL || ! has_library OSMesa || ! has_library GL; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
    else
        echo "LIBERO needs headless OpenGL, which is not installed. Run (then go on):"
        echo "    sudo apt-get install $packages"
    fi
fi
echo "installed into $venv"
