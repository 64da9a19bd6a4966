#!/usr/bin/env bash
# Really builds the Dockerfile and runs what it made: the server starts as a user without rights, reports its health,
# takes a document, builds a memory of it and answers a question.
#   deploy/check_image.sh [--keep]
# With Docker where its engine answers. Elsewhere with buildah; where no registry can be reached, the public base image
# is then stood in for by one made from Debian's packages (deploy/local_base_image.sh). The default model is mounted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
keep=false
[ "${1:-}" != --keep ] || keep=true
tag=stillhouse:check
base=docker.io/library/debian:bookworm-slim

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
port_is_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
for port in 7070 9464; do
  port_is_free $port || { echo "check_image.sh: port $port is taken; end what listens there" >&2; exit 1; }
done

model=${STILLHOUSE_MODEL:-$(deploy/get_model.sh)}
work=$(mktemp -d "${TMPDIR:-/tmp}/stillhouse-image.XXXXXX")
mkdir "$work/models"
cp -L "$model" "$work/models/SmolLM2-135M-Instruct.Q4_1.gguf"
printf '%s\n\n%s\n' "The harbour of Vesterhavn has four cranes. The tallest crane is painted green and is called Astrid." \
  "Ships pay forty crowns a night. The harbour master is Inga Holm, and her office opens at six." >"$work/document.txt"
chmod -R a+rX "$work"

engine=buildah
if command -v docker >/dev/null && docker info >/dev/null 2>&1; then engine=docker; fi
echo "engine: $engine"
container=
runner=
finish() {
  status=$?
  trap - EXIT
  [ $status -eq 0 ] || { echo "check_image.sh: failed; the server said:" >&2; logs 2>&1 | tail -n 20 >&2; }
  if [ "$engine" = docker ]; then
    [ -z "$container" ] || docker rm -f "$container" >/dev/null 2>&1 || true
    [ "$keep" = true ] || docker rmi "$tag" >/dev/null 2>&1 || true
  else
    # The whole group: buildah does not pass signals on.
    [ -z "$runner" ] || { kill -- "-$runner" 2>/dev/null; wait "$runner" 2>/dev/null; } || true
    [ -z "$container" ] || buildah rm "$container" >/dev/null 2>&1 || true
    [ "$keep" = true ] || buildah rmi "$tag" >/dev/null 2>&1 || true
  fi
  rm -rf "$work"
  exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

began=$SECONDS
if [ "$engine" = docker ]; then
  logs() { [ -z "$container" ] || docker logs "$container"; }
  inside() { docker exec "$container" "$@"; }
  docker build -t "$tag" ${JOBS:+--build-arg JOBS=$JOBS} .
  container=$(docker run -d -v "$work/models:/models:ro" -v "$work/document.txt:/document.txt:ro" "$tag" --insecure-listen)
  size=$(docker images --format '{{.Size}}' "$tag")
else
  logs() { [ ! -e "$work/server.log" ] || cat "$work/server.log"; }
  command -v buildah >/dev/null || {
    as_root apt-get update -qq
    DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -qq --no-install-recommends buildah >/dev/null
  }
  export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
  if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    timeout 60 buildah pull -q "$base" >/dev/null 2>&1 || deploy/local_base_image.sh "$base"
  fi
  buildah bud --pull-never --network host -t "$tag" ${JOBS:+--build-arg JOBS=$JOBS} .
  container=$(buildah from --pull-never "$tag")
  size=$(buildah images --format '{{.Size}}' "$tag")
  # What the image says it runs, with the arguments that a user would give.
  read -r -a entrypoint <<<"$(buildah inspect --format '{{join .OCIv1.Config.Entrypoint " "}}' "$container" 2>/dev/null ||
    buildah inspect --format '{{.OCIv1.Config.Entrypoint}}' "$container" | tr -d '[]')"
  mounts=(-v "$work/models:/models:ro" -v "$work/document.txt:/document.txt:ro")
  inside() { buildah run --network host "${mounts[@]}" "$container" -- "$@" </dev/null; }
  setsid buildah run --network host "${mounts[@]}" "$container" -- "${entrypoint[@]}" --insecure-listen \
    >"$work/server.log" 2>&1 &
  runner=$!
fi
echo "built in $((SECONDS - began)) s"
echo "image: $size"

user=$(inside id -u)
[ "$user" != 0 ] || { echo "check_image.sh: the image runs as root" >&2; exit 1; }
echo "runs as user $user"

healthy=false
for _ in $(seq 120); do
  if inside stillhouse --quiet --attempts 1 --timeout 4 server health >/dev/null 2>&1; then healthy=true; break; fi
  [ -z "$runner" ] || kill -0 "$runner" 2>/dev/null || { echo "check_image.sh: the server ended" >&2; exit 1; }
  sleep 1
done
[ "$healthy" = true ] || { echo "check_image.sh: not healthy after two minutes" >&2; exit 1; }
echo "healthy"

inside stillhouse --quiet corpus upload --id harbour /document.txt
inside stillhouse --quiet cache build harbour --id memory --method attention-matching --ratio 2 --conversations 8 --no-report
answer=$(inside stillhouse --quiet ask --cache harbour/memory --max-tokens 32 "What is the tallest crane called?")
echo "answer: $answer"
[ -n "$answer" ] || { echo "check_image.sh: no answer" >&2; exit 1; }
echo "image ok"
