#!/usr/bin/env bash
# Install and start a Docker engine with Compose v2 and buildx on a Debian machine.
#
#   docker/engine.sh [-y]    install what is missing, start an engine, wait until it answers
#   docker/engine.sh stop    stop the engine that this script started
#
# The script asks before it installs anything, unless -y is given or CI=true.
# ENGINE_FOLDER=FOLDER: a second engine, with all its files in FOLDER; DOCKER_HOST is then unix://FOLDER/docker.sock. It
# needs a network namespace of its own, because every engine rewrites the firewall rules of its namespace.
set -euo pipefail

folder=${ENGINE_FOLDER:-/run}
pid_file=$folder/testbed-engine.pid   # of the engine that this script started
log=/var/log/testbed-engine.log
options=()
if [[ ${ENGINE_FOLDER:-} ]]; then
  log=$folder/engine.log
  export DOCKER_HOST=unix://$folder/docker.sock
  options=(--data-root "$folder/data" --exec-root "$folder/docker" --pidfile "$folder/docker.pid" --host "$DOCKER_HOST")
fi
timeout_s=60                       # for the engine to answer or to end
apt=(apt-get -qq -o DPkg::Lock::Timeout=120)
export DEBIAN_FRONTEND=noninteractive

say() { echo "engine: $*" >&2; }
fail() { say "$*"; exit 2; }
answers() { docker info >/dev/null 2>&1; }
# alive FILE NAME: succeed if FILE holds the pid of a running program NAME; a zombie does not count.
alive() { [[ -r $1 ]] && [[ $(awk '{ print $2, $3 }' "/proc/$(<"$1")/stat" 2>/dev/null) == "($2) "[^Z] ]]; }

missing() { # print the Debian packages that are missing
  command -v docker >/dev/null && command -v dockerd >/dev/null || echo docker.io
  command -v iptables >/dev/null || echo iptables
  docker compose version >/dev/null 2>&1 || echo docker-compose
  docker buildx version >/dev/null 2>&1 || echo docker-buildx
}

ask_to_install() {
  ((EUID == 0)) || fail "missing packages: $*. Only root can install them: use sudo make engine ARGS=-y."
  [[ ${CI:-} == true || ${yes:-} == 1 ]] && return
  [[ -t 0 ]] || fail "missing packages: $*. There is no terminal to ask at: make engine ARGS=-y installs them with apt."
  read -rp "Install $* with apt? [y/N] " reply
  [[ $reply == [yY]* ]] || fail "nothing was installed."
}

# Debian 12 has Compose v1 only. The next release on the same mirror has v2. With priority 100, apt takes nothing else
# from that release.
add_next_release() {
  local uri
  uri=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' | awk '$2 == "bookworm" { print $1; exit }')
  [[ $uri ]] || fail "no apt source for bookworm was found, and Compose v2 comes from the same mirror. Add one, or install Compose v2."
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri trixie main" \
    >/etc/apt/sources.list.d/testbed-trixie.list
  printf 'Package: *\nPin: release n=trixie\nPin-Priority: 100\n' >/etc/apt/preferences.d/testbed-trixie
}

install() {
  local codename from=""
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-unknown}")
  command -v apt-get >/dev/null || fail "this is not Debian. Install Docker with Compose v2 by the instructions on docker.com."
  [[ $codename != bookworm ]] || { add_next_release; from=/trixie; }
  "${apt[@]}" update
  "${apt[@]}" install -y --no-install-recommends $(printf '%s\n' "$@" | sed "/^docker-/s|\$|$from|") >/dev/null
}

# A killed engine leaves pid and socket files, which prevent the next one from starting. Everything else of containerd
# stays: containers of the killed engine may still run, and only by this state can the next engine find and end them.
remove_stale() {
  local containerd=$folder/docker/containerd
  alive "$folder/docker.pid" dockerd && fail "a Docker engine runs (pid $(<"$folder/docker.pid")) but does not answer. Stop it, then try again."
  rm -f "$folder/docker.pid" "$folder/docker.sock"
  alive "$containerd/containerd.pid" containerd || rm -f "$containerd"/containerd{.pid,.sock,.sock.ttrpc,-debug.sock}
}

start() {
  remove_stale
  # In its own session the engine continues when this shell ends, and Ctrl-C does not reach it.
  setsid dockerd "${options[@]}" >"$log" 2>&1 </dev/null &
  local pid=$!
  for ((i = 0; i < timeout_s * 5; i++)); do
    answers && { echo "$pid" >"$pid_file"; say "started, pid $pid, log in $log."; return; }
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.2
  done
  tail -n 5 "$log" >&2
  kill "$pid" 2>/dev/null || true
  fail "dockerd did not answer within $timeout_s s; the end of $log is above."
}

stop() {
  alive "$pid_file" dockerd || { rm -f "$pid_file"; say "no engine that this script started is running."; return; }
  local pid
  pid=$(<"$pid_file")
  kill "$pid"
  for ((i = 0; i < timeout_s * 5; i++)); do
    alive "$pid_file" dockerd || { rm -f "$pid_file"; say "stopped."; return; }
    sleep 0.2
  done
  fail "pid $pid did not end within $timeout_s s. See $log."
}

case ${1:-} in
  stop) stop; exit ;;
  -y) yes=1 ;;
  "") ;;
  *) fail "'$1' is unknown. Use docker/engine.sh [-y] or docker/engine.sh stop." ;;
esac
mapfile -t needs < <(missing)
if ((${#needs[@]})); then
  ask_to_install "${needs[@]}"
  install "${needs[@]}"
fi
if answers; then
  say "an engine answers (version $(docker info --format '{{.ServerVersion}}'))."
else
  ((EUID == 0)) || fail "no Docker engine answers, and only root can start one. Run this with sudo, or join the docker group."
  start
fi
