#!/usr/bin/env bash
# Installs what a target of the Makefile needs and the machine lacks: apt packages of Debian 12 or Ubuntu 24.04 (and newer),
# and packages of PyPI in the build folder.
# Prints nothing and takes no time when nothing is missing.
#
#   tools/setup.sh run           compiler, CMake and the libraries of the library and the command line
#   tools/setup.sh build         the same, and what the CUDA build and the tests need
#   tools/setup.sh test          the same, clang with its sanitizers and fuzzer, clang-format
#   tools/setup.sh cuda          nvcc from PyPI in build/cuda-toolkit (x86-64, 290 MB), where no nvcc is found
#   tools/setup.sh cute          CuTe's headers from PyPI in build/cutlass (6 MB to load), for rung 34 of the ladder
#   tools/setup.sh disassembler  cuobjdump and nvdisasm from PyPI in build/disassembler (6 MB to load), for tests/sass
#   tools/setup.sh python        as build, and what the Python package is tested with, from PyPI in build/venv (2.3 GB)
#   tools/setup.sh report        what `fovea report` draws with, from PyPI in build/report-venv (80 MB)
#   tools/setup.sh report-test   the same and what its page is tested with in build/report-test-venv, and Chromium (on Debian)
#   tools/setup.sh arm64         as build, a cross-compiler and an emulator
#
# FOVEA_NO_SETUP=1 makes it do nothing, for machines whose packages come from elsewhere.
set -euo pipefail

run=(g++ cmake ninja-build pkg-config libhwy-dev libcli11-dev nlohmann-json3-dev libfmt-dev
     libcairo2-dev libpango1.0-dev fonts-dejavu-core)
build=("${run[@]}" python3 libgtest-dev openmpi-bin libopenmpi-dev)
test=(clang clang-format)
python=(python3-dev python3-venv)
report_test=()
# Ubuntu's package is a snap, which containers cannot install.
grep -qs '^ID=debian' /etc/os-release && report_test=(chromium chromium-driver fonts-dejavu-core)
arm64=(g++-aarch64-linux-gnu qemu-user googletest)

case "${1:-}" in
  run) wanted=("${run[@]}") ;;
  build) wanted=("${build[@]}") ;;
  test) wanted=("${build[@]}" "${test[@]}") ;;
  python) wanted=("${build[@]}" "${python[@]}") ;;
  report) wanted=(python3 python3-venv) ;;
  report-test) wanted=(python3 python3-venv "${report_test[@]}") ;;
  arm64) wanted=("${build[@]}" "${arm64[@]}") ;;
  cuda|cute|disassembler) wanted=() ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2 ;;
esac
[[ -n "${FOVEA_NO_SETUP:-}" ]] && exit 0

root=$(cd "$(dirname "$0")/.." && pwd)
if [[ "$1" == cuda ]]; then
  # cmake/cuda.cmake looks in the same places.
  for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" "${CUDA_HOME:-/nowhere}/bin/nvcc" \
              "${CUDA_PATH:-/nowhere}/bin/nvcc" /usr/local/cuda/bin/nvcc; do
    [[ -n "$nvcc" && -x "$nvcc" ]] && exit 0
  done
  toolkit=$root/build/cuda-toolkit
  cmp --silent "$root/tools/requirements-cuda.txt" "$toolkit/requirements-cuda.txt" && exit 0
  if [[ "$(uname -sm)" != "Linux x86_64" ]]; then
    echo "tools/setup.sh: no nvcc here, and none to install for $(uname -sm): CUDA code is not compiled"
    exit 0
  fi
  python3 -m pip --version >/dev/null 2>&1 || wanted=(python3-pip)
fi

# These are optional: without pip or a network one rung or one test is left out.
case "$1" in
  cute) folder=cutlass list=requirements-cute.txt words="CuTe's headers" without="rung 34 of the ladder is left out" ;;
  disassembler) folder=disassembler list=requirements-disassembler.txt words="cuobjdump and nvdisasm"
                without="no test looks at machine code" ;;
esac
if [[ -n "${folder:-}" ]]; then
  cmp --silent "$root/tools/$list" "$root/build/$folder/$list" && exit 0
  if ! python3 -m pip --version >/dev/null 2>&1; then
    echo "tools/setup.sh: no pip for python3, so not $words: $without"
    exit 0
  fi
fi

is_installed() { [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]; }

