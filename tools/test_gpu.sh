#!/usr/bin/env bash
# Runs every test that needs a GPU and prints one table of the results.
#
#   tools/test_gpu.sh [DIR] [--problems N] [--jobs N] [--quick] [--logs DIR]
#
# DIR is a build tree (build/release), or any folder that holds test_conformance, test_gpu, test_ladder_gpu, test_ptx,
# test_ptx_sm75, test_ptx_sm90 and libfovea.so.0: a machine with a GPU needs neither compiler nor sources, only a driver, and
# compute-sanitizer of the CUDA toolkit (PATH, CUDA_HOME, /usr/local/cuda).
#
#   --problems N   random problems, each through every CUDA backend that can do it (default 8000)
#   --jobs N       programs at a time (default: one a processor)
#   --quick        without compute-sanitizer
#   --logs DIR     where the programs' output goes (default: DIR/gpu-logs)
#
# FOVEA_TEST_BACKEND=cuda_simt restricts all of it to one backend. Exit status: 0 when nothing failed. What cannot run
# here (no GPU, no second GPU, no sanitizer) is named and counted as skipped.
set -euo pipefail

directory=build/release problems=8000 jobs=$(nproc) quick=false logs=
usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; }
while [[ $# -gt 0 ]]; do
  case $1 in
    --problems) problems=$2; shift ;;
    --jobs) jobs=$2; shift ;;
    --logs) logs=$2; shift ;;
    --quick) quick=true ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "test_gpu.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
    *) directory=$1 ;;
  esac
  shift
done
bin=$directory lib=$directory
if [[ -d $directory/bin ]]; then bin=$directory/bin lib=$directory/lib; fi
for program in test_conformance test_gpu test_ladder_gpu test_ptx test_ptx_sm75 test_ptx_sm90; do
  if [[ ! -x $bin/$program ]]; then
    echo "test_gpu.sh: no $program in $bin; build with -DFOVEA_CUDA=ON, or name the folder that holds it" >&2
    exit 2
  fi
done
export LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export FOVEA_TEST_BACKEND=${FOVEA_TEST_BACKEND:-cuda}
export FOVEA_TEST_STEPS=${FOVEA_TEST_STEPS:-1000}  # of each server of the soak
logs=${logs:-$directory/gpu-logs}
rm -rf "$logs"
mkdir -p "$logs"

sanitizer=
for candidate in "$(command -v compute-sanitizer || true)" "${CUDA_HOME:-/usr/local/cuda}"/bin/compute-sanitizer; do
  if [[ -z $sanitizer && -x $candidate ]]; then sanitizer=$candidate; fi
done

gpus=$({ nvidia-smi -L 2> /dev/null || true; } | grep -c '^GPU' || true)
why_no_sanitizer=
if $quick; then
  why_no_sanitizer="--quick"
elif [[ -z $sanitizer ]]; then
  why_no_sanitizer="no compute-sanitizer on this machine"
elif ((gpus == 0)); then
  why_no_sanitizer="no GPU on this machine"
fi

# Seconds that a program may take. The limit ends a kernel that hangs; the program then prints what it was running.
limit=420
rows=()  # names of the table's rows, in order
# start ROW SHARD COMMAND...: in the background, as soon as fewer than $jobs run
start() {
  local row=$1 shard=$2
  shift 2
  if [[ " ${rows[*]-} " != *" $row "* ]]; then rows+=("$row"); fi
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n || true; done
  (
    begin=$EPOCHREALTIME status=0
    timeout --kill-after=10 $limit "$@" > "$logs/$row.$shard.log" 2>&1 || status=$?
    end=$EPOCHREALTIME
    echo "$status $(((${end/[.,]/} - ${begin/[.,]/}) / 1000))" > "$logs/$row.$shard.end"
  ) &
}

echo "GPU tests of $bin"
if ((gpus > 0)); then nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader; fi
begin_all=$SECONDS

