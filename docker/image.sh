#!/usr/bin/env bash
# The image of a rank, unless the one that is there was made from the same content. BASE names another base image.
set -euo pipefail
cd "$(dirname "$0")/.."

image=${IMAGE:-testbed:latest}
patience=60 # seconds for an image registry to give the public base

say() { echo "image: $*" >&2; }

base() { # what is there, else the public one, else our own
  local public=debian:bookworm-slim
  if [[ ${BASE:-} ]]; then echo "$BASE"; return; fi
  docker image inspect "$public" >/dev/null 2>&1 || timeout "$patience" docker pull --quiet "$public" >/dev/null 2>&1 && echo "$public" && return
  say "no image registry gives $public; making an equal base here"
  docker/base.sh
}

docker info >/dev/null 2>&1 || { say "no engine answers. Start Docker, or install one with make engine."; exit 2; }
docker compose version >/dev/null 2>&1 || { say "Compose v2 is missing. Install it, or run make engine."; exit 2; }
hash=$("${PYTHON:-python3}" -m testbed.control.substrates.content)
made=$(docker image inspect --format '{{index .Config.Labels "testbed.content"}}' "$image" 2>/dev/null || true)
if [[ $made == "$hash" ]]; then
  say "$image is up to date ($hash)"
  exit
fi
docker/wheels.sh || say "no wheelhouse; the build will ask an index"
found=$(base) # on a line of its own: a failure in front of a command would not end the script
BASE=$found CONTENT_HASH=$hash docker compose build --quiet rank0
docker image prune --force --filter label=testbed.content >/dev/null # what the new one replaced, and only ours
say "$image, $(docker image inspect --format '{{.Size}}' "$image" | awk '{ printf "%.0f MB", $1 / 1e6 }'), content $hash"
