"""Environments: recipe, key in the cache and eviction; decisions without a process."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from fray.errors import InvalidRequest
from fray.model.environment import EnvironmentConfig, EnvironmentSpec, check_spec
from fray.node.environments import overlay
from fray.node.environments.cache import Cache, CachedEnvironment, choose_evictions
from fray.node.environments.preparer import _read_project
from fray.node.environments.recipe import (
    BadRecipe,
    BaseEnvironment,
    BuildPlan,
    Project,
    Recipe,
    files,
    is_full,
    project_of,
    recipe_of,
    source_directories,
    steps,
    uv_environ,
    variables_in,
    without_credentials,
)
from fray.node.job_process.bootstrap import own_code

BASE = BaseEnvironment(fray="1", python="3.11", interpreter="/usr/bin/python3.11", platform="linux")
PROJECT = Project(pyproject='[project]\nname = "p"\nversion = "0"\n')
LOCKED = evolve(
    PROJECT,
    lock="""
[[package]]
name = "p"
source = { editable = "." }
[[package]]
name = "core"
source = { editable = "lib/core" }
[[package]]
name = "alpha"
source = { registry = "https://example.org/simple" }
""",
)


def recipe(spec: EnvironmentSpec | None = None, project: Project | None = None) -> Recipe:
    found = recipe_of(spec or EnvironmentSpec(pip_packages=("alpha",)), BASE, project)
    assert found is not None
    return found


# What it is ----------------------------------------------------------------------------------------------------------


def test_a_job_that_asks_for_nothing_has_the_node_s_own_environment() -> None:
    assert recipe_of(EnvironmentSpec(), BASE, None) is None
    assert recipe_of(EnvironmentSpec(python="3.11"), BASE, None) is None


@pytest.mark.parametrize(
    "other",
    [
        recipe(EnvironmentSpec(pip_packages=("alpha", "beta"))),
        recipe(EnvironmentSpec(pip_packages=("alpha",), python="3.12")),
        recipe(project=PROJECT),
        recipe(project=LOCKED),
        recipe(EnvironmentSpec(pip_packages=("alpha",), extras=("x",)), PROJECT),
        evolve(recipe(), base=evolve(BASE, fray="2")),
    ],
)
def test_whatever_the_steps_read_is_in_the_key(other: Recipe) -> None:
    assert other.key != recipe().key


def test_equal_recipes_have_one_key_and_the_order_of_extras_is_none_of_it() -> None:
    one = recipe(EnvironmentSpec(extras=("a", "b")), PROJECT)
    assert one.key == recipe(EnvironmentSpec(extras=("b", "a")), PROJECT).key


def test_extras_need_a_project() -> None:
    with pytest.raises(BadRecipe, match="workspace="):
        recipe_of(EnvironmentSpec(extras=("gpu",)), BASE, None)


def test_a_pyproject_without_a_project_is_only_a_file() -> None:
    assert project_of({"pyproject.toml": "[tool.ruff]\nline-length = 100\n"}) is None
    assert project_of({}) is None
    with pytest.raises(BadRecipe, match=r"pyproject\.toml cannot be read"):
        project_of({"pyproject.toml": "[project"})


def test_code_of_the_project_and_of_its_local_sources_is_used_from_where_it_is() -> None:
    assert source_directories(PROJECT) == ["."]
    assert source_directories(LOCKED) == [".", "lib/core"]


@pytest.mark.parametrize("lock", ['package = "x"', "package = [1]", '[[package]]\nsource = "git"', "[package]\nx = 1"])
def test_a_lock_file_of_another_shape_is_for_uv_to_complain_of(lock: str) -> None:
    assert source_directories(Project(pyproject="[project]\nname='a'", lock=lock)) == ["."]


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero")])
def test_a_project_file_that_never_ends_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "pyproject.toml")
    with pytest.raises(BadRecipe, match="cannot be read: not a regular file"):
        _read_project(str(tmp_path))


def test_a_job_abroad_has_its_author_s_code_and_not_his_packages() -> None:
    mine, theirs = "/home/me/run", "/home/me/.venv/lib/python3.11/site-packages"
    standard = ["/usr/lib/python311.zip", "/usr/lib/python3.11", "/usr/lib/python3.11/lib-dynload"]
    assert own_code([mine, theirs, "/usr/lib/python3/dist-packages"]) == [mine]
    assert own_code(standard[1:]) == []


@pytest.mark.parametrize("word", ["--index-url=http://x", "-e .", "a\nb", "a\r-e .", "a\x0c-e .", "a\u2028-e ."])
def test_options_of_uv_are_no_packages(word: str) -> None:
    with pytest.raises(InvalidRequest, match="UV_INDEX_URL"):
        EnvironmentConfig(pip_packages=[word])
    with pytest.raises(InvalidRequest, match="list of names"):
        EnvironmentConfig(extras="gpu")


@pytest.mark.parametrize("word", ["--index-url=http://x", "-", "a b", "a]", "a" * 101, "gpu\n"])
def test_what_is_no_name_of_an_extra_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequest, match="invalid name in extras"):
        EnvironmentConfig(extras=[word])


@pytest.mark.parametrize("image", ["--privileged", "-v=/:/host", "", "a b", "a\nb", "a;b", "x" * 1001, 3])
def test_options_of_the_engine_are_no_images(image: Any) -> None:
    with pytest.raises(InvalidRequest, match="invalid image name"):
        EnvironmentConfig(docker_image=image)


@pytest.mark.parametrize(
    "spec",
    [
        EnvironmentSpec(docker_image="--privileged"),
        EnvironmentSpec(pip_packages=("-r /etc/passwd",)),
        EnvironmentSpec(extras=("--directory=/",)),
    ],
)
def test_a_controller_takes_no_environment_that_could_not_have_been_asked_for(spec: EnvironmentSpec) -> None:
    with pytest.raises(InvalidRequest):
        check_spec(spec)


def test_credentials_in_addresses_are_not_said() -> None:
    said = recipe(
        EnvironmentSpec(pip_packages=("a @ https://me:p@ss@h.org/a.whl", "b @ git+ssh://git@h.org/b"))
    ).describe()
    assert said == "Python 3.11, packages a @ https://****@h.org/a.whl, b @ git+ssh://****@h.org/b"
    assert without_credentials("GET https://h.org/x@2?a=1 a@b") == "GET https://h.org/x@2?a=1 a@b"


# How it is made ------------------------------------------------------------------------------------------------------


def test_packages_are_installed_beside_what_fray_needs_and_never_named_on_a_command_line() -> None:
    secret = "alpha @ https://me:hush@example.org/alpha.whl"
    one = recipe(EnvironmentSpec(pip_packages=(secret,)))
    venv, install = steps(one, "/envs/k", "/usr/bin/python3.11")
    assert venv.argv == ("venv", "--no-project", "--python", "/usr/bin/python3.11", "/envs/k/venv")
    assert install.title == "uv pip install"
    assert "/envs/k/constraints.txt" in install.argv
    assert "hush" not in " ".join(install.argv)
    assert files(one, ["trio>=0.29"]) == {"constraints.txt": "trio>=0.29\n", "requirements.txt": f"{secret}\n"}


def test_a_lock_file_is_obeyed_and_the_workspace_s_own_code_is_not_installed() -> None:
    one = recipe(EnvironmentSpec(extras=("gpu",), pip_packages=("beta",)), LOCKED)
    _, sync, install = steps(one, "/envs/k", "python3.11")
    assert sync.argv[:2] == ("sync", "--frozen")
    assert {"--no-install-project", "--no-install-workspace", "--no-install-local"} <= set(sync.argv)
    assert sync.argv[-2:] == ("--extra", "gpu")
    assert sync.in_workspace
    assert sync.variables == {"UV_PROJECT_ENVIRONMENT": "/envs/k/venv"}
    assert install.argv[-2:] == ("-r", "/envs/k/requirements.txt")


def test_without_a_lock_file_project_and_packages_are_resolved_together() -> None:
    one = recipe(EnvironmentSpec(extras=("gpu",), pip_packages=("beta",)), PROJECT)
    _, install = steps(one, "/envs/k", "python3.11")
    assert install.argv[-6:] == ("-r", "pyproject.toml", "--extra", "gpu", "-r", "/envs/k/requirements.txt")


def test_uv_has_the_node_s_proxies_and_indexes_and_not_its_environment() -> None:
    node = {"HTTPS_PROXY": "p", "UV_INDEX_URL": "i", "VIRTUAL_ENV": "/node", "PYTHONPATH": "/x"}
    found = uv_environ(node)
    assert (found["HTTPS_PROXY"], found["UV_INDEX_URL"]) == ("p", "i")
    assert not {"VIRTUAL_ENV", "PYTHONPATH"} & set(found)


def test_programs_find_the_environment_s_own_first() -> None:
    found = variables_in("/envs/k/venv", {"PATH": "/bin", "PYTHONPATH": "/node"})
    assert found == {"PATH": "/envs/k/venv/bin:/bin", "VIRTUAL_ENV": "/envs/k/venv", "PYTHONPATH": ""}


def test_a_full_disk_is_recognised_in_the_words_of_every_tool() -> None:
    assert is_full("failed to copy: No space left on device (os error 28)")
    assert not is_full("No solution found")


def test_a_plan_travels() -> None:
    plan = BuildPlan(recipe=recipe(EnvironmentSpec(extras=("a",)), LOCKED), root="/r", workspace="/w", node_pid=7)
    assert BuildPlan.from_json(plan.to_json()) == plan


def test_the_overlay_is_fray_and_what_it_needs_and_nothing_else() -> None:
    links = overlay.links()
    assert {"fray", "trio", "attr", "attrs", "cattrs", "cloudpickle", "outcome"} <= set(links)
    assert not {"uv", "pytest", "numpy", "hypothesis", "mypy"} & set(links)
    assert all(os.path.exists(target) for target in links.values())
    lines = overlay.constraints()
    assert any(line.startswith("attrs") for line in lines)
    assert not any("extra ==" in line for line in lines)


def test_without_an_installation_the_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {overlay._requirement_name(line) for line in project["dependencies"]}
    assert names - overlay.NOT_IN_JOBS == set(overlay.ROOTS)


# How it is kept ------------------------------------------------------------------------------------------------------


def made(cache: Cache, key: str, size_bytes: int = 0) -> None:
    directory = cache.directory(key)
    with cache.lock(key, exclusive=True) or pytest.fail("locked"):
        directory.mkdir(parents=True)
        (directory / "data").write_bytes(b"x" * size_bytes)
        cache.mark_ready(key, "3.11", "about")


def test_one_without_its_mark_is_not_there(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.directory("k").mkdir()
    assert cache.acquire("k") is None
    made(cache, "l")
    found, lock = cache.acquire("l") or pytest.fail("it is there")
    assert (found.interpreter, found.lock_path) == (str(tmp_path / "l/venv/bin/python"), str(tmp_path / "l.lock"))
    lock.close()


def test_one_in_use_is_not_removed_and_its_users_do_not_hinder_one_another(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    made(cache, "k", 1000)
    _, lock = cache.acquire("k") or pytest.fail("it is there")
    _, second = cache.acquire("k") or pytest.fail("two may use it")
    lock.close()
    assert cache.evict(0, 1e9) == []
    second.close()
    assert cache.evict(0, 1e9) == ["k"]
    assert list(tmp_path.iterdir()) == [], "not even its lock is left"


def test_who_waits_for_a_lock_that_is_removed_meanwhile_has_a_new_one(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    old = cache.lock("k", exclusive=True) or pytest.fail("free")
    Path(old.path).unlink()
    new = cache.lock("k", exclusive=True) or pytest.fail("another file")
    assert os.path.exists(new.path)
    old.close()
    new.close()


def test_the_oldest_go_first_and_no_more_than_needed() -> None:
    now = time.time()
    kept = [CachedEnvironment(key=str(days), used_at=now - days * 86400, size_bytes=10) for days in (1, 9, 3, 20)]
    assert [one.key for one in choose_evictions(kept, 25, 14 * 86400.0, now)] == ["20", "9"]
    assert [one.key for one in choose_evictions(kept, 100, 14 * 86400.0, now)] == ["20"]
    half = CachedEnvironment(key="half", used_at=0.0, size_bytes=0)
    assert [one.key for one in choose_evictions([*kept, half], 1000, 1e9, now)] == ["half"], (
        "an incomplete one is useless"
    )
