"""How many threads: affinity and the container's CPU quota."""

from __future__ import annotations

import os

import pytest

from octavo.backends import threads
from octavo.backends.threads import cgroup_cpu_quota, default_num_threads


@pytest.fixture
def group(tmp_path):
    """A function that writes a control group tree and returns (root, membership file)."""

    def build(membership: str, **files: str):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "self").write_text(membership)
        return tmp_path / "cgroup", tmp_path / "self"

    return build


def test_version_2_quota_in_cores(group):
    assert cgroup_cpu_quota(*group("0::/\n", cpu_dot_max="150000 100000\n")) == 1.5


def test_version_2_without_limit(group):
    assert cgroup_cpu_quota(*group("0::/\n", cpu_dot_max="max 100000\n")) is None


def test_the_tightest_quota_of_the_ancestors_counts(group):
    files = {
        "cpu_dot_max": "800000 100000",
        "a__cpu_dot_max": "200000 100000",
        "a__b__cpu_dot_max": "max 100000",
    }
    assert cgroup_cpu_quota(*group("0::/a/b\n", **files)) == 2.0


def test_version_1_quota_in_cores(group):
    files = {"cpu__x__cpu_dot_cfs_quota_us": "300000", "cpu__x__cpu_dot_cfs_period_us": "100000"}
    assert cgroup_cpu_quota(*group("4:memory:/x\n3:cpu,cpuacct:/x\n", **files)) == 3.0


def test_version_1_without_limit(group):
    files = {"cpu__x__cpu_dot_cfs_quota_us": "-1", "cpu__x__cpu_dot_cfs_period_us": "100000"}
    assert cgroup_cpu_quota(*group("3:cpu,cpuacct:/x\n", **files)) is None


def test_no_control_groups_at_all(tmp_path):
    assert cgroup_cpu_quota(tmp_path / "none", tmp_path / "absent") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (2.5, 2), (0.3, 1), (64.0, 4)])
def test_threads_are_whole_cores_of_affinity_and_quota(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5, 7})
    monkeypatch.setattr(threads, "cgroup_cpu_quota", lambda root, membership: quota)
    assert default_num_threads() == expected
