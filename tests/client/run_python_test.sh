#!/usr/bin/env bash
# Runs a Python test with the interpreter that tests/run.sh set up; 77 (skipped) where there is none.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
for python in "${PYTHON:-}" "$root/.venv/bin/python" python3; do
  if [ -n "$python" ] && "$python" -c 'import grpc_tools' 2>/dev/null; then
    exec "$python" "$@"
  fi
done
echo "no Python with grpcio-tools"
exit 77
