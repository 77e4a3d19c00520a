#!/usr/bin/env bash
# Make a base image without an image registry: install Debian with debootstrap, import it as testbed-base:bookworm.
#
#   docker/base.sh [-y]      make the image, unless it exists; print its name
#
# This takes about a minute, once. debootstrap needs root. The script asks before it installs debootstrap, unless -y is
# given or CI=true.
set -euo pipefail

release=bookworm
image=testbed-base:$release

say() { echo "base: $*" >&2; }
fail() { say "$*"; exit 2; }

mirror() { # the machine's own apt source, so that no host name is written here
  apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' | awk -v r="$release" '$2 == r { print $1; exit }'
}

install_debootstrap() {
  command -v debootstrap >/dev/null && return
  if [[ ${CI:-} != true && ${yes:-} != 1 ]]; then
    [[ -t 0 ]] || fail "missing package: debootstrap. There is no terminal to ask at: make image ARGS=-y installs it with apt."
    read -rp "Install debootstrap with apt? [y/N] " reply
    [[ $reply == [yY]* ]] || fail "nothing was installed."
  fi
  apt-get -qq -o DPkg::Lock::Timeout=120 update
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends debootstrap >/dev/null
}

slim() { # remove what the public slim image also leaves out
  rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/var/log/* "$1"/usr/share/{doc,man,info,locale,lintian}/*
  printf 'path-exclude /usr/share/%s/*\n' doc man info locale lintian >"$1/etc/dpkg/dpkg.cfg.d/slim"
}

case ${1:-} in
  -y) yes=1 ;;
  "") ;;
  *) fail "'$1' is unknown. Use docker/base.sh [-y]." ;;
esac
docker info >/dev/null 2>&1 || fail "no Docker engine answers. Start one with make engine."
if ! docker image inspect "$image" >/dev/null 2>&1; then
  ((EUID == 0)) || fail "making $image needs root and the package debootstrap: use sudo make image ARGS=-y, once."
  command -v apt-get >/dev/null || fail "this is not Debian. Pull a Debian image and build with BASE=IMAGE."
  source=$(mirror)
  [[ $source ]] || fail "no apt source for $release was found."
  install_debootstrap
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  say "making $image with debootstrap (about a minute)"
  debootstrap --variant=minbase "$release" "$root" "$source" >"$root.log" 2>&1 || { tail -n 5 "$root.log" >&2; fail "debootstrap failed; its log is $root.log."; }
  rm -f "$root.log"
  slim "$root"
  tar --numeric-owner -C "$root" -c . | docker import --change 'CMD ["bash"]' - "$image" >/dev/null
fi
echo "$image"