# All at the same time, the longest first: the oracle on the host takes most of the time, and kernels of many programs beside
# each other expose races.
tools=(racecheck memcheck initcheck synccheck)
sharded() {  # ROW SHARDS COMMAND...
  local row=$1 shards=$2
  shift 2
  for ((shard = 0; shard < shards; ++shard)); do
    start "$row" "$shard" env GTEST_TOTAL_SHARDS="$shards" GTEST_SHARD_INDEX="$shard" "$@"
  done
}
start conformance.random 0 env FOVEA_TEST_PROBLEMS="$problems" FOVEA_TEST_THREADS=$(((jobs + 1) / 2)) \
  "$bin/test_conformance" '--gtest_filter=CudaRandomProblems.*'
start conformance.random_wide_heads 0 env FOVEA_TEST_PROBLEMS=$((problems / 8)) FOVEA_TEST_THREADS=$(((jobs + 3) / 4)) \
  "$bin/test_conformance" '--gtest_filter=CudaRandomWideHeads.*'
# compute-sanitizer over the covering set and merges, in shards, because it slows kernels by orders of magnitude, racecheck most. Each
# tensor has an allocation of its own, so that an access outside a tensor is outside all memory.
if [[ -z $why_no_sanitizer ]]; then
  for tool in "${tools[@]}"; do
    parts=$(((jobs + 3) / 4))
    if [[ $tool == racecheck ]]; then parts=$(((jobs + 1) / 2)); fi
    sharded "sanitizer.$tool" $parts env FOVEA_TEST_EXACT=1 "$sanitizer" --tool "$tool" --error-exitcode 86 \
      --print-limit 20 "$bin/test_conformance" '--gtest_filter=Set/CudaCover.*:*/Merge.*'
  done
fi
sharded runs 4 "$bin/test_gpu" '--gtest_filter=-Runs.AllocateNothing:Watchdog.*'
sharded watchdog 1 "$bin/test_gpu" '--gtest_filter=Watchdog.*'
sharded ladder 2 "$bin/test_ladder_gpu" '--gtest_filter=-LadderMemory.*'
if [[ -z $why_no_sanitizer ]]; then
  for tool in memcheck racecheck; do
    sharded "sanitizer.ladder_$tool" 4 "$sanitizer" --tool "$tool" --error-exitcode 86 --print-limit 20 \
      "$bin/test_ladder_gpu" '--gtest_filter=-LadderMemory.*'
  done
fi
# suite NAME SHARDS FILTER: suites of conformance. tests/conformance/CMakeLists.txt reads these lines, too.
suite() { sharded "conformance.$1" "$2" "$bin/test_conformance" "--gtest_filter=$3"; }
suite soak 12 '*/Soak.*'
suite splits 8 'Splits.*:*/BatchInvariance.*:*/CacheInvariance.*'
suite queries_of_values 4 'QueriesOfValues.*:ValuesInKeys.*'
suite queries_of_8_bits 4 'QueriesOf8Bits.*'
suite keys_of_8_bits 4 'KeysOf8Bits.*'
suite caches 2 'Caches.*'
suite append 2 'Append.*'
suite few_queries 4 'FewQueries.*:FewRows.*'
suite lists 4 'Lists.*'
suite shapes 4 '*/SequenceLengths.*:*/HeadSizes.*:*/ManyBlocks.*:*/Decode.*:Shapes.*'
suite features 4 '*/Features.*'
suite values 2 'Values.*:Maximum.*:*/HiddenKeys.*:AlibiReach.*'
suite chains 2 '*CudaChains*:*CudaLastWrites*:*CudaManyLastWrites*:*CudaFirstAlone*:*CudaManyFirstAlone*'
suite cover 2 'Set/CudaCover.*'
suite merge 1 '*/Merge.*'
suite dropout 1 'Dropout.*'
suite concurrency 1 'Concurrency.*'
suite harness 1 'CudaMemory.*'
suite expressions 4 'NamedGradients.*:SameAsArgument.*:InvalidPairs.*:EmptyRows.*:HiddenByExpression.*:GradientOfABias.*:SeenBlocks.*'
sharded ptx 1 "$bin/test_ptx"
sharded ptx_sm75 1 "$bin/test_ptx_sm75"
sharded ptx_sm90 1 "$bin/test_ptx_sm90"
wait
# One after the other, alone: these measure the free memory of the device.
sharded memory 1 "$bin/test_gpu" '--gtest_filter=Runs.AllocateNothing'
wait
sharded ladder_memory 1 "$bin/test_ladder_gpu" '--gtest_filter=LadderMemory.*'
wait

