"""Several hosts on one machine, each with its own address, host name, processes, /tmp, /dev/shm, home and sshd.

    with Hosts(folder, 3) as hosts:         # hosts[0].ip; hosts.key logs in as root
    hosts.ssh(hosts[0], "ray status")

The hosts are Linux namespaces around one network bridge. The hosts share all other folders, like machines with a network mount.
Needs root and the programs in TOOLS. Removes everything at the end.
"""

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("ip", "unshare", "mount", "sshd", "ssh", "ssh-keygen", "rsync")
SUBNET = "10.213.7"
# Process 1 of a host. The host gets an empty /tmp, where the folders of the code and the test are mounted.
INIT = """
set -e
hostname {name}
mount --make-rprivate /
mount --bind {folder}/passwd /etc/passwd
mount -t tmpfs -o size=1g tmpfs /dev/shm
for path in {visible}; do
  case $path in /tmp/*) mkdir -p {folder}/tmp/${{path#/tmp/}}; mount --rbind $path {folder}/tmp/${{path#/tmp/}} ;; esac
done
mount --rbind {folder}/tmp /tmp
mkdir -p /run/sshd
touch /tmp/up
exec {runs}
"""
SSHD = """
Port 22
ListenAddress {ip}
HostKey {folder}/host_key
AuthorizedKeysFile {keys}
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""


def missing() -> str | None:
    """Returns why this machine cannot create hosts from Linux namespaces, or None if this machine can create them."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [tool for tool in TOOLS if not shutil.which(tool, path=path)]:
        return f"needs {', '.join(absent)}"
    probe = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return None if probe.returncode == 0 else "this kernel or container allows no namespaces"


@dataclass
class Host:
    name: str
    ip: str
    home: Path
    process: subprocess.Popen


class Hosts:
    """Creates several hosts as a context manager."""

    def __init__(self, folder: Path, count: int, visible: list[Path]):
        self.folder, self.count, self.visible = folder, count, visible
        self.key = folder / "key"
        self.hosts: list[Host] = []

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __enter__(self) -> "Hosts":
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        _run("ip", "link", "add", "rlhfbr", "type", "bridge")
        try:
            _run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", "rlhfbr")
            _run("ip", "link", "set", "rlhfbr", "up")
            for number in range(self.count):
                self.hosts.append(self._start(f"rlhf{number}", f"{SUBNET}.{number + 10}"))
            for host in self.hosts:
                self._wait(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, name: str, ip: str) -> Host:
        folder = self.folder / name
        home = folder / "home"
        for path in (home, folder / "tmp"):
            path.mkdir(parents=True)
        (folder / "tmp").chmod(0o1777)
        (home / ".bash_profile").write_text("export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1\n")
        users = re.sub(
            r"^root:.*$", f"root:x:0:0:root:{home}:/bin/bash", Path("/etc/passwd").read_text(), flags=re.M
        )
        (folder / "passwd").write_text(users)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
        (folder / "sshd_config").write_text(SSHD.format(ip=ip, folder=folder, keys=f"{self.key}.pub"))
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        runs = f"{sshd} -D -e -f {folder}/sshd_config"
        visible = " ".join(map(str, self.visible))
        (folder / "init").write_text(INIT.format(name=name, folder=folder, visible=visible, runs=runs))
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", f"v{name}", "master", "rlhfbr", "up")
        _run("ip", "-n", name, "addr", "add", f"{ip}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _run("ip", "-n", name, "link", "set", link, "up")
        _run("ip", "-n", name, "route", "add", "default", "via", f"{SUBNET}.1")
        own = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc"]
        command = ["ip", "netns", "exec", name, "unshare", *own, "bash", str(folder / "init")]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        return Host(name, ip, home, process)

    def _wait(self, host: Host) -> None:
        for _ in range(50):
            up = (self.folder / host.name / "tmp/up").exists()
            if up and self.ssh(host, "true").returncode == 0:
                return
            time.sleep(0.2)
        raise RuntimeError(f"{host.ip} is not up: {(self.folder / host.name / 'log').read_text()}")

    def ssh(self, host: Host, command: str) -> subprocess.CompletedProcess:
        given = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        options = [word for one in given for word in ("-o", one)]
        login = ["ssh", "-i", str(self.key), *options, f"root@{host.ip}", f"bash --login -c {command!r}"]
        return subprocess.run(login, capture_output=True, text=True, timeout=60)

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.process.kill()  # ends all processes of the host
            host.process.wait()
            # without this command, the bridge would exist until the host's last process has ended
            subprocess.run(["ip", "link", "del", f"v{host.name}"])
            subprocess.run(["ip", "netns", "del", host.name])
        subprocess.run(["ip", "link", "del", "rlhfbr"])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
