"""The tiers of the sandbox: how each starts, and what it does not protect against."""

from __future__ import annotations

import json
import os
import platform
import pwd
import random
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from treegen.tasks.sandbox import landlock, seccomp
from treegen.tasks.sandbox.programs import Limits
from treegen.tasks.sandbox.runtime import DEVICES, PRELOAD, Runtime, is_reachable

_SCRATCH_MOUNT: Final = "/scratch"
# User ids that are likely unused: adduser assigns 1000 and the following ids to people, and systemd
# assigns ids from 60,001 on.
_UIDS: Final = range(30_000, 60_000)
_SPARE_THREADS: Final = 2048
_USER_CAPABILITIES: Final = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7  # chown, kill, setgid, setuid
# The helper's modules, in the order of their imports.
_HELPER: Final = ("seccomp", "landlock", "value_json", "child", "helper")
_BOOT: Final = """
import json, sys, types
def load(name, source):
    module = types.ModuleType(name)
    sys.modules[name] = module
    parent, _, short = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            load(parent, "")
        setattr(sys.modules[parent], short, module)
    exec(compile(source, name, "exec"), module.__dict__)
with open(int(sys.argv[2])) as file:
    for item in json.load(file).items():
        load(*item)
sys.modules["treegen.tasks.sandbox.helper"].main(int(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start a helper."""

    command: list[str]
    """The command line."""
    environment: dict[str, str]
    """Its environment variables."""
    setup: dict[str, Any]
    """The first message to the helper."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A directory in which programs run and whose files stay, in place of an empty directory."""

    path: str
    """An absolute path."""
    uid: int | None
    """The user that owns everything in the directory; None for the user of this process."""


@dataclass(frozen=True, slots=True)
class SandboxTier:
    """One way to confine programs."""

    name: str
    launch: Callable[[Runtime, Limits, Workspace | None, int, int], Launch]
    """Returns how to start a helper, given (runtime, limits, workspace, control, sources). The last
    two are descriptors."""
    unavailable: Callable[[], str]
    """Returns why the tier cannot be used here; empty if it can."""
    missing: Callable[[], tuple[str, ...]]
    """Returns what the tier does not protect against here, in words."""
    gaps: tuple[str, ...]
    """What the tier may not protect against on another machine, for stored verdicts."""


def helper_sources() -> str:
    """Return the helper's modules as JSON, so that a sandbox need not contain treegen's files."""
    folder = Path(__file__).parent
    names = {f"treegen.tasks.sandbox.{name}": folder / f"{name}.py" for name in _HELPER}
    return json.dumps({name: path.read_text(encoding="utf-8") for name, path in names.items()})


def _make_python_command(runtime: Runtime, control: int, sources: int) -> list[str]:
    # -I would also ignore PYTHONHASHSEED, and then the order of sets would differ by run.
    flags = ["-s", "-S", "-P", "-B", "-X", "utf8"]
    return [runtime.python, *flags, "-c", _BOOT, str(control), str(sources)]


def _make_environment(runtime: Runtime) -> dict[str, str]:
    """Return the interpreter's environment. The helper empties it before any program runs."""
    variables = {"PYTHONHASHSEED": "0"}
    if runtime.library_path:
        variables["LD_LIBRARY_PATH"] = runtime.library_path
    return variables


def _make_setup(runtime: Runtime, scratch: str, **changes: Any) -> dict[str, Any]:
    return {
        "uid": None,
        "keep_read": False,
        "landlock": False,
        "seccomp": True,
        "kind": "folder",
        "scratch": scratch,
        "parent": os.getpid(),
        "read": runtime.read,
        "hidden": runtime.hidden,
        "shown": runtime.shown,
        "devices": [path for path in DEVICES if os.path.exists(path)],
        "other_threads": 16,
        "preload": [*PRELOAD, *runtime.packages],
        "packages_path": runtime.packages_path,
        # Linear algebra libraries that start a thread for each core would use up the memory limit.
        "setenv": ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"],
    } | changes


def _launch_bubblewrap(
    runtime: Runtime, limits: Limits, workspace: Workspace | None, control: int, sources: int
) -> Launch:
    command = [str(shutil.which("bwrap")), "--clearenv", "--cap-drop", "ALL"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-cgroup-try"]
    command += ["--unshare-uts", "--hostname", "judge", "--new-session", "--die-with-parent"]
    root = _can_change_user()
    if root:
        # In a user namespace the real user 0 would stay 0. So treegen creates no namespace, and the
        # child changes to an unused user permanently. The helper needs these capabilities to change
        # the user and to kill the child.
        capabilities = ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"]
        capabilities += ["CAP_DAC_READ_SEARCH"] * (workspace is not None)  # to measure its files
        for capability in capabilities:
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user"]
    for key, value in _make_environment(runtime).items():
        command += ["--setenv", key, value]
    command += _mount_options(runtime.read) + _parent_dir_options(DEVICES)
    for path in DEVICES:
        command += ["--dev-bind-try", path, path]
    for path in runtime.hidden:
        command += ["--perms", "0755", "--tmpfs", path]
    command += _mount_options(runtime.shown)
    for path in runtime.hidden:
        command += ["--remount-ro", path]
    if workspace is None:
        kind, uid = "tmpfs", _unused_uid() if root else None
        command += ["--perms", "0777", "--size", str(limits.scratch), "--tmpfs", _SCRATCH_MOUNT]
    else:
        kind, uid = "workspace", workspace.uid
        command += ["--bind", workspace.path, _SCRATCH_MOUNT]
    command += ["--remount-ro", "/", "--chdir", "/", "--"]
    # The helper's parent is bwrap, which ends the helper with itself.
    setup = _make_setup(runtime, _SCRATCH_MOUNT, uid=uid, kind=kind, parent=None)
    # bwrap's own environment is empty, because pid 1 of the sandbox would show it.
    return Launch(command + _make_python_command(runtime, control, sources), {}, setup)


def _mount_options(paths: Sequence[str]) -> list[str]:
    command = _parent_dir_options(paths)
    for path in paths:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    return command


def _parent_dir_options(paths: Sequence[str]) -> list[str]:
    """Return options that create the directories above paths. Only root can enter bwrap's own."""
    above = sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})
    return [word for folder in above for word in ("--perms", "0755", "--dir", folder)]