# The package of clang's runtime carries the version in its name, which differs between distributions.
clang_runtime() {
  local version
  version=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]\+\)$/\1/p' | head -n 1)
  [[ -n "$version" ]] && echo "libclang-rt-$version-dev"
}

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  missing_tools=()
  for tool in g++ cmake ninja; do command -v "$tool" >/dev/null || missing_tools+=("$tool"); done
  [[ ${#missing_tools[@]} -eq 0 ]] && exit 0
  echo "tools/setup.sh: this is neither Debian nor Ubuntu; please install: ${missing_tools[*]}" \
       "and the libraries that docs/dependencies.md lists" >&2
  exit 1
fi

missing=()
for package in "${wanted[@]}"; do is_installed "$package" || missing+=("$package"); done
if [[ "$1" == test ]] && ! compgen -G '/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a' >/dev/null; then
  missing+=("CLANG_RUNTIME")
fi
install_nvcc() {
  echo "tools/setup.sh: installing nvcc into build/cuda-toolkit"
  # The folder gets its name when it is complete; the next attempt throws away a partial one.
  rm -rf "$toolkit" "$toolkit.part"
  if ! python3 -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
       --target "$toolkit.part" --requirement "$root/tools/requirements-cuda.txt" 2>"$toolkit.log"; then
    cat "$toolkit.log" >&2
    echo "tools/setup.sh: nvcc could not be installed; FOVEA_NO_SETUP=1 does without" >&2
    exit 1
  fi
  # nvcc and CMake look for these names, which the packages lack.
  ln -s lib "$toolkit.part/nvidia/cu13/lib64"
  ln -s libcudart.so.13 "$toolkit.part/nvidia/cu13/lib/libcudart.so"
  cp "$root/tools/requirements-cuda.txt" "$toolkit.part/"
  mv "$toolkit.part" "$toolkit"
  exit 0
}

install_optional() {
  local into=$root/build/$folder
  echo "tools/setup.sh: installing $words into build/$folder"
  rm -rf "$into" "$into.part"
  mkdir -p "$root/build"
  if ! python3 -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps --require-hashes \
       --only-binary :all: --target "$into.part" --requirement "$root/tools/$list" 2>"$into.log"; then
    cat "$into.log" >&2
    echo "tools/setup.sh: $words could not be installed; $without" >&2
    rm -rf "$into.part"
    return
  fi
  cp "$root/tools/$list" "$into.part/"
  mv "$into.part" "$into"
}

# install_venv FOLDER WORDS LISTS: a virtual environment in build/FOLDER with the packages of the lists in tools/; messages say WORDS.
install_venv() {
  local venv=$root/build/$1 words=$2 list wanted=$root/build/$1.txt
  shift 2
  mkdir -p "$root/build"
  for list in "$@"; do cat "$root/tools/$list"; done >"$wanted"
  cmp --silent "$wanted" "$venv/requirements.txt" && return
  echo "tools/setup.sh: installing $words into ${venv#"$root/"}"
  rm -rf "$venv"
  if ! { python3 -m venv "$venv" &&
         "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps --only-binary :all: \
           --requirement "$wanted"; } >"$venv.log" 2>&1; then
    cat "$venv.log" >&2
    echo "tools/setup.sh: $words could not be installed" >&2
    exit 1
  fi
  cp "$wanted" "$venv/requirements.txt"  # last: the list in the folder marks it as complete
}

install_from_pypi() {
  case "$1" in
    cuda) install_nvcc ;;
    cute|disassembler) install_optional ;;
    python) install_venv venv "PyTorch, JAX and transformers" requirements-python.txt ;;
    report) install_venv report-venv "Plotly and Jinja2" requirements-report.txt ;;
    report-test) install_venv report-test-venv "Plotly, Jinja2 and Selenium" requirements-report.txt requirements-report-test.txt ;;
  esac
}

if [[ ${#missing[@]} -eq 0 ]]; then
  install_from_pypi "$1"
  exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "tools/setup.sh: neither root nor sudo; please have these installed: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

echo "tools/setup.sh: installing ${missing[*]/CLANG_RUNTIME/the runtime of clang}"
# One at a time: apt-get refuses where another one runs.
mkdir -p "$root/build"
exec 9>"$root/build/.apt-lock"
flock 9
log=$(mktemp)
trap 'rm -f "$log"' EXIT
quietly() {
  if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1; then
    cat "$log" >&2
    echo "tools/setup.sh: failed: $*" >&2
    exit 1
  fi
}
quietly apt-get update -qq
for i in "${!missing[@]}"; do
  if [[ "${missing[$i]}" == CLANG_RUNTIME ]]; then missing[i]=$(clang_runtime); fi
done
quietly apt-get install -y -qq --no-install-recommends "${missing[@]}"
install_from_pypi "$1"
