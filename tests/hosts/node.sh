# Process 1 of a test host: start sshd and an engine. PUBLIC_KEY is the user's key; ENGINE=no leaves the engine out.
set -euo pipefail
mkdir -p /home/student/.ssh
echo "$PUBLIC_KEY" >/home/student/.ssh/authorized_keys
chown -R student:student /home/student
chmod 700 /home/student/.ssh
mkdir -p /run/sshd
ssh-keygen -q -A
if [[ $ENGINE == no ]]; then rm /usr/bin/docker; exec /usr/sbin/sshd -D; fi
/usr/sbin/sshd
rm -f /var/run/docker.pid /run/docker/containerd/*.pid
exec dockerd --log-level error
