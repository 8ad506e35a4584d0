"""How many threads to compute with: the cores this process may use, by affinity and by container quota.

It answers with what the operating system allows, not with what is idle at the moment.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def default_num_threads() -> int:
    """The cores in the affinity mask, at most as many whole cores as the control group's quota grants."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cgroup_cpu_quota(CGROUP_ROOT, CGROUP_MEMBERSHIP)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_cpu_quota(root: Path, membership: Path) -> float | None:
    """The tightest CPU quota, in cores, of the process's control group (version 2 or 1) and its ancestors."""
    quotas = []
    for controllers, path in _groups(membership):
        if controllers == "":  # version 2: one hierarchy
            mount, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read = root / "cpu", _quota_v1
        else:
            continue
        folder = mount / path.lstrip("/")
        for candidate in (folder, *folder.parents):
            if candidate != mount and mount not in candidate.parents:
                break
            quotas.append(read(candidate))
    return min((q for q in quotas if q is not None), default=None)


def _groups(membership: Path) -> list[tuple[str, str]]:
    """(controllers, path) of each line `id:controllers:path`."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []  # not Linux
    fields = [line.split(":", 2) for line in lines]
    return [(f[1], f[2]) for f in fields if len(f) == 3]


def _quota_v2(folder: Path) -> float | None:
    values = _read_words(folder / "cpu.max")  # "max 100000" or "150000 100000"
    return _ratio(values[0], values[1]) if len(values) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read_words(folder / "cpu.cfs_quota_us"), _read_words(folder / "cpu.cfs_period_us")
    return _ratio(quota[0], period[0]) if quota and period else None


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # the controller is not enabled here


def _ratio(quota: str, period: str) -> float | None:
    if not quota.isdigit() or not period.isdigit() or int(quota) == 0 or int(period) == 0:
        return None  # "max" and -1 mean no limit
    return int(quota) / int(period)
