"""What is said of a process that the kernel killed for memory, from files as both versions of
control groups write.
"""

from pathlib import Path

import pytest

from trainer.launch.memory_kills import MemoryKills

GIB = 1 << 30


def version_2(tmp_path: Path) -> dict[str, Path]:
    """The limit is set on the job, the process is in a step of it."""
    step = tmp_path / "cgroup" / "job" / "step"
    step.mkdir(parents=True)
    (step / "memory.events").write_text(
        "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n"
    )
    (step / "memory.max").write_text("max\n")
    (step.parent / "memory.max").write_text(f"{64 * GIB}\n")
    (step.parent / "memory.peak").write_text(f"{64 * GIB - 4096}\n")
    write_proc(tmp_path, "0::/job/step\n")
    return {"counter": step / "memory.events", "limit": step.parent / "memory.max"}


def version_1(tmp_path: Path) -> dict[str, Path]:
    """A container sees its own group as the mount; its path is that of the host."""
    mount = tmp_path / "cgroup" / "memory"
    mount.mkdir(parents=True)
    (mount / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (mount / "memory.limit_in_bytes").write_text(f"{64 * GIB}\n")
    (mount / "memory.max_usage_in_bytes").write_text(f"{64 * GIB - 4096}\n")
    write_proc(tmp_path, "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    return {"counter": mount / "memory.oom_control", "limit": mount / "memory.limit_in_bytes"}


def write_proc(tmp_path: Path, cgroup: str) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    (tmp_path / "proc" / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal: 25165824 kB\nMemFree: 12 kB\nMemAvailable:  1048576 kB\n"
    )


def count_from_now(tmp_path: Path) -> MemoryKills:
    return MemoryKills(proc=tmp_path / "proc", mounted_at=tmp_path / "cgroup")


@pytest.mark.parametrize("write", [version_1, version_2])
def test_a_kill_names_the_limit_that_was_met(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files = write(tmp_path)
    kills = count_from_now(tmp_path)
    assert kills.explain() is None, "the three kills before are another's"
    files["counter"].write_text(files["counter"].read_text().replace("oom_kill 3", "oom_kill 4"))
    assert kills.explain() == (
        f"memory ran out: the limit here is 64.00 GiB, 64.00 GiB were used at most "
        f"({files['limit']})"
    )


@pytest.mark.parametrize("write", [version_1, version_2])
def test_without_a_limit_the_machine_is_named(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files = write(tmp_path)
    kills = count_from_now(tmp_path)
    files["limit"].write_text(
        {"memory.max": "max\n"}.get(files["limit"].name, "9223372036854771712\n")
    )
    files["counter"].write_text("oom_kill 4\n")
    assert kills.explain() == (
        f"memory ran out: this machine has 24.00 GiB, 1.00 GiB are free now "
        f"({tmp_path / 'proc' / 'meminfo'})"
    )


def test_without_control_groups_the_machine_is_counted(tmp_path: Path) -> None:
    write_proc(tmp_path, "")
    kills = count_from_now(tmp_path)
    assert kills.explain() is None
    (tmp_path / "proc" / "vmstat").write_text("oom_kill 5\n")
    assert "this machine has 24.00 GiB" in str(kills.explain())


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert count_from_now(tmp_path).explain() is None