def _launch_landlock(
    runtime: Runtime, limits: Limits, workspace: Workspace | None, control: int, sources: int
) -> Launch:
    root = _can_change_user()
    changes: dict[str, Any] = {"landlock": True, "uid": _unused_uid() if root else None}
    if root:
        changes["keep_read"] = runtime.keep_read
    else:
        changes["other_threads"] = _count_user_threads() + _SPARE_THREADS
    if workspace is not None:
        changes |= {"kind": "workspace", "uid": workspace.uid}
        changes["keep_read"] = root and (runtime.keep_read or not is_reachable(workspace.path))
    setup = _make_setup(runtime, _scratch_path(workspace), **changes)
    return Launch(
        _make_python_command(runtime, control, sources), _make_environment(runtime), setup
    )


def _launch_unconfined(
    runtime: Runtime, limits: Limits, workspace: Workspace | None, control: int, sources: int
) -> Launch:
    changes: dict[str, Any] = {} if workspace is None else {"kind": "workspace"}
    changes["other_threads"] = _count_user_threads() + _SPARE_THREADS
    setup = _make_setup(runtime, _scratch_path(workspace), seccomp=False, **changes)
    return Launch(
        _make_python_command(runtime, control, sources), _make_environment(runtime), setup
    )


def _scratch_path(workspace: Workspace | None) -> str:
    """Return the workspace, or a new path.

    The helper makes and removes a directory at a new path, even if this process ends.
    """
    if workspace is not None:
        return workspace.path
    return os.path.join(tempfile.gettempdir(), f"treegen-judge-{secrets.token_hex(8)}")


def choose_workspace_uid(tier: SandboxTier) -> int | None:
    """Return the user id for the owner of a new workspace; None for the user of this process."""
    return _unused_uid() if tier.name != "none" and _can_change_user() else None


def _can_change_user() -> bool:
    """Return whether this process is root and may become another user and kill its processes."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.split("CapEff:")[1].split()[0], 16)
    return os.geteuid() == 0 and capabilities & _USER_CAPABILITIES == _USER_CAPABILITIES


def _unused_uid() -> int:
    """Return a user id that is likely unused, so that its limits and signals affect one helper."""
    used_uids = {entry.pw_uid for entry in pwd.getpwall()}
    # A process can only take ids that exist in its user namespace. 65,534 is "nobody".
    spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    top = max(int(start) + int(length) for start, _, length in spans)
    free = [uid for uid in _UIDS if uid not in used_uids and uid < top] or [65_534]
    return random.SystemRandom().choice(free)


def _count_user_threads() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
        except OSError:
            continue
    return count


def _explain_no_seccomp() -> str:
    if sys.platform != "linux":
        return f"the sandbox needs Linux, but this machine runs {sys.platform}"
    if platform.machine() not in seccomp.machines() or sys.maxsize < 1 << 32:
        return f"the system call filter does not support {platform.machine()}"
    return ""


def _explain_no_bubblewrap() -> str:
    return _explain_no_seccomp() or ("" if shutil.which("bwrap") else "bwrap is not installed")


def _explain_no_landlock() -> str:
    reason = _explain_no_seccomp()
    if not reason and not landlock.version():
        reason = "the kernel has no Landlock (use Linux 5.13 or later with 'landlock' in its LSMs)"
    return reason


_LANDLOCK_GAPS: Final = (
    "names, sizes and times of host files can be seen (not their content)",
    "the host's name can be seen",
    "disk space of the scratch directory is checked only every 20 ms",
)


def _list_landlock_gaps() -> tuple[str, ...]:
    if _can_change_user():
        return _LANDLOCK_GAPS
    gap = "programs run as your own user, so their threads are limited only roughly"
    return (*_LANDLOCK_GAPS, gap)


_NO_TIER_GAPS: Final = (
    "everything: files, network, processes, signals and IPC of the host; only resource limits "
    "apply",
)

TIERS: Final = {
    "bubblewrap": SandboxTier(
        "bubblewrap", _launch_bubblewrap, _explain_no_bubblewrap, lambda: (), ()
    ),
    "landlock": SandboxTier(
        "landlock",
        _launch_landlock,
        _explain_no_landlock,
        _list_landlock_gaps,
        (*_LANDLOCK_GAPS, "threads are limited only roughly if the judge is not root"),
    ),
    "none": SandboxTier(
        "none", _launch_unconfined, lambda: "", lambda: _NO_TIER_GAPS, _NO_TIER_GAPS
    ),
}


def list_gaps(sandbox: str) -> tuple[str, ...]:
    """Return what a tier does not protect against, by the tier's name in stored verdicts."""
    tier = TIERS.get(sandbox)
    return ("its gaps are unknown",) if tier is None else tier.gaps
