#!/usr/bin/env bash
# Installs what a Debian 12 or Ubuntu 24.04 machine lacks to build and test Stillhouse. Safe to run again.
#   tests/install_packages.sh            build and test tools
#   tests/install_packages.sh --runtime  only the shared libraries that the installed programs need
set -euo pipefail

build=(g++ cmake ninja-build ccache mold git pkg-config ca-certificates curl python3 python3-pip python3-venv unzip
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev prometheus-cpp-dev libmicrohttpd-dev
  libsqlite3-dev libpcre2-dev libutf8proc-dev nlohmann-json3-dev libcli11-dev libssl-dev
  libgtest-dev libgmock-dev)
runtime=(libgrpc++1.51 libprotobuf32 libsqlite3-0 libpcre2-8-0 libssl3 ca-certificates libprometheus-cpp-core1.0
  libmicrohttpd12)
[ "${1:-}" = --runtime ] && wanted=("${runtime[@]}") || wanted=("${build[@]}")

missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
export DEBIAN_FRONTEND=noninteractive
echo "installing: ${missing[*]}"
as_root apt-get update -qq
as_root apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