# A number of GoogleTest's output: number FILE REGULAR-EXPRESSION-WITH-ONE-GROUP, 0 when it says nothing.
number() { sed -nE "s/.*$2.*/\1/p" "$1" | tail -1 | grep . || echo 0; }

printf '\n%-26s %8s %8s %8s %8s %9s\n' '' tests passed skipped failed seconds
all_tests=0 all_passed=0 all_skipped=0 all_failed=0
failing=()
print_row() { printf '%-26s %8s %8s %8s %8s %9s\n' "$@"; }
for row in "${rows[@]}"; do
  tests=0 passed=0 skipped=0 failed=0 longest=0
  for log in "$logs/$row".*.log; do
    read -r status milliseconds < "${log%.log}.end"
    ran=$(number "$log" '^\[=+\] ([0-9]+) tests? from .* ran\.')
    ok=$(number "$log" '^\[  PASSED  \] ([0-9]+) tests?\.')
    left=$(number "$log" '^\[  SKIPPED \] ([0-9]+) tests?, listed below')
    bad=$(number "$log" '^\[  FAILED  \] ([0-9]+) tests?, listed below')
    if grep -q '\[  SKIPPED \] all tests of' "$log"; then
      left=$ran ok=0
    elif ((status != 0 && bad == 0)); then
      bad=1  # a crash, a time limit, or an error that only the sanitizer saw
      if ((ok > 0)); then ok=$((ok - 1)); else ran=$((ran + 1)); fi
    fi
    if ((bad > 0)); then failing+=("$log (status $status)"); fi
    tests=$((tests + ran)) passed=$((passed + ok)) skipped=$((skipped + left)) failed=$((failed + bad))
    if ((milliseconds > longest)); then longest=$milliseconds; fi
  done
  print_row "$row" $tests $passed $skipped $failed "$((longest / 1000)).$((longest % 1000 / 100))"
  all_tests=$((all_tests + tests)) all_passed=$((all_passed + passed))
  all_skipped=$((all_skipped + skipped)) all_failed=$((all_failed + failed))
done
if [[ -n $why_no_sanitizer ]]; then
  for tool in "${tools[@]}"; do
    print_row "sanitizer.$tool" 1 0 1 0 0
    all_tests=$((all_tests + 1)) all_skipped=$((all_skipped + 1))
  done
fi
print_row all $all_tests $all_passed $all_skipped $all_failed $((SECONDS - begin_all))

echo
sed -nE 's/^(seed [0-9]+: [0-9]+ random problems.*|cuda_[a-z0-9]+: [0-9]+ passes;.*)/\1/p' "$logs"/conformance.random.*.log
if ((all_skipped > 0)); then
  echo
  echo "Skipped, and why:"
  if [[ -n $why_no_sanitizer ]]; then echo "  sanitizer.*: $why_no_sanitizer"; fi
  # The reason stands on the line before the test's name.
  grep -hE -B1 '^\[  SKIPPED \] [A-Za-z0-9_/.]+ \(' "$logs"/*.log | grep -vE '^--' | paste -d'\t' - - | awk -F'\t' '
    { split($2, words, " "); names[$1] = names[$1] " " words[4]; ++count[$1] }
    END { for (reason in names) printf "  %s (%d):%s\n", reason, count[reason], names[reason] }' | fold -s -w 116 || true
  grep -hE '\[  SKIPPED \] all tests of' "$logs"/*.log | sort -u | sed 's/^/  /' || true
fi
if ((${#failing[@]} > 0)); then
  echo
  echo "Failed:"
  for log in "${failing[@]}"; do
    echo "  $log"
    grep -hE '^\[  FAILED  \] [A-Za-z0-9_/.]+|^========= (Error|Invalid|ERROR SUMMARY)|crashed|stopped while' "${log% (status*}" |
      sort -u | head -8 | sed 's/^/    /' || true
  done
fi
echo
echo "$all_passed passed, $all_failed failed, $all_skipped skipped"
((all_failed == 0))
