#!/usr/bin/env bash
# ./build.sh         makes .venv with the plugin and everything it needs
# ./build.sh demo    then serves a small random checkpoint and talks to it
# ./build.sh test    then runs lint, types and all tests that need no accelerator, from the wheel
# ./build.sh wheel   builds and checks the wheel only, into dist/
# DEEPINFER_ACCELERATOR = auto (default), nvidia, ascend or cpu: the kind of machine.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly VENV=.venv
readonly SOURCES=(deepinfer_plugin kernels batch_invariant determinism_tests evals)
readonly NEED_GIB=13      # .venv takes 9.6 GB, pip's cache of the downloads 2.4 GB
readonly NEED_TEMP_GIB=4  # the largest wheels are unpacked in the temporary folder

say() { printf '%s\n' "$*"; }

refuse() {
    printf 'build.sh: %s\n' "$*" >&2
    exit 2
}

check_system() {
    [ "$(uname -s)" = Linux ] || refuse "the system is $(uname -s), expected Linux; vLLM's wheels run on nothing else"
    case "$(uname -m)" in
        x86_64 | aarch64) ;;
        *) refuse "the processor is $(uname -m), expected x86_64 or aarch64; vLLM has no other wheels" ;;
    esac
}

check_accelerator() {
    local wish=${DEEPINFER_ACCELERATOR:-auto}
    case "$wish" in
        auto | cpu) ;;
        nvidia)
            command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 ||
                refuse "DEEPINFER_ACCELERATOR is nvidia, but nvidia-smi finds no GPU; install the driver, or use cpu"
            ;;
        ascend)
            local missing="a vllm-ascend release for vLLM 0.33 (none is published; the last one, 0.23.0.post1, is for 0.23)"
            [ -d "${ASCEND_HOME_PATH:-/usr/local/Ascend}" ] || missing="CANN in /usr/local/Ascend, $missing"
            command -v npu-smi >/dev/null || missing="the NPU driver (npu-smi), $missing"
            refuse "DEEPINFER_ACCELERATOR is ascend, but this machine lacks $missing; use cpu or nvidia"
            ;;
        *) refuse "DEEPINFER_ACCELERATOR is '$wish', expected auto, nvidia, ascend or cpu" ;;
    esac
}

# Kilobytes free on the file system of folder $1.
free_kib() { df -Pk "$1" | awk 'NR == 2 { print $4 }'; }

check_disk() {
    local temp=${TMPDIR:-/tmp} here_kib temp_kib
    here_kib=$(free_kib .)
    temp_kib=$(free_kib "$temp")
    [ "$here_kib" -ge $((NEED_GIB << 20)) ] ||
        refuse "$PWD has $((here_kib >> 20)) GiB free, expected $NEED_GIB GiB for vLLM and PyTorch; free some, or clone elsewhere"
    [ "$temp_kib" -ge $((NEED_TEMP_GIB << 20)) ] ||
        refuse "$temp has $((temp_kib >> 20)) GiB free, expected $NEED_TEMP_GIB GiB while installing; set TMPDIR to a larger folder"
}

