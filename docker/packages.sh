#!/bin/sh
# Runs inside the build: install the packages of a rank, remove what no rank needs.
set -eu

apt-get update -qq
apt-get install -qq -y --no-install-recommends python3-pip >/dev/null
set -- install --quiet --no-cache-dir --break-system-packages --root-user-action=ignore --no-compile
if ls /wheels/*.whl >/dev/null 2>&1; then
  set -- "$@" --no-index --find-links /wheels
else
  sh /tmp/torch.sh /tmp/packages.txt python3 "$@"
fi
python3 -m pip "$@" --requirement /tmp/packages.txt || {
  echo "the packages of a rank cannot be installed. \`make image\` on the host downloads them before the build" >&2
  exit 1
}
apt-get purge -qq -y --autoremove python3-pip >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*

cd /usr/local/lib/python3.11/dist-packages
# C++ headers, build files and test programs, which are needed only to compile against torch.
rm -rf torch/include torch/share torch/test
find torch/bin -type f ! -name torch_shm_manager -delete
find torch/lib -name '*.a' -delete
find sympy networkx mpmath numpy torchvision -type d -name tests -prune -exec rm -rf {} +
python3 -m compileall -q -j 0 . || true  # some packages contain templates with the suffix .py
