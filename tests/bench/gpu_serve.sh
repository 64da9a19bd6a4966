#!/usr/bin/env bash
# The whole product on a GPU: a server with --device cuda builds memories of a document and answers from them.
#
#   tests/bench/gpu_serve.sh BUILD_DIR OUT_DIR [SERVER_FLAG...]      ($STILLHOUSE_MODEL names the model)
#
# METRICS_ADDRESS= goes without metrics. Leaves serve.log (what was built, asked and answered), the server's log and its metrics in OUT_DIR.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bin=$1/bin out=$2
shift 2
mkdir -p "$out"
document=${DOCUMENT:-$root/LICENSE}
questions=${QUESTIONS:-$root/deploy/questions/apache-2.0.txt}
work=$(mktemp -d "${TMPDIR:-/tmp}/stillhouse-gpu.XXXXXX")
"$bin/stillhouse-server" --device cuda --model "$STILLHOUSE_MODEL" --store "$work/store" --address 127.0.0.1:0 \
  --metrics-address "${METRICS_ADDRESS-127.0.0.1:0}" "$@" >"$out/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null; rm -rf "$work"' EXIT
for _ in $(seq 300); do
  grep -q '^stillhouse listening on ' "$out/server.log" && break
  kill -0 "$server" 2>/dev/null || { cat "$out/server.log"; exit 1; }
  sleep 0.1
done
ready=$(grep -m1 '^stillhouse listening on ' "$out/server.log") || exit 1
export STILLHOUSE_ADDRESS=$(sed -E 's/^stillhouse listening on ([^ ,]+).*/\1/' <<<"$ready")
metrics=$(sed -nE 's/.*metrics on (http[^ ,]+).*/\1/p' <<<"$ready")
failed=0
step() {
  local began=$EPOCHREALTIME
  echo "\$ stillhouse $*"
  timeout "${STEP_SECONDS:-200}" "$bin/stillhouse" "$@" || failed=1
  printf '  (%.2f s)\n' "$(echo "$EPOCHREALTIME - $began" | bc -l 2>/dev/null || python3 -c "print($EPOCHREALTIME - $began)")"
}
{
  echo "$ready"
  step corpus upload --quiet --id document "$document"
  step ask --no-cache --max-tokens 32 "What is a licence?"
  step --quiet cache build document --id full --method full --no-report
  step ask --cache document/full --max-tokens 48 "Who may use a trademark of the licensor?"
  step --quiet cache build document --id matched --method attention-matching --profile quick --ratio 10 \
    --eval-questions "$questions"
  step ask --cache document/matched --max-tokens 48 "Who may use a trademark of the licensor?"
  step --quiet cache build document --id cartridge --method cartridge --profile quick --ratio 10 --eval-questions "$questions"
  step --json cache show document/cartridge
  step ask --cache document/cartridge --max-tokens 48 "Who may use a trademark of the licensor?"
  step --json ask --cache document/cartridge --max-tokens 64 "What must a redistribution carry?"
  if [ -n "$metrics" ]; then
    python3 -c 'import sys, urllib.request; sys.stdout.buffer.write(urllib.request.urlopen(sys.argv[1]).read())' "$metrics" \
      >"$out/metrics.txt"
    grep -E '^stillhouse_(device_memory|weights|kv_allocated|build_info)' "$out/metrics.txt"
  fi
  nvidia-smi --query-gpu=memory.used,memory.free --format=csv,noheader
  [ $failed = 0 ]
} 2>&1 | tee "$out/serve.log"
exit "${PIPESTATUS[0]}"
