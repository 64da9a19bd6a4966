#!/usr/bin/env bash
# Makes a local stand-in for a public Debian 12 base image from Debian's own packages, so that the Dockerfile can be
# really built by buildah on a machine that reaches a package mirror but no container registry.
#   deploy/local_base_image.sh [TAG...]      default: docker.io/library/debian:bookworm-slim
# The package sources and certificates of this machine are laid into it, so that apt-get and pip work inside.
set -euo pipefail
tags=("$@")
[ ${#tags[@]} -gt 0 ] || tags=(docker.io/library/debian:bookworm-slim)
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
missing=()
for package in buildah debootstrap; do command -v $package >/dev/null || missing+=($package); done
if [ ${#missing[@]} -gt 0 ]; then
  as_root apt-get update -qq
  DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# The mirror that this machine itself uses.
mirror=$(apt-get --print-uris -qq download hostname | sed "s/^'//; s#/pool/.*##")
[ -n "$mirror" ] || { echo "local_base_image.sh: no package mirror known; run apt-get update first" >&2; exit 1; }

work=$(mktemp -d)
trap 'as_root rm -rf "$work"' EXIT
as_root debootstrap --no-check-gpg --variant=minbase --include=ca-certificates bookworm "$work/rootfs" "$mirror" \
  >"$work/debootstrap.log" 2>&1 || { tail -n 5 "$work/debootstrap.log" >&2; exit 1; }
as_root rm -f "$work/rootfs/etc/apt/sources.list"
for folder in sources.list.d apt.conf.d; do as_root cp -r "/etc/apt/$folder" "$work/rootfs/etc/apt/"; done
[ ! -f /etc/apt/sources.list ] || as_root cp /etc/apt/sources.list "$work/rootfs/etc/apt/"
# Hooks of desktop tools that the image does not have.
as_root rm -f "$work"/rootfs/etc/apt/apt.conf.d/*{packagekit,appstream}*
for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
  [ ! -f "$file" ] || as_root install -D "$file" "$work/rootfs$file"
done

container=$(buildah from scratch)
buildah add -q "$container" "$work/rootfs" / >/dev/null
for tag in "${tags[@]}"; do
  buildah commit -q "$container" "$tag" >/dev/null
  echo "$tag"
done
buildah rm "$container" >/dev/null
