"""Programs of a fork that try to reach a sibling, and what they reach."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import stat
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worlds import call

from treegen.search.environments.protocol import Observation
from treegen.tasks.environments.local import LocalEnvironment, LocalWorld

FILES = {"note.txt": "hello\n", "pack/tool.py": "def double(x): return 2 * x\n"}

_TEXT = """
# read_by_path
print('ESCAPED' if open('{path}/secret').read() else '')
# read_upwards
import os
print('ESCAPED', open('../' + os.path.basename('{path}') + '/secret').read())
# list_worlds
import os
print('ESCAPED', os.listdir(os.path.dirname('{path}')))
# list_sibling
import os
print('ESCAPED', os.listdir('{path}'))
# write_by_path
open('{path}/planted', 'w').write('x'); print('ESCAPED')
# append
open('{path}/secret', 'a').write('x'); print('ESCAPED')
# truncate
import os
os.truncate('{path}/secret', 0); print('ESCAPED')
# remove
import os
os.remove('{path}/secret'); print('ESCAPED')
# rename_out
import os
open('x', 'w').close(); os.rename('x', '{path}/planted'); print('ESCAPED')
# rename_in
import os
os.rename('{path}/secret', 'secret'); print('ESCAPED')
# exchange
import ctypes
done = ctypes.CDLL(None).renameat2(-100, b"note.txt", -100, b"{path}/secret", 2)
print("ESCAPED" if done == 0 else "")
# read_by_link
import os
os.symlink('{path}/secret', 'link'); print('ESCAPED', open('link').read())
# write_by_link
import os
os.symlink('{path}', 'out'); open('out/planted', 'w').write('x'); print('ESCAPED')
# hard_link
import os
os.link('{path}/secret', 'secret'); print('ESCAPED')
# hard_link_out
import os
os.link('note.txt', '{path}/planted'); print('ESCAPED')
# change_directory
import os
os.chdir('{path}'); print('ESCAPED', open('secret').read())
# climb
import os
for _ in range(40): os.chdir('..')
print('ESCAPED', open('{path}'[1:] + '/secret').read())
# descriptors
import os
for fd in range(1024):
  try: print('ESCAPED', os.listdir(fd))
  except OSError: pass
# proc_root
print('ESCAPED', open('/proc/{pid}/root{path}/secret').read())
# proc_cwd
print('ESCAPED', open('/proc/{pid}/cwd/secret').read())
# proc_memory
open('/proc/{pid}/mem', 'rb').seek(4096); print('ESCAPED')
# proc_environment
print('ESCAPED', open('/proc/{pid}/environ').read())
# proc_descriptors
import os
print('ESCAPED', os.listdir('/proc/{pid}/fd'))
# copy_memory
import ctypes
class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]
own, other = Part(ctypes.addressof(ctypes.create_string_buffer(8)), 8), Part(4194304, 8)
read = ctypes.CDLL(None).process_vm_readv({pid}, ctypes.byref(own), 1, ctypes.byref(other), 1, 0)
print('ESCAPED' if read >= 0 else '')
# process_descriptor
import ctypes
fd = ctypes.CDLL(None).syscall(434, {pid}, 0)
print('ESCAPED' if fd >= 0 else '')
# limits
import resource
print('ESCAPED', resource.prlimit({pid}, resource.RLIMIT_NOFILE))
# priority
import os
os.setpriority(os.PRIO_PROCESS, {pid}, 19); print('ESCAPED')
# affinity
import os
os.sched_setaffinity({pid}, [0]); print('ESCAPED')
# kill
import os
os.kill({pid}, 0); print('ESCAPED')
# kill_group
import os
os.killpg({pid}, 9); print('ESCAPED')
# trace
import ctypes
print('ESCAPED' if ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0 else '')
# connect
import socket
socket.create_connection(('127.0.0.1', {port}), 2); print('ESCAPED')
# listen
import socket
socket.create_server(('127.0.0.1', 0)); print('ESCAPED')
# abstract_socket
import socket
s = socket.socket(socket.AF_UNIX); s.bind('\\0treegen'); print('ESCAPED')
# named_pipe
import os
os.mkfifo('pipe'); print('ESCAPED')
# device
import os, stat
os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0)); print('ESCAPED')
# shared_memory
open('/dev/shm/treegen', 'w').write('x'); print('ESCAPED')
# message_queue
import ctypes
print('ESCAPED' if ctypes.CDLL(None).msgget(77, 0o1666) >= 0 else '')
# semaphore
import ctypes
print('ESCAPED' if ctypes.CDLL(None).semget(77, 1, 0o1666) >= 0 else '')
# memory_segment
import ctypes
print('ESCAPED' if ctypes.CDLL(None).shmget(77, 4096, 0o1666) >= 0 else '')
# named_queue
import ctypes
print('ESCAPED' if ctypes.CDLL(None).mq_open(b'/treegen', 0o102, 0o666, None) >= 0 else '')
# keyring
import ctypes, os
number = 248 if os.uname().machine == 'x86_64' else 217
key = ctypes.CDLL(None).syscall(number, b'user', b'treegen', b'x', 1, -4)
print('ESCAPED' if key >= 0 else '')
# watch
import ctypes
libc = ctypes.CDLL(None)
print('ESCAPED' if libc.inotify_add_watch(libc.inotify_init1(0), b'{path}', 0xfff) >= 0 else '')
# watch_all
import ctypes
libc = ctypes.CDLL(None)
fd = libc.fanotify_init(0, 0)
marked = libc.fanotify_mark(fd, 1, ctypes.c_uint64(0x20), -100, b'{path}')
print('ESCAPED' if marked >= 0 else '')
# request_ring
import ctypes
print('ESCAPED' if ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120)) >= 0 else '')
# temporary_folders
for folder in ('/tmp', '/var/tmp', '/run/lock', '/var/lock'):
  try: open(folder + '/treegen-note', 'w').write('x'); print('ESCAPED', folder)
  except OSError: pass
