#!/usr/bin/env bash
# From a fresh Debian 12 or Ubuntu 24.04 to answers from a trained memory of a document.
#   deploy/quickstart.sh [--document FILE] [--questions FILE] [--ratio N] [--keep]
#     --document FILE    a text of your own (default: the Apache licence that every Debian carries)
#     --questions FILE   questions about it, one per line: the first three are asked, all of them measure the memory
#     --ratio N          document tokens per slot of the memory (default 10)
#     --keep             leave the server running and say how to ask more
# Installs what is missing, builds, fetches the default model, starts a server on free loopback ports with a store of its
# own, uploads, builds, asks, and prints the comparison. Everything but the build folder and the model is removed again.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
document=/usr/share/common-licenses/Apache-2.0
questions=
ratio=10
keep=false
usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
while [ $# -gt 0 ]; do
  case $1 in
    --document) document=${2:?--document needs a file}; questions=${questions:-none}; shift 2 ;;
    --questions) questions=${2:?--questions needs a file}; shift 2 ;;
    --ratio) ratio=${2:?--ratio needs a number}; shift 2 ;;
    --keep) keep=true; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; echo "quickstart.sh: unknown argument $1" >&2; exit 2 ;;
  esac
done
[ -n "$questions" ] || questions=$root/deploy/questions/apache-2.0.txt
# A relative path is the caller's, not the source tree's.
document=$(realpath -m "$document")
[ "$questions" = none ] || questions=$(realpath -m "$questions")
[ -r "$document" ] || { echo "quickstart.sh: cannot read $document" >&2; exit 2; }
[ "$questions" = none ] || [ -r "$questions" ] || { echo "quickstart.sh: cannot read $questions" >&2; exit 2; }
cd "$root"

began=$SECONDS
step() { printf '\n== %s\n' "$*"; }

work=$(mktemp -d "${TMPDIR:-/tmp}/stillhouse-quickstart.XXXXXX")
server=
finish() {
  status=$?
  trap - EXIT INT TERM
  if [ "$keep" = true ] && [ $status -eq 0 ] && [ -n "$server" ]; then exit 0; fi
  if [ -n "$server" ]; then
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  if [ $status -ne 0 ] && [ -s "$work/server.log" ]; then
    echo "quickstart.sh: stopped early; the server's last words:" >&2
    tail -n 15 "$work/server.log" >&2
  fi
  rm -rf "$work"
  exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step "Tools and libraries"
tests/install_packages.sh
echo "ready"

step "Building (preset cpu)"
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
cmake --preset cpu >"$work/configure.log" 2>&1 || { tail -n 30 "$work/configure.log" >&2; exit 1; }
cmake --build --preset cpu -j "${JOBS:-$(nproc)}" --target stillhouse-server stillhouse
bin=$root/build/cpu/bin

step "Model"
model=${STILLHOUSE_MODEL:-$(deploy/get_model.sh)}
echo "$model"

step "Server"
# A session of its own, so that Ctrl-C here does not reach a server that is to be kept.
setsid "$bin/stillhouse-server" --model "$model" --store "$work/store" --address 127.0.0.1:0 \
  --metrics-address 127.0.0.1:0 >"$work/server.log" 2>&1 &
server=$!
for _ in $(seq 600); do
  grep -q '^stillhouse listening on ' "$work/server.log" && break
  kill -0 "$server" 2>/dev/null || { echo "quickstart.sh: the server did not start" >&2; exit 1; }
  sleep 0.2
done
ready=$(grep -m1 '^stillhouse listening on ' "$work/server.log") || {
  echo "quickstart.sh: the server was not ready after two minutes" >&2
  exit 1
}
echo "$ready"
address=$(sed -E 's/^stillhouse listening on ([^ ,]+).*/\1/' <<<"$ready")
metrics=$(sed -nE 's/.*metrics on (http[^ ,]+).*/\1/p' <<<"$ready")
export STILLHOUSE_ADDRESS=$address
unset STILLHOUSE_KEY
ask() { "$bin/stillhouse" "$@"; }

step "Uploading $document"
ask corpus upload --quiet --id document "$document"

step "Building a memory of it (cartridge, profile quick, ratio $ratio)"
report=()
[ "$questions" = none ] || report=(--eval-questions "$questions")
ask cache build document --id cartridge --method cartridge --profile quick --ratio "$ratio" "${report[@]}" |
  tee "$work/build.txt"
ask --json cache show document/cartridge >"$work/cartridge.json"
# The reference: every key and value of the document.
full=true
ask --quiet cache build document --id full --method full --no-report >/dev/null || full=false

if [ "$questions" = none ]; then
  printf '%s\n' "What is this document about?" "What are its most important points?" \
    "What does it say in its last part?" >"$work/ask.txt"
else
  { grep -v -e '^[[:space:]]*#' -e '^[[:space:]]*$' "$questions" || true; } | cut -f1 | head -n 3 >"$work/ask.txt"
fi

step "Asking"
# Loaded once before anything is timed.
ask --json ask --cache document/cartridge --max-tokens 1 "Hello" >/dev/null
ask --json ask --no-cache --max-tokens 64 --file "$work/ask.txt" >"$work/none.jsonl"
ask --json ask --no-cache --system-file "$document" --max-tokens 64 --file "$work/ask.txt" >"$work/prompt.jsonl" ||
  rm -f "$work/prompt.jsonl"
if [ "$full" = true ]; then
  ask --json ask --cache document/full --max-tokens 1 "Hello" >/dev/null
  ask --json ask --cache document/full --max-tokens 64 --file "$work/ask.txt" >"$work/full.jsonl"
fi
ask --json ask --cache document/cartridge --max-tokens 64 --file "$work/ask.txt" >"$work/cartridge.jsonl"
python3 deploy/quickstart_table.py "$work"

echo
echo "metrics: $metrics"
took=$((SECONDS - began))
echo "all of it took $((took / 60)) min $((took % 60)) s"
if [ "$keep" = true ]; then
  cat <<TEXT

The server goes on (process $server, store and log in $work). Ask it more:
  export STILLHOUSE_ADDRESS=$address
  $bin/stillhouse ask --cache document/cartridge "Your question"
  $bin/stillhouse ask --cache document/cartridge --chat
Stop it:
  kill $server && rm -rf $work
TEXT
fi
