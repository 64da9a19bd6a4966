#!/usr/bin/env bash
# Generates stillhouse/v1/*_pb2.py and *_pb2_grpc.py from the wire contract. Needs Python's grpcio-tools.
#   client/python/generate.sh            then: pip install client/python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
protos=../../proto
python=${PYTHON:-python3}
"$python" -c 'import grpc_tools' 2>/dev/null || {
  echo "generate.sh: $python has no grpc_tools; pip install grpcio-tools, or set PYTHON" >&2
  exit 1
}
mkdir -p stillhouse/v1
"$python" -m grpc_tools.protoc -I "$protos" --python_out=. --grpc_python_out=. "$protos"/stillhouse/v1/*.proto
touch stillhouse/v1/__init__.py
