#!/usr/bin/env bash
# Runs each fuzz target of a build tree (preset fuzz) for a number of inputs.
#
#   tools/fuzz.sh build/fuzz 20000
#
# Corpora stay in BUILD/corpus; an input that breaks a target is written to BUILD/crashes and the exit status is 1.
set -euo pipefail

build=${1:?build tree} runs=${2:?number of inputs}
crashes=$build/crashes
mkdir -p "$crashes"

fuzz() {  # name of target, further options
  local name=$1 corpus=$build/corpus/${1#fuzz_} log=$build/$1.log
  shift
  mkdir -p "$corpus"
  if ! "$build/bin/$name" -runs="$runs" -len_control=0 -artifact_prefix="$crashes/" -print_final_stats=1 "$@" \
       "$corpus" >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    echo "$name: FAILED; the input is in $crashes" >&2
    return 1
  fi
  echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, none broke it"
}

if [[ -x $build/bin/fuzz_io_seeds ]]; then "$build/bin/fuzz_io_seeds" "$build/corpus" >/dev/null; fi
fuzz fuzz_problem -max_len=512
if [[ -x $build/bin/fuzz_expr ]]; then fuzz fuzz_expr -max_len=512 -dict="$(dirname "$0")/../tests/fuzz/expr.dict"; fi
for target in fuzz_npy fuzz_safetensors; do
  if [[ -x $build/bin/$target ]]; then fuzz "$target" -max_len=4096 -malloc_limit_mb=16; fi
done