# Whether $1 runs, is Python 3.12 and can make virtual environments.
is_usable_python() {
    command -v "$1" >/dev/null &&
        "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

# Prints a Python 3.12: on PATH, in pyenv, or through uv.
find_python() {
    local candidate pyenv=${PYENV_ROOT:-$HOME/.pyenv}
    for candidate in python3.12 python3 python \
        ${PYENV_VERSION:+"$pyenv/versions/$PYENV_VERSION/bin/python"} "$pyenv"/versions/3.12*/bin/python; do
        if is_usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null; then
        candidate=$(uv python find 3.12 2>/dev/null) ||
            { uv python install 3.12 >&2 && candidate=$(uv python find 3.12); } || candidate=
        if [ -n "$candidate" ] && is_usable_python "$candidate"; then
            say "$candidate"
            return
        fi
    fi
    refuse "no Python 3.12 with venv on PATH, in $pyenv or through uv; get one with 'uv python install 3.12'," \
        "'pyenv install 3.12' or your system's packages python3.12 and python3.12-venv"
}

make_venv() {
    local python
    if [ -e $VENV ]; then
        [ -e $VENV/location ] || refuse "$PWD/$VENV was not made by build.sh; remove or rename it"
        if is_usable_python $VENV/bin/python && [ "$(cat $VENV/location)" = "$PWD" ]; then
            return
        fi
        rm -rf $VENV  # its Python is gone, or the folder was moved: its scripts name the old place
    fi
    python=$(find_python)
    say "Python: $python"
    mkdir $VENV
    say "$PWD" >$VENV/location
    "$python" -m venv $VENV
}

pip() { $VENV/bin/python -m pip --disable-pip-version-check --no-input "$@"; }

# One line that changes when a file that goes into the wheel changes.
source_hash() {
    find pyproject.toml README.md LICENSE "${SOURCES[@]}" -type f -not -path '*/__pycache__/*' -not -path '*/.*' -print0 |
        sort -z | xargs -0 sha256sum | sha256sum
}

# One line that changes when the set of installed packages should.
dependency_hash() { { $VENV/bin/python -VV; cat pyproject.toml; } | sha256sum; }

# Whether stamp file $1 holds line $2.
has_stamp() { [ -e "$VENV/$1.stamp" ] && [ "$(cat "$VENV/$1.stamp")" = "$2" ]; }

# Builds from a copy, so that nothing left behind by an earlier build gets into the wheel. Prints the wheel's path.
build_wheel() {
    local copy
    copy=$(mktemp -d)
    tar -cf - --exclude=__pycache__ --exclude='.*' pyproject.toml README.md LICENSE "${SOURCES[@]}" | tar -xf - -C "$copy"
    rm -rf dist
    pip wheel --quiet --no-deps --wheel-dir dist "$copy" >&2
    rm -rf "$copy"
    check_wheel dist/*.whl
    say dist/*.whl
}

# Refuses wheel $1 if it would install anything beside our own packages.
check_wheel() {
    $VENV/bin/python - "$1" >&2 <<'PYTHON'
import sys
import zipfile

names = sorted({name.split("/")[0] for name in zipfile.ZipFile(sys.argv[1]).namelist()})
foreign = [name for name in names if not name.startswith("deepinfer")]
if foreign:
    sys.exit(f"build.sh: the wheel has top-level names {foreign}, expected deepinfer* only; correct pyproject.toml")
PYTHON
}

# $1: extras to install ("test"), or nothing. Does only what changed since the last time.
install() {
    local extras=${1:-} dependencies sources wheel
    check_accelerator
    [ -e $VENV/dependencies.stamp ] || [ -e $VENV/dependencies-test.stamp ] || check_disk
    make_venv
    dependencies=$(dependency_hash)
    sources=$(source_hash)
    if has_stamp dependencies-test "$dependencies" || { [ -z "$extras" ] && has_stamp dependencies "$dependencies"; }; then
        if ! has_stamp sources "$sources"; then
            wheel=$(build_wheel)
            pip install --quiet --no-deps --force-reinstall "$wheel"
        fi
    else
        wheel=$(build_wheel)
        rm -f $VENV/*.stamp
        say "Installing vLLM, PyTorch and the plugin: up to 2.4 GB to download, some minutes."
        pip install --quiet --no-deps --force-reinstall "$wheel"
        pip install "$wheel${extras:+[$extras]}"  # what the new metadata asks for
        say "$dependencies" >"$VENV/dependencies${extras:+-$extras}.stamp"
    fi
    say "$sources" >$VENV/sources.stamp
}

run_tests() {
    local packages=() failed=() folder determinism kernels
    export DEEPINFER_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
    for folder in $VENV/lib/python3.12/site-packages/deepinfer_*/; do
        case $folder in
            *.dist-info/) ;;
            */deepinfer_determinism/) determinism=$folder ;; # starts its own processes and reports once, at its end
            */deepinfer_kernels/) kernels=$folder ;; # needs Triton's compiler; the plugin's tests put its interpreter there
            *) packages+=("$folder") ;;
        esac
    done
    say "== ruff check"
    $VENV/bin/ruff check . || failed+=(ruff-check)
    say "== ruff format"
    $VENV/bin/ruff format --check . || failed+=(ruff-format)
    say "== mypy"
    find "${SOURCES[@]}" -name '*.py' -not -path '*/.*' -print0 | xargs -0 $VENV/bin/mypy --strict || failed+=(mypy)
    say "== pytest of the kernels, from the installed wheel"
    local pytest=($VENV/bin/pytest -c pyproject.toml --rootdir . -o pythonpath= -m 'not gpu and not npu and not weights')
    # one file stays in one process, so that its engines are started once
    "${pytest[@]}" -n 2 --dist loadfile "$kernels" "$@" || failed+=(kernels)
    say "== pytest of the other packages"
    "${pytest[@]}" -n 2 --dist loadfile "${packages[@]}" "$@" || failed+=(pytest)
    say "== determinism, quick set"
    "${pytest[@]}" "$determinism" "$@" || failed+=(determinism)
    if [ ${#failed[@]} -gt 0 ]; then
        printf 'build.sh: failed:%s\n' "$(printf ' %s' "${failed[@]}")" >&2
        exit 1
    fi
}

main() {
    local word=${1:-install}
    [ $# -eq 0 ] || shift
    case "$word" in
        install | demo | test | wheel) ;;
        -h | --help | help)
            sed -n '2,6s/^# //p' build.sh
            return
            ;;
        *) refuse "the word is '$word', expected demo, test, wheel or none" ;;
    esac
    check_system
    case "$word" in
        install)
            install
            say "Ready: $VENV/bin/vllm serve MODEL   ($VENV/bin/python -m deepinfer_plugin status says what is on)"
            ;;
        demo)
            install
            export VLLM_NO_USAGE_STATS=1
            exec $VENV/bin/python -P -m deepinfer_plugin demo "$@"
            ;;
        test)
            install test
            run_tests "$@"
            ;;
        wheel)
            make_venv
            build_wheel
            ;;
    esac
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    main "$@"
fi
