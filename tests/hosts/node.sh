# The life of a test host: an engine and sshd, each restarted by nobody. The public key comes by the environment.
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
