#!/usr/bin/env bash
# Build the image of a rank, unless the existing one was built from the same content. BASE names another base image.
#
#   docker/image.sh [-y]     -y: install what making a base image needs without asking (docker/base.sh)
set -euo pipefail
cd "$(dirname "$0")/.."

image=${IMAGE:-testbed:latest}
pull_timeout_s=60 # for an image registry

say() { echo "image: $*" >&2; }

base() { # print the name of the base image: BASE, else the public one, else one made here
  local public=debian:bookworm-slim
  if [[ ${BASE:-} ]]; then echo "$BASE"; return; fi
  docker image inspect "$public" >/dev/null 2>&1 || timeout "$pull_timeout_s" docker pull --quiet "$public" >/dev/null 2>&1 && echo "$public" && return
  say "$public cannot be pulled; the base is one that is made here"
  docker/base.sh "${answer[@]}" # it says so if it makes one now
}

case ${1:-} in
  -y) answer=(-y) ;;
  "") answer=() ;;
  *) say "'$1' is unknown. Use docker/image.sh [-y]."; exit 2 ;;
esac

docker info >/dev/null 2>&1 || { say "no Docker engine answers. Start Docker, or install one with make engine."; exit 2; }
compose=$(docker compose version --short 2>/dev/null) || { say "Compose v2 is missing. Install it, or run make engine."; exit 2; }
# Compose 2.16 is the first that replaces a variable in the project's name; with an older one all clones share a project.
if [[ $compose =~ ^v?([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] < 2016)); then
  say "Compose $compose is too old. Install 2.16 or later."
  exit 2
fi
hash=$("${PYTHON:-python3}" -m testbed.control.substrates.clone image)
made=$(docker image inspect --format '{{index .Config.Labels "testbed.content"}}' "$image" 2>/dev/null || true)
if [[ $made == "$hash" ]]; then
  say "$image is up to date ($hash)"
  exit
fi
docker/wheels.sh || say "no wheelhouse; the build uses a package index"
base_image=$(base) # on its own line, because bash ignores a failure inside an assignment before a command
BASE=$base_image CONTENT_HASH=$hash docker compose build --quiet
docker image prune --force --filter label=testbed.content >/dev/null # our images that the new one replaced
say "$image, $(docker image inspect --format '{{.Size}}' "$image" | awk '{ printf "%.0f MB", $1 / 1e6 }'), content $hash"
