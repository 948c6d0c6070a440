#!/usr/bin/env bash
# Makes .venv, or brings it up to date, with the exact versions in constraints.txt. Does nothing when it is current.
#
#   MILES_K3_PYTHON=/path/to/python   use this interpreter (3.12 or newer)
#   MILES_K3_ENV_CACHE=1              keep the installed packages in the user's cache folder, shared by all checkouts
#                                     with the same versions; .venv then holds only this checkout's own install
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
cache=${XDG_CACHE_HOME:-$HOME/.cache}/miles-k3

say() { printf 'bootstrap: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

versions_hash() {
    local sum=sha256sum
    command -v sha256sum >/dev/null || sum="shasum -a 256"
    cat constraints.txt pyproject.toml | $sum | cut -c 1-16
}

# The path is part of the stamp because scripts and the editable install hold it: a moved checkout needs a new .venv.
hash=$(versions_hash)
stamp="$hash $root"

is_current() {
    [ -x .venv/bin/python ] && [ "$(cat .venv/.stamp 2>/dev/null)" = "$stamp" ] &&
        { [ ! -L .venv/packages ] || [ -e .venv/packages ]; }
}

# An interpreter is run before it is believed: version managers leave commands on PATH that only print an error.
is_usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${MILES_K3_PYTHON:-}" ]; then
        is_usable "$MILES_K3_PYTHON" && echo "$MILES_K3_PYTHON"
        return
    fi
    local candidate pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for candidate in python3.12 python3.13 python3 "$pyenv"/3.12*/bin/python3 "$pyenv"/3.13*/bin/python3 \
        "$pyenv"/*/bin/python3; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    candidate=$(uv python find '>=3.12' 2>/dev/null) && is_usable "$candidate" && echo "$candidate"
}

make_env() { # folder
    local python
    python=$(find_python) || die "no usable Python >= 3.12 found${MILES_K3_PYTHON:+ at $MILES_K3_PYTHON}:" \
        "install one with its venv module (apt install python3.12-venv, brew install python@3.12, pyenv install 3.12" \
        "or uv python install 3.12) and run this again"
    say "making $1 with $("$python" --version 2>&1)"
    rm -rf "$1"
    "$python" -m venv "$1"
}

# uv where it can be had, since it is many times faster; pip otherwise, also where only pip's own settings know the way.
install() { # folder, arguments of `pip install`
    local env=$1 uv
    shift
    uv=$(command -v uv || true)
    if [ -z "$uv" ]; then
        [ -x "$env/bin/uv" ] || "$env/bin/python" -m pip install -q -c constraints.txt uv || true
        uv=$env/bin/uv
    fi
    if [ -x "$uv" ]; then
        "$uv" pip install -q --python "$env/bin/python" "$@" && return
        say "uv could not install; trying pip"
    fi
    "$env/bin/python" -m pip install -q "$@"
}

install_in_checkout() {
    # Only a .venv that cannot run, or belongs to another folder, is made anew; one with old versions is updated.
    if ! [ -x .venv/bin/python ] || [ -L .venv/packages ] ||
        { [ -s .venv/.stamp ] && [ "$(cut -d ' ' -f 2- .venv/.stamp)" != "$root" ]; }; then
        make_env .venv
    fi
    rm -f .venv/.stamp
    say "installing the versions in constraints.txt (the first time about 3 GB to download)"
    install .venv -c constraints.txt -e ".[dev]"
}

install_in_cache() { # folder
    mkdir -p "$cache"
    exec 9>"$1.lock"
    ! command -v flock >/dev/null || flock 9
    if ! [ -e "$1/.complete" ]; then
        # 5 GB each: those that nobody used for two weeks go.
        find "$cache" -mindepth 1 -maxdepth 1 -name 'env-*' -mtime +14 -exec rm -rf {} +
        make_env "$1"
        say "installing the versions in constraints.txt (the first time about 3 GB to download)"
        install "$1" -c constraints.txt -e ".[dev]"
        # Which checkout is imported is each .venv's business.
        "$1/bin/python" -m pip uninstall -q -y miles-k3
        touch "$1/.complete"
    fi
    touch "$1"
    exec 9>&-
}

# A .venv of a few files that finds its packages in the cached environment, so that two checkouts never share a project
# install. Its commands are the cached ones, started by this .venv's interpreter.
make_thin_env() { # folder of the cached environment
    local command name site
    rm -rf .venv
    "$1/bin/python" -m venv --without-pip .venv
    ln -s "$1" .venv/packages
    site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$site" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
    for command in "$1"/bin/*; do
        name=${command##*/}
        if [ -e ".venv/bin/$name" ] || [ -d "$command" ]; then
            continue
        elif [ "$(head -c 2 "$command" | tr -d '\0')" = '#!' ]; then
            sed "1,2s|$1/bin/|$root/.venv/bin/|" "$command" >".venv/bin/$name"
            chmod +x ".venv/bin/$name"
        else
            ln -s "$command" ".venv/bin/$name"
        fi
    done
    install .venv --no-deps -e .
}

if is_current; then
    exit 0
fi
seconds_at_start=$SECONDS
if [ "${MILES_K3_ENV_CACHE:-0}" = 1 ]; then
    install_in_cache "$cache/env-$hash"
    make_thin_env "$cache/env-$hash"
else
    install_in_checkout
fi
echo "$stamp" >.venv/.stamp
say "ready in $((SECONDS - seconds_at_start)) s: .venv/bin/miles-k3 --help"
