"""A running `fray-node` is replaced by the installed release on SIGUSR2: its jobs, actors, logs and devices stay."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.process_trees import lives
from tests.upgrade.builds import ROOT, WITHIN_S, Cluster, open_cluster, wait_until
from tests.upgrade.test_upgrade_real import Work

pytestmark = [pytest.mark.full, pytest.mark.within(240)]
SCRIPT = """#!{python}
import os, sys
os.environ["PYTHONPATH"] = {tree!r}
sys.path.insert(0, {tree!r})
{before}
from fray.node.main import main
sys.exit(main())
"""
HANGS = 'if "--print-handover" not in sys.argv:\n    import time; time.sleep(1000)'
FAILS = 'sys.exit("the installation is incomplete")'
REPLACED = "runs in place of the program before: {} attempts continue"


class Site:
    """A cluster with one node, which is started from ``current``, a link to the installed release."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.directory = cluster, cluster.directory
        self.install("1.0.0")
        cluster.start_controller(ROOT)
        config = self.directory / "node.toml"
        config.write_text('gpus = ["a100"]\n')
        own = ("--name", "n", "--state-dir", str(self.directory / "n"), "--config", str(config))
        script = str(self.directory / "current" / "bin" / "fray-node")
        self.node = cluster.start("n", ROOT, script, "--controller", cluster.spec, *own)
        wait_until(lambda: "n" in cluster.nodes(ROOT), "the node is a member")

    def install(self, release: str, before: str = "", take_over_s: int = 60) -> None:
        """Install a release beside the others, and have ``current`` lead to it."""
        tree = self.directory / release
        shutil.copytree(ROOT / "fray", tree / "fray", ignore=shutil.ignore_patterns("__pycache__"))
        for module, pattern, text in (
            ("model/messages/session.py", r"^VERSION = .*$", f'VERSION = "{release}"'),
            ("node/handover/process.py", r"^TAKE_OVER_S = .*$", f"TAKE_OVER_S = {take_over_s}"),
        ):
            file = tree / "fray" / module
            changed, count = re.subn(pattern, text, file.read_text(), flags=re.MULTILINE)
            assert count == 1, module
            file.write_text(changed)
        script = tree / "bin" / "fray-node"
        script.parent.mkdir()
        script.write_text(SCRIPT.format(python=sys.executable, tree=str(tree), before=before))
        script.chmod(0o755)
        link = self.directory / "next"
        link.symlink_to(tree)
        link.rename(self.directory / "current")

    def replace(self, times: int, attempts: int) -> None:
        """Replace the node, and wait until the next program is a member."""
        self.node.send_signal(signal.SIGUSR2)
        text = REPLACED.format(attempts)
        wait_until(
            lambda: self.cluster.log("n").count(text) == times or self.node.poll() is not None, "it was replaced"
        )
        assert self.node.poll() is None, self.cluster.log("n")

    def run_job(self, name: str, *words: str) -> subprocess.Popen[str]:
        """Run a job from the command line, which prints what it prints and exits as it does."""
        command = [sys.executable, "-m", "fray.cli", "run", "--name", name, "--cpu", "0.1", "--memory", "64MB", *words]
        started = subprocess.Popen(
            command,
            env=self.cluster.environ(ROOT),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.cluster.commands.append(started)
        return started

    def count_program(self) -> list[str]:
        """A program that writes its pid, and counts until there is a file ``finish``."""
        text = "echo $$ > pid; i=0; until [ -e finish ]; do echo line $i; i=$((i+1)); sleep 0.05; done; exit 7"
        return ["sh", "-c", f"cd {self.directory}; {text}"]

    def wait_pid(self) -> int:
        file = self.directory / "pid"
        wait_until(lambda: file.exists() and file.read_text().strip() != "", "the program runs")
        return int(file.read_text())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_cluster(tmp_path) as cluster:
        yield Site(cluster)


def test_jobs_and_actors_of_a_node_do_not_notice_its_upgrade(site: Site) -> None:
    work = Work(site.cluster, "work", ROOT)
    counted = site.run_job("counted", "--gpu", "1", "--", *site.count_program())
    site.wait_pid()
    incarnation = re.findall(r"node joined: n \((\w+)\)", site.cluster.log("controller"))
    # A second time, too: what the second program has was started by the first one.
    for times, release in enumerate(("2.0.0", "3.0.0"), start=1):
        site.install(release)
        site.replace(times, attempts=5)
        assert site.node.pid == site.cluster.running["n"].pid
        wait_until(lambda: site.cluster.nodes(ROOT)["n"]["alive"] is True, "it is a member")
        work.wait_calls()
    controller = site.cluster.log("controller")
    assert re.findall(r"node joined: n \((\w+)\)", controller) == incarnation, "it is the same incarnation"
    assert "is silent" not in controller
    assert len(work.starts()) == 4
    # Its device is held: another job that needs it waits. What needs none starts in the new release.
    waits = site.run_job("waits", "--gpu", "1", "--", "true")
    shown = site.run_job("shown", "--", "sh", "-c", "echo started after it")
    assert "started after it" in shown.communicate(timeout=WITHIN_S)[0]
    assert shown.returncode == 0
    assert waits.poll() is None
    (site.directory / "finish").touch()
    output = counted.communicate(timeout=WITHIN_S)[0]
    assert counted.returncode == 7, output
    lines = [int(number) for number in re.findall(r"^line (\d+)$", output, re.MULTILINE)]
    assert lines == list(range(len(lines))), "each line once and in order"
    assert waits.wait(timeout=WITHIN_S) == 0, waits.communicate()[0]
    work.finish()
    # Nothing is left of the zygotes of the first two programs.
    trees = [str(site.directory / release) for release in ("1.0.0", "2.0.0")]
    wait_until(lambda: not any(runs_from(pid, trees) for pid in below(site.node.pid)), "the first zygotes have ended")
    site.cluster.stop("n")


def below(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*found, *(each for child in found for each in below(child))]


def runs_from(pid: int, trees: list[str]) -> bool:
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return any(f"PYTHONPATH={tree}" in environ for tree in trees)


def test_a_job_that_has_survived_an_upgrade_of_its_node_is_stopped_like_any_other(site: Site) -> None:
    counted = site.run_job("counted", "--", *site.count_program())
    pid = site.wait_pid()
    site.install("2.0.0")
    site.replace(1, attempts=1)
    site.cluster.fray(ROOT, "stop", "counted")
    counted.communicate(timeout=WITHIN_S)
    wait_until(lambda: not lives(pid), "its process has ended")
    assert site.cluster.nodes(ROOT)["n"]["attempts"] == 0


def test_a_job_that_has_survived_an_upgrade_ends_with_its_node(site: Site) -> None:
    site.run_job("counted", "--", *site.count_program())
    pid = site.wait_pid()
    site.install("2.0.0")
    site.replace(1, attempts=1)
    site.node.kill()
    site.node.wait()
    wait_until(lambda: not lives(pid), "its process has ended")


def test_a_release_that_does_not_take_over_in_time_is_the_end_of_the_node_and_of_its_jobs(tmp_path: Path) -> None:
    with open_cluster(tmp_path) as cluster:
        site = Site(cluster)
        # The first program decides about the time, so it has to be replaced by one with another constant.
        site.install("1.1.0", take_over_s=2)
        site.replace(1, attempts=0)
        site.run_job("counted", "--", *site.count_program())
        pid = site.wait_pid()
        site.install("2.0.0", before=HANGS)
        site.node.send_signal(signal.SIGUSR2)
        assert site.node.wait(timeout=WITHIN_S) == -signal.SIGALRM
        wait_until(lambda: not lives(pid), "its process has ended")


def test_a_release_that_cannot_continue_is_refused_and_nothing_changes(site: Site) -> None:
    counted = site.run_job("counted", "--", *site.count_program())
    site.wait_pid()
    site.install("2.0.0", before=FAILS)
    site.node.send_signal(signal.SIGUSR2)
    refused = "fray-node was not replaced and continues"
    wait_until(lambda: refused in site.cluster.log("n"), "it is refused")
    assert "cannot continue its attempts (exit code 1: the installation is incomplete)" in site.cluster.log("n")
    (site.directory / "finish").touch()
    assert "line 1\n" in counted.communicate(timeout=WITHIN_S)[0]
    assert counted.returncode == 7
