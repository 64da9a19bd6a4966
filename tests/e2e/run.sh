#!/usr/bin/env bash
# Runs one end-to-end suite:  tests/e2e/run.sh query_test [TestCase.test_name]
# STILLHOUSE_BUILD names the build folder (default build/cpu); python packages come from .venv (tests/run.sh makes it).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
export STILLHOUSE_BUILD=${STILLHOUSE_BUILD:-$root/build/cpu}
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
# Stubs are made from the wire contract itself, once per contract.
stubs=$STILLHOUSE_BUILD/e2e_stubs/$(cat "$root"/proto/stillhouse/v1/*.proto | sha256sum | cut -c1-16)
if [ ! -f "$stubs/done" ]; then
  mkdir -p "$stubs"
  "$python" -m grpc_tools.protoc -I "$root/proto" --python_out="$stubs" --grpc_python_out="$stubs" \
    "$root"/proto/stillhouse/v1/*.proto
  touch "$stubs/done"
fi
suite=$1; shift
cd "$here"
PYTHONPATH=$stubs:$here exec "$python" -W error::ResourceWarning -m unittest -v "$suite${1:+.$1}"
