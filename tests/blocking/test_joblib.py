"""The joblib backend: its registration, and `joblib.Parallel` on a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import joblib
import pytest

import fray
from fray import blocking
from tests.support import job_functions


@pytest.fixture(scope="module")
def cluster() -> Iterator[blocking.Cluster]:
    with blocking.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster:
        yield cluster


@pytest.mark.parametrize("order", ["import fray, joblib", "import joblib, fray", "import joblib; import fray"])
def test_the_backend_registers_itself_whichever_is_imported_first(order: str) -> None:
    program = f"{order}; from joblib.parallel import BACKENDS; print('fray' in BACKENDS)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_importing_fray_does_not_import_joblib() -> None:
    program = "import sys, fray; fray.load(); import fray.blocking; print('joblib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def place() -> tuple[int, str, str]:
    return os.getpid(), os.environ["FRAY_JOB_ID"], os.environ["OMP_NUM_THREADS"]


def nested() -> list[int]:
    results: list[int] = joblib.Parallel(n_jobs=-1)(joblib.delayed(job_functions.double)(n) for n in range(3))
    return results


def test_parallel_runs_on_workers_that_end_with_it(cluster: blocking.Cluster) -> None:
    with joblib.parallel_config(backend="fray", cluster=cluster, resources=fray.ResourceConfig(memory="256MB")):
        places = joblib.Parallel()(joblib.delayed(place)() for _ in range(20))
        assert os.getpid() not in {pid for pid, _, _ in places}
        assert {threads for _, _, threads in places} == {"1"}
        with pytest.raises(ValueError, match="n_jobs=0"):
            joblib.Parallel(n_jobs=0)([joblib.delayed(len)("ab")])
    jobs = cluster.list_jobs()
    assert {job_id for _, job_id, _ in places} <= {info.job_id for info in jobs}
    assert len(cluster.wait([info.job_id for info in jobs])) == 2, "one worker for each CPU"


def test_the_workers_of_an_executor_serve_many_calls(cluster: blocking.Cluster) -> None:
    small = fray.ResourceConfig(memory="256MB")
    with blocking.Executor(2, cluster=cluster, resources=small) as executor:
        with joblib.parallel_config(backend="fray", executor=executor, n_jobs=2):
            assert joblib.Parallel()(joblib.delayed(pow)(n, 2) for n in range(10)) == [n * n for n in range(10)]
            assert joblib.Parallel()(joblib.delayed(nested)() for _ in range(2)) == [[0, 2, 4]] * 2
            with pytest.raises(ValueError, match="boom"):
                joblib.Parallel()(joblib.delayed(job_functions.fail)("boom") for _ in range(4))
            lazy = joblib.Parallel(return_as="generator")(joblib.delayed(abs)(-n) for n in range(5))
            assert list(lazy) == [0, 1, 2, 3, 4]
            pids = {pid for _ in range(3) for pid in joblib.Parallel()(joblib.delayed(os.getpid)() for _ in range(4))}
        assert len(pids) <= 2
        assert executor.submit(len, "ab").result() == 2
