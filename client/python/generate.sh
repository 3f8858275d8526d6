#!/usr/bin/env bash
# Makes the Python clients of vmoved and vbridged from their OpenAPI descriptions: generate.sh FOLDER
# Each is a package that pip installs: pip install FOLDER/vmoved-client FOLDER/vbridged-client
# `generate.sh --generator-only` installs only what makes them.
# The generator is installed into a virtual environment below .cache/, at the version with which the clients were tested.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=$(cd -- "$here/../.." && pwd)
venv=${VMOVE_CACHE:-$root/.cache}/python
folder=${1:?where to: generate.sh FOLDER}

# Its programs name the folder that they were installed into: they do not run once it was moved. `wheel` makes packages of the clients.
if ! "$venv/bin/openapi-python-client" --version >/dev/null 2>&1 || ! "$venv/bin/python3" -c 'import wheel' 2>/dev/null; then
    python3 -m venv --clear "$venv"
    for try in 1 2 3; do
        "$venv/bin/pip" -q --retries 5 install openapi-python-client==0.29.1 httpx==0.28.1 ruff==0.17.6 wheel==0.45.1 && break
        [ "$try" -lt 3 ] || exit 1
        sleep 5
    done
fi
[ "$folder" != --generator-only ] || exit 0
mkdir -p "$folder"
for name in vmoved vbridged; do
    case $name in
        vmoved) description=$root/docs/openapi.json ;;
        vbridged) description=$root/docs/vbridged-openapi.json ;;
    esac
    printf 'project_name_override: %s-client\npackage_name_override: %s_client\n' "$name" "$name" >"$folder/$name.yaml"
    rm -rf "${folder:?}/$name-client"
    # It calls ruff to tidy up what it writes. What it cannot make of streams is in follow.py.
    PATH=$venv/bin:$PATH "$venv/bin/openapi-python-client" generate --meta setup --config "$folder/$name.yaml" \
        --path "$description" --output-path "$folder/$name-client"
    rm "$folder/$name.yaml"
done
cp "$here/follow.py" "$folder/vmoved-client/vmoved_client/follow.py"
