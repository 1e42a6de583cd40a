"""Real daemons on "nodes" of one machine: network namespaces where they are allowed, else ports of the loopback.

    with Cluster(4, loss=10) as cluster:        # permille
        cluster.start()                         # a sluiced per node, ready to serve
        with Job(cluster, [0, 1, 2, 3]) as job:
            job.join()
            results = job.all("allreduce count=1000 type=f32")

Nothing outlives the with block: own processes are ended by their pids, namespaces and folders removed, on every path
out. Every wait has a time limit. When the block ends by an exception, the last lines of each log are printed.

Standard library only. Namespaces need root; loss, MTU and spoofed datagrams need namespaces.
"""
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NETNS_CLUSTER = os.path.join(ROOT, "scripts", "netns-cluster")
PORT = 9470
METRICS_PORT = 9477
LOG_LINES = 40  # of each log when something failed

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_namespaces = None


def build_dir():
    return os.environ.get("SLUICE_BUILD_DIR", os.path.join(ROOT, "build", "dev"))


def program(name):
    path = os.path.join(build_dir(), "bin", name)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} is not built; build it, or set SLUICE_BUILD_DIR")
    return path


def takes(setting):
    """Whether sluiced knows a setting, as "exchange.carry_over=true"."""
    return subprocess.run([program("sluiced"), "--set", setting, "--check-config"], capture_output=True, timeout=20,
                          check=False).returncode == 0


def can_make_namespaces():
    """Whether this user can; says why not, once. SLUICE_LOOPBACK=1 forbids it."""
    global _namespaces
    if _namespaces is None:
        if os.environ.get("SLUICE_LOOPBACK") == "1":
            reason = "SLUICE_LOOPBACK=1"
        else:
            check = subprocess.run([NETNS_CLUSTER, "check"], capture_output=True, text=True, timeout=30)
            reason = check.stderr.strip() if check.returncode != 0 else ""
        if reason:
            print(f"no network namespaces ({reason}): the nodes are ports of the loopback interface", flush=True)
        _namespaces = not reason
    return _namespaces


def stop_process(process, grace_s=5.0, first=signal.SIGTERM):
    """Ends a process of ours: asks, then kills. Returns its exit status."""
    if process.poll() is None:
        try:
            process.send_signal(first)
            process.send_signal(signal.SIGCONT)
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    return process.returncode


