"""How often the kernel has killed processes of our cgroup."""

from pathlib import Path

import pytest

from service.worker.memory import memory_kills

V2 = "low 0\nhigh 0\nmax 812\noom 9\noom_kill 3\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"


@pytest.mark.parametrize(
    ("groups", "file", "text", "kills"),
    [
        ("0::/pod/worker", "sys/fs/cgroup/pod/worker/memory.events", V2, 3),
        ("0::/", "sys/fs/cgroup/memory.events", V2, 3),
        ("0::/../../outside", "sys/fs/cgroup/memory.events", V2, 3),
        ("9:cpu:/x\n4:memory:/worker\n0::/", "sys/fs/cgroup/memory/worker/memory.oom_control", V1, 2),
        ("4:memory:/docker/1234", "sys/fs/cgroup/memory/memory.oom_control", V1, 2),
        ("0::/", "sys/fs/cgroup/memory.events", "low 0\n", None),
        ("0::/", "sys/fs/cgroup/other", "", None),
    ],
)
def test_kills_are_read_from_both_versions_of_cgroups(
    tmp_path: Path, groups: str, file: str, text: str, kills: int | None
) -> None:
    for name, content in (("proc/self/cgroup", groups), (file, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert memory_kills(tmp_path) == kills
