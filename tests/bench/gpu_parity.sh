#!/usr/bin/env bash
# The CUDA backend against the fp64 references, on a machine with an NVIDIA GPU: every op's tests (odd shapes, forward and
# gradient, poisoned outputs), the same under compute-sanitizer for small shapes, and the default model's golden runs.
#
#   tests/bench/gpu_parity.sh BUILD_DIR OUT_DIR [COMMIT]
#
# Needs BUILD_DIR/bin/{kernels_test,golden_test} of the cuda preset and $STILLHOUSE_MODEL; {model,engine,train,compact,corpus}_test
# beside them run too, all at the same time (nothing is timed), but for tests that ask the driver what it has given, which
# run alone; then the sanitizers. Writes OUT_DIR/parity.json and logs; fails if anything failed. SANITIZE=0 leaves
# compute-sanitizer out.
set -uo pipefail
bin=$1/bin
out=$2
commit=${3:-$(git -C "$(dirname "$0")" rev-parse HEAD 2>/dev/null || echo unknown)}
mkdir -p "$out"
export STILLHOUSE_TEST_DEVICE=cuda STILLHOUSE_TEST_SEED=${STILLHOUSE_TEST_SEED:-1}

alone='DeviceMemoryTest.TheBooks*:DeviceMemoryGrains.*:CudaMemory.IsTheDrivers'
programs=()
for name in kernels golden model engine train compact corpus; do
  [ -x "$bin/${name}_test" ] || continue
  programs+=("$name")
  (
    timeout 300 "$bin/${name}_test" --gtest_filter="-$alone" --gtest_output=json:"$out/$name.json" >"$out/$name.log" 2>&1
    echo "${name}_test: $?"
  ) &
done
wait
for name in kernels corpus; do
  [ -x "$bin/${name}_test" ] || continue
  programs+=("$name.alone")
  timeout 100 "$bin/${name}_test" --gtest_filter="$alone" --gtest_output=json:"$out/$name.alone.json" >"$out/$name.alone.log" 2>&1
  echo "${name}_test, alone: $?"
done

# Death tests start the program anew, and large products say nothing new about memory: small shapes of each family.
small='-*DeathTest*:CpuBackend*:ThreadPool*:Gemm*:*Fingerprint*:RopeFrequencies*:SoftmaxState*:UniformDraw*:HalfToFloat*:FloatTo*'
small+=':Linear.MatchesReferenceForEveryStorageType:Linear.InputGradientOfEveryStorageType:MatMul.*:Sample.Frequencies*'
small+=':Sample.MatchesNaive*:Sample.ExtremeSettings:DecomposeK.LargeProducts:Scan.LongRows:Cuda*'
if [ "${SANITIZE:-1}" = 1 ] && command -v compute-sanitizer >/dev/null; then
  # In shares: a sanitizer keeps one core busy. Races are looked for in the project's own kernels, not in cuBLAS's; but
  # racecheck makes products of bf16 by cuBLAS fault where it leaves them out, so that tests of these run with all in.
  shares=${SANITIZE_SHARES:-6}
  export STILLHOUSE_TEST_SMALL=1
  sanitize() { # LOG TOOL FILTER SHARES SHARE [OPTIONS]
    GTEST_TOTAL_SHARDS=$4 GTEST_SHARD_INDEX=$5 timeout "${SANITIZE_SECONDS:-500}" compute-sanitizer --tool "$2" "${@:6}" \
      --error-exitcode 99 --print-limit 10000 "$bin/kernels_test" --gtest_filter="$3" >"$out/$1.log" 2>&1
    code=$?
    echo "$code" >"$out/$1.code"
    echo "$1: $code"
  }
  products='*Fused*bf16*:LinearPlan.*:QkvRope.*'
  for share in $(seq 0 $((shares - 1))); do
    sanitize "memcheck.$share" memcheck "$small" "$shares" "$share" &
    sanitize "racecheck.$share" racecheck "$small:$products" "$shares" "$share" --kernel-name kernel_substring=stillhouse &
  done
  for share in 0 1 2; do sanitize "racecheck.products.$share" racecheck "$products" 3 "$share" & done
fi
wait

python3 - "$out" "$commit" "tests/bench/gpu_parity.sh BUILD OUT" "${programs[@]}" <<'PYTHON'
import datetime, glob, json, os, re, subprocess, sys

out, commit, command, *programs = sys.argv[1:]
gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                     text=True).stdout.strip().splitlines()
rows, failed = [], 0

def row(name, ours, goal, unit, met):
    global failed
    failed += not met
    rows.append({"name": name, "ours": ours, "peer": None, "peer_name": None, "floor": None, "unit": unit, "ratio": None,
                 "goal": goal, "met": met})

for program in programs:
    path = os.path.join(out, program + ".json")
    if not os.path.exists(path):
        row(program, None, None, "did not finish", False)
        continue
    for suite in json.load(open(path))["testsuites"]:
        run = [t for t in suite["testsuite"] if t.get("result") != "SKIPPED"]
        bad = [t["name"] for t in run if t.get("failures")]
        if run:
            row(f"{program}: {suite['name']}" + (f" (failed: {', '.join(bad)})" if bad else ""), len(run) - len(bad), len(run),
                "tests passed", not bad)
        for test in run:
            for key, value in test.items():
                if program == "golden" and key.startswith("relative_error_"):
                    row(f"golden: logits of prompt {key[15:]}", float(value), 1e-4, "relative error", float(value) <= 1e-4)
# Racecheck does not follow barriers in shared memory that order copies and warps of different roles, nor the barrier of a
# cluster: what it has reported of files that rest on these, and was looked at, is told apart; a report of any other file
# counts. Those of cuBLAS's kernels are not ours.
ORDERED = {"attention_landing.cuh", "attention_stages.cuh", "attention_wgmma.cu", "bulk_copy.cuh", "scan_pipeline.cu", "scan_resident.cu"}
for tool in ("memcheck", "racecheck"):
    passed, shares, unfinished, others, reports = 0, 0, 0, 0, []
    for path in sorted(glob.glob(os.path.join(out, tool + ".*.log"))):
        text = open(path, errors="replace").read()
        shares += 1
        done = re.findall(r"\[  PASSED  \] (\d+) tests?", text)
        passed += int(done[-1]) if done else 0
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
        unfinished += not (done and summary)
        races = re.split(r"^=+ *$", text, flags=re.MULTILINE)
        reports += [set(re.findall(r" in (\w+\.cuh?):\d+", race)) for race in races
                    if "Race reported" in race and "stillhouse::" in race]
        others += int(summary[-1]) if summary and tool == "memcheck" else 0
    apart = [files for files in reports if files & ORDERED]
    others += len(reports) - len(apart)
    if shares:
        what = f"compute-sanitizer {tool} on the kernel tests, small shapes ({passed} tests; {unfinished} of {shares} shares cut off"
        if apart:
            what += f"; {len(apart)} reports of barriers that it does not follow, in {', '.join(sorted(set.union(*apart) & ORDERED))}"
        row(what + ")", others, 0, "errors", others == 0 and unfinished == 0)
json.dump({"commit": commit, "date": datetime.date.today().isoformat(), "machine": gpu[0] if gpu else "no GPU",
           "command": command, "rows": rows}, open(os.path.join(out, "parity.json"), "w"), indent=1)
print(f"{len(rows)} rows, {failed} not met")
for r in rows:
    if not r["met"]:
        print("NOT MET:", r["name"], r["ours"], "of", r["goal"])
sys.exit(1 if failed else 0)
PYTHON
