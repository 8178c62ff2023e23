"""Runs one command on a User-Mode-Linux kernel that has Soft-RoCE: real verbs on a machine without RDMA.

The kernel is an ordinary process; neither KVM nor a disk image is needed. Its root is this machine's ``/`` with the
verbs userland and a memory file system laid over it: the checkout and its venv run as they are, and what the command
writes is gone afterwards, except in folders given by ``--keep``. The device is ``rxe0`` over the loopback interface.
The environment is passed on, with REQUIRE_RDMA=1: no test may be skipped for want of a device.

Exit code: the command's; 124 after ``--timeout``; 125 when the kernel ended before the command did.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

TIMED_OUT: Final = 124
NO_RESULT: Final = 125

# Runs as the kernel's first process, on the machine's files, read-only. Builds the root that the command sees.
INIT: Final = """\
#!/bin/bash
set -e
trap 'exec {python} -c "import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)"' EXIT
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t tmpfs -o size=90% tmpfs /mnt
mkdir /mnt/verbs /mnt/upper /mnt/work /mnt/root
mount -t hostfs -o {userland}/root none /mnt/verbs
mount -t overlay -o lowerdir=/mnt/verbs:/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
cd /mnt/root
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir -p dev/pts dev/shm
mount -t devpts devpts dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t tmpfs tmpfs run
ln -sfn /proc/self/fd dev/fd
ln -sfn fd/0 dev/stdin
ln -sfn fd/1 dev/stdout
ln -sfn fd/2 dev/stderr
for folder in {kept}; do mkdir -p ./$folder && mount -t hostfs -o $folder none ./$folder; done
chroot /mnt/root /bin/bash {folder}/guest
"""

GUEST: Final = """\
hostname rdma-vm
ulimit -l unlimited
ip link set lo up
rdma link add rxe0 type rxe netdev lo || exit
{environ}
export REQUIRE_RDMA=1
export PYTHONPATH={userland}/python${{PYTHONPATH:+:$PYTHONPATH}}
cd {cwd} || exit
( {command} ) </dev/null
echo $? > {folder}/exit_code
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/rdma-vm", description="Run a command on real RDMA verbs.")
    parser.add_argument("--kernel", required=True, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--userland", required=True, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, default=2048, metavar="MiB", help="of the machine (2048)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="end the machine then (600)")
    parser.add_argument(
        "--keep", type=Path, action="append", default=[], metavar="DIR", help="what is written here stays"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the kernel says")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="and its arguments")
    options = parser.parse_args()
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("a command is needed")
    folder = Path(tempfile.mkdtemp(prefix="rdma-vm-"))
    try:
        _write_scripts(folder, options)
        return _boot(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_scripts(folder: Path, options: argparse.Namespace) -> None:
    places = {
        "folder": shlex.quote(str(folder)),
        "userland": shlex.quote(str(options.userland)),
        "python": shlex.quote(sys.executable),
        "kept": shlex.join([str(path.resolve()) for path in options.keep] + [str(folder)]),
        "cwd": shlex.quote(os.getcwd()),
        "command": shlex.join(options.command),
        "environ": "\n".join(
            f"export {name}={shlex.quote(value)}"
            for name, value in os.environ.items()
            if re.fullmatch("[A-Za-z_][A-Za-z_0-9]*", name)
        ),
    }
    (folder / "init").write_text(INIT.format(**places))
    (folder / "init").chmod(0o755)
    (folder / "guest").write_text(GUEST.format(**places))


def _boot(folder: Path, options: argparse.Namespace) -> int:
    command = [
        str(options.kernel),
        f"mem={options.memory}M",
        *("root=none", "rootfstype=hostfs", "rootflags=/", "ro", f"init={folder}/init"),
        *("con=null", "con0=null,fd:1", f"umid={folder.name}", f"uml_dir={folder}/"),
        *(() if options.verbose else ("quiet", "loglevel=3")),
    ]
    began = time.monotonic()
    # A process of the machine for each of the guest's: their group is what has to end.
    machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        machine.wait(options.timeout)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"rdma-vm: ended after {options.timeout:g} s\n")
        return TIMED_OUT
    finally:
        if machine.poll() is None:
            os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()
    result = folder / "exit_code"
    if not result.exists():
        sys.stderr.write("rdma-vm: the kernel ended before the command; try --verbose\n")
        return NO_RESULT
    code = int(result.read_text())
    sys.stderr.write(f"rdma-vm: exit code {code} after {time.monotonic() - began:.1f} s\n")
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
