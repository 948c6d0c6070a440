#!/usr/bin/env bash
# Makes the environment that the SGLang tests run in, or finds it, and prints its folder (8.7 GB, outside the checkout).
#
# SGLang pins older packages than the product's own environment, so it gets one of its own: in the user's cache folder,
# under the hash of the versions in constraints-sglang.txt, shared by all checkouts. The product is not installed in it:
# whoever uses it puts a checkout first on PYTHONPATH.
#
#   MILES_K3_PYTHON=/path/to/python   use this interpreter (3.12 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cache=${XDG_CACHE_HOME:-$HOME/.cache}/miles-k3
# What the tests themselves need; their versions are those of the product's environment.
readonly test_tools='pytest|pytest-timeout|pluggy|iniconfig'

say() { printf 'sglang_env: %s\n' "$*" >&2; }

versions_hash() {
    { cat constraints-sglang.txt && grep -E "^($test_tools)==" constraints.txt; } |
        if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -c 1-16
}

is_usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${MILES_K3_PYTHON:-}" .venv/bin/python python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3; do
        if [ -n "$candidate" ] && is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    say "no usable Python >= 3.12 found: install one with its venv module, or name it in MILES_K3_PYTHON"
    return 1
}

requirements() { # of the product, without its extra `dev`; SGLang from the extra of that name
    "$1" -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(p["dependencies"] + p["optional-dependencies"]["sglang"]))'
}

make_env() { # folder
    local python uv free_kb
    free_kb=$(df -Pk "$cache" | awk 'NR == 2 { print $4 }')
    if [ "$free_kb" -lt $((12 << 20)) ]; then
        say "$cache has $((free_kb >> 20)) GB free; the environment takes 8.7 GB and 12 are asked for: make room first"
        return 1
    fi
    python=$(find_python)
    say "installing the versions in constraints-sglang.txt into $1 (the first time several GB to download)"
    rm -rf "$1"
    "$python" -m venv "$1"
    grep -E "^($test_tools)==" constraints.txt >"$1/test-tools.txt"
    requirements "$1/bin/python" >"$1/requirements.txt"
    for uv in "$(command -v uv || true)" .venv/bin/uv; do
        if [ -x "$uv" ] && "$uv" pip install -q --python "$1/bin/python" -c constraints-sglang.txt \
            -r "$1/test-tools.txt" -r "$1/requirements.txt" >&2; then
            return
        fi
    done
    "$1/bin/python" -m pip install -q -c constraints-sglang.txt -r "$1/test-tools.txt" -r "$1/requirements.txt" >&2
}

env=$cache/sglang-$(versions_hash)
mkdir -p "$cache"
exec 9>"$env.lock"
! command -v flock >/dev/null || flock 9
if ! [ -e "$env/.complete" ]; then
    # 8.7 GB each: those that nobody used for two weeks go.
    find "$cache" -mindepth 1 -maxdepth 1 -name 'sglang-*' -mtime +14 -exec rm -rf {} +
    seconds_at_start=$SECONDS
    make_env "$env"
    touch "$env/.complete"
    say "ready in $((SECONDS - seconds_at_start)) s"
fi
touch "$env"
echo "$env"
