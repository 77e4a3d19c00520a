#!/usr/bin/env bash
# Download the packages of a rank as wheels for the image's Python, to build the image without a package index.
#
#   docker/wheels.sh                 fill wheels/ (about 250 MB), unless it is up to date
#   docker/wheels.sh FILE FOLDER     then also what the requirements FILE needs besides, and pip, into FOLDER
#
# torch and torchvision come from PyTorch's index of CPU builds (docker/torch.sh); a CUDA build is refused.
set -euo pipefail
requirements=$(realpath "${1:-/dev/null}") folder=$(realpath -m "${2:-wheels}")
cd "$(dirname "$0")/.."

python=$(for each in ${PYTHON:-} .venv/bin/python python3; do "$each" -m pip --version >/dev/null 2>&1 && echo "$each" && break; done) || true
stamp=wheels/.ready
wanted=$(sha256sum <docker/packages.txt)
ready() { [[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; }

if ready; then
  echo "wheels: up to date"
  (($#)) || exit 0
fi
[[ $python ]] || { echo "wheels: no Python with pip was found. Install one, or run make venv first." >&2; exit 2; }
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux2014 manylinux_2_17 manylinux_2_5 manylinux1; do
  platforms+=(--platform "${tag}_$(uname -m)")
done
options=(--quiet --only-binary :all: --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none "${platforms[@]}")

if ! ready; then
  rm -rf wheels/.new
  download=(download --dest wheels/.new "${options[@]}")
  mkdir -p wheels/.new
  docker/torch.sh docker/packages.txt "$python" "${download[@]}"
  # pip prefers the wheels of the first command: 2.13.0+cpu is newer than 2.13.0, and of equal versions it takes the file.
  "$python" -m pip --disable-pip-version-check "${download[@]}" --find-links wheels/.new --requirement docker/packages.txt
  if compgen -G 'wheels/.new/nvidia*' >/dev/null; then
    rm -rf wheels/.new
    echo "wheels: pip found a CUDA build of torch only. Set TORCH_INDEX to an index of CPU builds that answers." >&2
    exit 2
  fi
  find wheels -name '*.whl' ! -path '*/.new/*' -delete
  mv wheels/.new/*.whl wheels/
  rmdir wheels/.new
  echo "$wanted" >"$stamp"
  echo "wheels: $(ls wheels/*.whl | wc -l) files, $(du -sh wheels | cut -f1)"
fi
(($#)) || exit 0

# The packages of the image keep their versions, because ranks are tested with them.
"$python" -m pip --disable-pip-version-check download --dest "$folder" "${options[@]}" --find-links wheels \
  --constraint docker/packages.txt --requirement "$requirements"
"$python" -m pip --disable-pip-version-check download --dest "$folder" "${options[@]}" --no-deps pip # the image has none
for file in wheels/*.whl; do rm -f "$folder/${file#wheels/}"; done # the image has them
mv "$folder"/pip-*.whl "$folder/pip.whl"
