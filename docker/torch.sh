#!/bin/sh
# Take torch and torchvision from PyTorch's index of CPU builds: for x86 the usual index has CUDA builds, gigabytes large.
#
#   docker/torch.sh PINS PYTHON PIP-COMMAND...    e.g. docker/torch.sh requirements.txt .venv/bin/python install --quiet
#
# PINS is a requirements file; its lines torch==... and torchvision==... name the versions. Only these two are taken from
# the index, without their dependencies: a second index for other packages would allow dependency confusion.
# If the index does not answer within 3 seconds it is not used; a note is printed and the exit code is 0. The caller's
# next pip command then takes torch from pip's own index.
# TORCH_INDEX names another index; with an empty TORCH_INDEX none is used.
set -eu

index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
limit_s=3
pins=$1 python=$2
shift 2

# Print why the index cannot be used, or nothing. `timeout` limits all of it, name resolution included.
# A certificate that Python cannot verify counts as an answer, because pip has its own certificates.
refusal() {
  timeout "$limit_s" "$python" - "$index/torch/" <<'END' || [ $? -ne 124 ] || echo "nothing within $limit_s s"
import ssl
import sys
import urllib.request

try:
    urllib.request.urlopen(sys.argv[1]).close()
except Exception as error:
    if not isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
        print(str(error).strip("<>") or type(error).__name__)
END
}

[ -n "$index" ] || exit 0
case $index in
  http://* | https://*) why=$(refusal) ;;
  *) why= ;; # a folder
esac
if [ -n "$why" ]; then
  echo "torch: $index does not answer ($why). pip's own index is used, which may bring gigabytes of CUDA libraries;" \
    "TORCH_INDEX names another index of CPU builds." >&2
  exit 0
fi
wanted=$(grep -E '^(torch|torchvision)==' "$pins")
# shellcheck disable=SC2086  # one word per package
"$python" -m pip --disable-pip-version-check "$@" --no-deps --index-url "$index" $wanted || {
  echo "torch: $index answers, but pip cannot take" $wanted "from it. Try again, or leave it out with TORCH_INDEX= (empty)." >&2
  exit 2
}