# daemon
import os
if os.fork() == 0:
  os.setsid()
print('ESCAPED')
# open_modes
import os
os.chmod('.', 0o777); print('ESCAPED')
# snapshot
import os
print('ESCAPED', os.listdir('{snapshot}'), open('{snapshot}/secret').read())
# spoil_snapshot
open('{snapshot}/note.txt', 'w').write('x'); print('ESCAPED')
"""

_PARTS = [part.partition("\n") for part in _TEXT.split("# ")[1:]]
ATTACKS = {name: source for name, _, source in _PARTS}
"""{path} is the directory of the sibling, {snapshot} that of its snapshot, {pid} its helper, {port}
a server of this machine. A program that succeeds prints ESCAPED."""


async def python(world: LocalWorld, code: str) -> Observation:
    """Run a program."""
    return await call(world, "python", code=textwrap.dedent(code))


def contents(world: LocalWorld) -> dict[str, Any]:
    """Everything of a directory but times and owners: types, modes, links and texts."""
    root, state = Path(world.workspace.path), {}
    inodes: dict[int, str] = {}
    for path in sorted(root.rglob("*")):
        status, name = path.lstat(), str(path.relative_to(root))
        data: Any = None
        if path.is_symlink():
            data = os.readlink(path)
        elif path.is_file():
            data = hashlib.sha256(path.read_bytes()).hexdigest()
        mode = 0 if path.is_symlink() else stat.S_IMODE(status.st_mode)
        state[name] = (
            stat.S_IFMT(status.st_mode),
            mode,
            data,
            inodes.setdefault(status.st_ino, name),
        )
    return state


async def attack_all(environment: LocalEnvironment) -> dict[str, tuple[str, bool]]:
    """Return what each attack printed, and whether its sibling and the snapshot are unchanged."""
    first = await environment.start(SimpleNamespace(metadata={"files": FILES}))
    await call(first, "write_file", path="secret", text="token")
    snapshot = await first.snapshot()
    victim = await environment.restore(snapshot)
    assert (await python(victim, "print(open('secret').read())")).text == "token"
    assert victim._process is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        places = {
            "path": victim.workspace.path,
            "pid": victim._process._process.pid,
            "port": server.getsockname()[1],
            "snapshot": str(environment._storage._snapshots / snapshot),
        }

        found: dict[str, tuple[str, bool]] = {}

        async def attack(names: list[str]) -> None:
            """Run attacks in one fork, and in a new one once an attack has changed the fork."""
            fork = None
            for attack_name in names:
                source = ATTACKS[attack_name]
                for name, value in places.items():
                    source = source.replace(f"{{{name}}}", str(value))
                fork = fork or await environment.restore(snapshot)
                shown = await python(fork, source)
                assert not shown.failure
                found[attack_name] = shown.text, contents(victim) == contents(first)
                if contents(fork) != contents(first):
                    await fork.close()
                    fork = None

        names = list(ATTACKS)
        await asyncio.gather(*(attack(names[at::8]) for at in range(8)))
        with contextlib.suppress(BlockingIOError):
            raise AssertionError(f"a program reached a port: {server.accept()}")
    again = await environment.restore(snapshot)
    assert contents(again) == contents(first) == contents(victim)
    alive = await python(victim, "print(open('secret').read())")
    assert alive.text == "token"
    return found
