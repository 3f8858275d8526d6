#!/usr/bin/env bash
# Makes the Python client of vbridged from its OpenAPI description: generate.sh FOLDER
# `generate.sh --generator-only` installs only what makes it.
# The generator is installed into a virtual environment below .cache/, at the version with which the client was tested.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=$(cd -- "$here/../../.." && pwd)
venv=${VMOVE_CACHE:-$root/.cache}/python
folder=${1:?where to: generate.sh FOLDER}

# Its programs name the folder that they were installed into: they do not run once it was moved.
if ! "$venv/bin/openapi-python-client" --version >/dev/null 2>&1; then
    python3 -m venv --clear "$venv"
    for try in 1 2 3; do
        "$venv/bin/pip" -q --retries 5 install openapi-python-client==0.29.1 httpx==0.28.1 ruff==0.17.6 && break
        [ "$try" -lt 3 ] || exit 1
        sleep 5
    done
fi
[ "$folder" != --generator-only ] || exit 0
rm -rf "$folder/vbridged_client"
mkdir -p "$folder"
# It calls ruff to tidy up what it writes.
PATH=$venv/bin:$PATH "$venv/bin/openapi-python-client" generate --meta none \
    --path "$root/docs/vbridged-openapi.json" --output-path "$folder/vbridged_client"
