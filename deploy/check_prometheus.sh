#!/usr/bin/env bash
# Checks the Prometheus rules and the Grafana dashboard against the real thing: promtool reads the files and tests alerts, then
# a live Prometheus scrapes a live server (loopback, free ports) that has just built a memory and answered questions, and every
# expression is asked.
#   deploy/check_prometheus.sh [--static]     --static: promtool and JSON only
# Needs a built server (BUILD, default build/cpu) and the default model; installs Debian's prometheus where it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
bin=${BUILD:-build/cpu}/bin

command -v promtool >/dev/null || {
  as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
  as_root apt-get update -qq
  # Only the programs: the service that comes with them is not started.
  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 as_root apt-get install -y -qq --no-install-recommends prometheus >/dev/null
}
promtool check rules deploy/prometheus/rules.yml
promtool test rules deploy/prometheus/rules_test.yml
promtool check config deploy/prometheus/prometheus.yml
python3 -c 'import json; json.load(open("deploy/grafana/stillhouse.json"))'
[ "${1:-}" != --static ] || exit 0

model=${STILLHOUSE_MODEL:-$(deploy/get_model.sh)}
work=$(mktemp -d "${TMPDIR:-/tmp}/stillhouse-prometheus.XXXXXX")
server=
prometheus=
finish() {
  status=$?
  trap - EXIT
  for process in $prometheus $server; do
    kill "$process" 2>/dev/null || true
    wait "$process" 2>/dev/null || true
  done
  [ $status -eq 0 ] || tail -n 15 "$work"/*.log >&2 || true
  rm -rf "$work"
  exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

"$bin/stillhouse-server" --model "$model" --store "$work/store" --address 127.0.0.1:0 --metrics-address 127.0.0.1:0 \
  --metrics-tenant default >"$work/server.log" 2>&1 &
server=$!
for _ in $(seq 300); do
  grep -q '^stillhouse listening on ' "$work/server.log" && break
  kill -0 $server
  sleep 0.2
done
ready=$(grep -m1 '^stillhouse listening on ' "$work/server.log")
STILLHOUSE_ADDRESS=$(sed -E 's/^stillhouse listening on ([^ ,]+).*/\1/' <<<"$ready")
metrics=$(sed -nE 's/.*metrics on (http[^ ,]+).*/\1/p' <<<"$ready")
target=$(sed -E 's#^http://([^/]+)/.*#\1#' <<<"$metrics")
export STILLHOUSE_ADDRESS
unset STILLHOUSE_KEY

sed -e "s/stillhouse:9464/$target/" -e 's/interval: 10s/interval: 1s/' -e "s#- rules.yml#- $root/deploy/prometheus/rules.yml#" \
  deploy/prometheus/prometheus.yml >"$work/prometheus.yml"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/tsdb" --web.listen-address="127.0.0.1:$port" \
  --log.level=warn >"$work/prometheus.log" 2>&1 &
prometheus=$!
url=http://127.0.0.1:$port
for _ in $(seq 100); do
  curl -fs "$url/-/ready" >/dev/null && break
  kill -0 $prometheus
  sleep 0.2
done

# Traffic between scrapes, so that every rate has two samples to stand on.
head -c 3000 LICENSE >"$work/document.txt"
"$bin/stillhouse" -q corpus upload --id terms "$work/document.txt"
for round in 1 2; do
  sleep 3
  "$bin/stillhouse" -q cache build terms --id "memory-$round" --method attention-matching --ratio 4 \
    --conversations 10 --no-report >/dev/null
  "$bin/stillhouse" -q ask --cache "terms/memory-$round" --max-tokens 8 "What is a contributor?" "Who is liable?" >/dev/null
  "$bin/stillhouse" -q ask --no-cache --max-tokens 8 "Hello" >/dev/null
done
sleep 3
python3 deploy/check_expressions.py "$url" "$metrics"