class Daemon:
    """sluiced of one node."""

    def __init__(self, cluster, node):
        self.cluster, self.node = cluster, node
        self.socket_path = os.path.join(cluster.folder, f"n{node}.sock")
        self.config_path = os.path.join(cluster.folder, f"n{node}.yaml")
        self.log_path = os.path.join(cluster.folder, f"n{node}.log")
        self.process = None

    @property
    def pid(self):
        return self.process.pid

    def write_config(self, settings):
        """settings: {"section": {"key": value}}; YAML reads JSON values as they are."""
        everything = {
            "node": f"n{self.node}",
            "transport": {"bind": [self.cluster.address(self.node)], "port": self.cluster.port(self.node)},
            "socket": {"path": self.socket_path},
            "metrics": {"listen": f"127.0.0.1:{self.cluster.metrics_port(self.node)}"},
        }
        for section, values in settings.items():
            if isinstance(values, dict):
                everything.setdefault(section, {}).update(values)
            else:
                everything[section] = values
        with open(self.config_path, "w", encoding="utf-8") as file:
            for section, values in everything.items():
                if not isinstance(values, dict):
                    file.write(f"{section}: {json.dumps(values)}\n")
                    continue
                file.write(f"{section}:\n")
                for key, value in values.items():
                    file.write(f"  {key}: {json.dumps(value)}\n")

    def spawn(self):
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.cluster.prefix(self.node) + [program("sluiced"), "--config", self.config_path],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait_ready(self, timeout_s=15.0):
        end = time.monotonic() + timeout_s
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"sluiced of node {self.node} ended with {self.process.returncode} at its start:\n"
                                   + self.log_tail())
            try:
                self.connect().close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise TimeoutError(f"sluiced of node {self.node} does not listen: {error}\n" + self.log_tail())
            time.sleep(0.02)

    def connect(self):
        """A control connection of ours (no message sent yet)."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(10)
        try:
            connection.connect(self.socket_path)
        except OSError:
            connection.close()
            raise
        return connection

    def start(self):
        self.spawn()
        self.wait_ready()

    def kill(self):
        self.process.kill()
        self.process.wait(10)

    def stop(self, grace_s=5.0):
        return stop_process(self.process, grace_s) if self.process else None

    def alive(self):
        return self.process is not None and self.process.poll() is None

    def log(self):
        try:
            with open(self.log_path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def log_tail(self):
        return "\n".join(self.log().split("\n")[-LOG_LINES:])

    def http(self, path, timeout_s=5.0):
        """Status and text of one GET from the metrics address, asked in the node's own namespace."""
        connection = self.cluster.socket_in(self.node, socket.AF_INET, socket.SOCK_STREAM)
        with connection:
            connection.settimeout(timeout_s)
            connection.connect(("127.0.0.1", self.cluster.metrics_port(self.node)))
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            data = b""
            while True:
                piece = connection.recv(65536)
                if not piece:
                    break
                data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode("utf-8", "replace")

    def metrics(self):
        """{'name{label="x"}': value}"""
        status, text = self.http("/metrics")
        if status != 200:
            raise RuntimeError(f"/metrics of node {self.node}: HTTP {status}")
        found = {}
        for line in text.split("\n"):
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def fds(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memfds(self):
        """Open memfds and mappings of memfds: what a lost client could leave behind."""
        count = 0
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                count += "memfd:" in os.readlink(f"/proc/{self.pid}/fd/{fd}")
            except FileNotFoundError:
                pass
        with open(f"/proc/{self.pid}/maps", encoding="utf-8") as maps:
            return count + sum("memfd:" in line for line in maps)

    def shmem_kib(self):
        with open(f"/proc/{self.pid}/status", encoding="utf-8") as status:
            for line in status:
                if line.startswith("RssShmem:"):
                    return int(line.split()[1])
        return 0

    def cpu_seconds(self):
        total = 0
        for task in os.listdir(f"/proc/{self.pid}/task"):
            try:
                with open(f"/proc/{self.pid}/task/{task}/schedstat", encoding="utf-8") as file:
                    total += int(file.read().split()[0])
            except FileNotFoundError:
                pass
        return total * 1e-9


class Cluster:
    def __init__(self, nodes, mtu=1500, loss=0, settings=None, prefix="e2e", need_namespaces=False, direct=False,
                 rate=None):
        """settings: for all nodes, or a function node -> settings. loss: permille of datagrams. rate: of each link, as tc
        writes it ("1gbit"); only with namespaces."""
        self.count, self.mtu, self.loss, self.direct, self.rate = nodes, mtu, loss, direct, rate
        self.settings = settings or {}
        self.name = f"{prefix}{os.getpid() % 100000}x{secrets.token_hex(2)}"
        self.namespaced = can_make_namespaces()
        if not self.namespaced and (need_namespaces or loss or mtu != 1500):
            raise RuntimeError("this needs network namespaces")
        self.folder = None
        self.addresses, self.ports = [], []
        self.daemons = []
        self.processes = []

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="sluice-")
        try:
            if self.namespaced:
                command = [NETNS_CLUSTER, "up", "-m", str(self.mtu)]
                command += ["-l", str(self.loss)] if self.loss else []
                command += ["-d"] if self.direct else []
                command += ["-r", self.rate] if self.rate else []
                up = subprocess.run(command + [self.name, str(self.count)], capture_output=True, text=True, timeout=60)
                if up.returncode != 0:
                    raise RuntimeError("netns-cluster: " + up.stderr.strip())
                self.addresses = [line.split()[1] for line in up.stdout.strip().split("\n")]
            else:
                self.addresses = ["127.0.0.1"] * self.count
                self.ports = _free_ports(2 * self.count)
            self.daemons = [Daemon(self, node) for node in range(self.count)]
            for daemon in self.daemons:
                daemon.write_config(self.settings(daemon.node) if callable(self.settings) else self.settings)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and issubclass(kind, Exception):  # not when somebody ended us
            self.show_logs()
        self._remove()

    def _remove(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        self.stop(3.0)
        if self.namespaced and self.name:
            subprocess.run([NETNS_CLUSTER, "down", self.name], timeout=120, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def show_logs(self):
        for daemon in self.daemons:
            print(f"---- log of node {daemon.node}\n{daemon.log_tail()}", file=sys.stderr, flush=True)

    def start(self):
        for daemon in self.daemons:
            daemon.spawn()
        for daemon in self.daemons:
            daemon.wait_ready()

    def stop(self, grace_s=5.0):
        """Ends all daemons at once; those that do not end by themselves in time are killed."""
        for daemon in self.daemons:
            if daemon.alive():
                daemon.process.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            daemon.stop(grace_s)

    def prefix(self, node):
        return ["ip", "netns", "exec", f"{self.name}-{node}"] if self.namespaced else []

    def address(self, node):
        return self.addresses[node]

    def port(self, node):
        return PORT if self.namespaced else self.ports[node]

    def metrics_port(self, node):
        return METRICS_PORT if self.namespaced else self.ports[self.count + node]

    def popen(self, node, command, **options):
        """A process of ours in a node's namespace; it is ended with the cluster."""
        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(self.prefix(node) + command, start_new_session=True, **options)
        self.processes.append(process)
        return process

    def socket_in(self, node, family, kind, protocol=0):
        """A socket that lives in the node's network namespace."""
        if not self.namespaced:
            return socket.socket(family, kind, protocol)
        result = []

        def make():  # setns moves one thread only
            fd = os.open(f"/run/netns/{self.name}-{node}", os.O_RDONLY)
            try:
                if _libc.setns(fd, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
                result.append(socket.socket(family, kind, protocol))
            except OSError as error:
                result.append(error)
            finally:
                os.close(fd)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if isinstance(result[0], OSError):
            raise result[0]
        return result[0]

    def new_folder(self, name):
        return tempfile.mkdtemp(prefix=name + "-", dir=self.folder)


def _free_ports(count):
    """Ports that nobody uses for UDP or TCP at this moment, with room for lanes above each."""
    ports, held = [], []
    while len(ports) < count:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        held.append(udp)
        port = udp.getsockname()[1]
        if port < 65000 and all(abs(port - other) > 16 for other in ports):
            ports.append(port)
    for udp in held:
        udp.close()
    return ports
