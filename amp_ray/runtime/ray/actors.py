"""The connection to a Ray cluster, tasks for the search, and actors that run trials.

Only this module imports ``ray``. `TrialWorker` is the class of the trial actors.
"""

import atexit
import contextlib
import functools
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import amp_ray
from amp_ray.cost.estimate import Result
from amp_ray.errors import AmpRayError
from amp_ray.runtime.ray.address import (
    LOCAL,
    START_VARIABLE,
    RayUnavailableError,
    cause_of,
    environment_kept,
    find_address,
    gist_of,
    head_problem,
    listens,
    session_folder,
    set_token,
)
from amp_ray.runtime.study.pool import (
    CLOSE_TIMEOUT_S,
    Fault,
    MakeRunner,
    Runner,
    RunnerLostError,
    RunnerPool,
    Task,
    run_task,
    sweep_lines,
)
from amp_ray.search.candidate_queue import Batches, Work
from amp_ray.trials.outcome import Outcome, Unreachable
from amp_ray.units import MIB

with environment_kept():
    # Even with log_to_driver off, Ray prints the death of a worker to stdout, where only results
    # belong. Ray reads the variable that filters its messages on import.
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = ".*"
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_LOGGER = logging.getLogger(__name__)
OBJECT_STORE_BYTES: Final = 256 * MIB  # for a local cluster: one experiment and a few results
FETCH_TIMEOUT_S: Final = 30.0  # for a ready result; longer than Ray takes to notice a death
LOST_TIMEOUT_S: Final = 12.0  # for a head that is silent; Ray would end this process after 60 s
LEAVE_TIMEOUT_S: Final = 15.0  # for leaving a lost cluster: takes 1-8 s, or for ever if it hangs
# For the start of a node, and the first answer of its worker: 1 s, over 60 s on a busy machine
START_TIMEOUT_S: Final = 120.0
ACTOR_TIMEOUT_S: Final = 180.0  # for the start of an actor: 1 s, or 60 s on a busy machine
SILENCE_TIMEOUT_S: Final = 300.0  # for a search without an answer; Ray notices a dead node in 30 s
WATCH_S: Final = 2.0  # interval of the cluster's checks, and time limit for its head to answer
RAYLET_DIED: Final = "its process on this machine, the raylet, has died"
POLL_S: Final = 0.5  # longest wait for answers before the cluster is checked
# Variables that Ray may set in its workers; local trials need the driver's values
SET_BY_RAY: Final = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


# ---------------------------------------------------------------------------- connection


@contextlib.contextmanager
def connect(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """Connect to a Ray cluster for a ``with`` block; keep a connection that is open already.

    The address is ``host:port`` of a cluster's head (this machine must be a node), ``auto`` for the
    cluster that was started on this machine, or ``local`` to start one. None means RAY_ADDRESS, or
    else ``local``. ``num_cpus`` is for a local cluster; None for all CPUs.

    A local cluster has no dashboard and ends with the block or with this process. If this process
    is killed, a folder of logs remains; if Ray was starting, two idle processes remain for 80 s.
    Ray always listens on all interfaces, so a local cluster requires a token made for this process
    (``RAY_AUTH_MODE=token``, unless the environment sets another mode). Other clusters keep their
    authentication.
    Raises `RayUnavailableError` if there is no cluster, its versions differ, or it refuses us.
    """
    if ray.is_initialized():
        yield
        return
    address = find_address(address)
    with environment_kept(), contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        folder = None
        if address == LOCAL:
            folder = stack.enter_context(session_folder())
            size = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
            options = {**size, "include_dashboard": False, "_temp_dir": folder}
            set_token()
            # Ray waits 30 s for a node to start: too short on a busy machine
            os.environ.setdefault(START_VARIABLE, str(round(START_TIMEOUT_S)))
        stack.callback(leave, folder)
        _init(address, options)
        _raylet_socket(ray.get_runtime_context().get_node_id())
        yield


def _init(address: str, options: dict[str, Any]) -> None:
    """Start or join a cluster without output; restore the handler of SIGTERM afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with _neutral_folder():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises a plain Exception if the start is slow
        message = f"the Ray cluster at {address} cannot be used: {cause_of(error)}"
        raise RayUnavailableError(message) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _neutral_folder() -> Iterator[None]:
    """Leave the current folder, unless this process imports modules from it.

    Ray starts its processes in the current folder, and lets workers import modules from it.
    """
    before = os.open(".", os.O_PATH)
    try:
        if not {"", str(Path("/proc/self/cwd").readlink())} & set(sys.path):
            os.chdir("/")
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def leave(folder: str | None) -> None:
    """Disconnect; with the ``folder`` of a local cluster, end that cluster, too.

    If the cluster is lost, wait for a limited time: Ray would wait for ever if the head hangs.
    """
    if not ray.is_initialized() or Watch().problem() is None:
        ray.shutdown(wait_for_processes=True)
        return
    if folder is not None:
        _kill_processes_of(folder)
    thread = threading.Thread(target=ray.shutdown, kwargs={"wait_for_processes": True}, daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive():
        atexit.unregister(ray.shutdown)


def _kill_processes_of(folder: str) -> None:
    """Kill the processes of a local cluster: those with its folder in their arguments."""
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if folder.encode() in arguments.read_bytes():
                os.kill(int(arguments.parent.name), signal.SIGKILL)


class Watch:
    """Detects the loss of the connected cluster, much sooner than Ray does."""

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        self._head = context.gcs_address
        self._raylet = _raylet_socket(context.get_node_id())
        self._well_s = self._seen_s = time.monotonic()

    def check(self, *, at_once: bool = False) -> None:
        """Raise `RayUnavailableError` if the cluster is lost.

        Check only if `WATCH_S` seconds have passed since the last check, or if ``at_once`` is set.
        """
        if not at_once and time.monotonic() - self._seen_s < WATCH_S:
            return
        problem = self.problem()
        self._seen_s = time.monotonic()
        if problem is None:
            self._well_s = self._seen_s
        elif problem == RAYLET_DIED or self._seen_s - self._well_s > LOST_TIMEOUT_S:
            raise RayUnavailableError(f"the Ray cluster at {self._head} is lost: {problem}")

    def problem(self) -> str | None:
        """Return which part of the cluster does not answer, and why; None if all do."""
        if not listens(self._raylet):
            return RAYLET_DIED
        problem = head_problem(self._head, WATCH_S)
        return None if problem is None else f"its head: {problem}"


@functools.cache
def _raylet_socket(node_id: str) -> str:
    """Return the socket of a node's raylet; cached, since the head may not answer later."""
    [path] = [node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == node_id]
    return str(path)


def num_cluster_cpus() -> int:
    """Return the number of CPUs of the connected cluster, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


# -------------------------------------------------------------------------------- search


def plan_batches(
    work: Work, numbers: range, num_workers: int, stop: Callable[[], int]
) -> Iterator[tuple[range, list[Result | ValueError]]]:
    """Plan candidates in tasks of one CPU each; tasks of dead workers and nodes are repeated.

    Yields batches of candidate numbers with the results of `Work.plan`. Candidates from ``stop()``
    on are not begun, as far as results have come in; nor any candidate after a `ValueError`. Nodes
    without this version of the package get no more work; a warning names them. Raises
    `RayUnavailableError` if the cluster is lost or gives no answer.
    """
    tasks, batches = _SearchTasks(work), Batches(numbers, num_workers)
    asked: dict[Any, tuple[range, float]] = {}
    watch, heard_s, limit_s = Watch(), time.monotonic(), START_TIMEOUT_S
    while True:
        while len(asked) < num_workers and (batch := batches.next(stop())) is not None:
            asked[tasks.ask(batch)] = batch, time.monotonic()
        if not asked:
            return
        for call in ray.wait(list(asked), num_returns=1, timeout=POLL_S)[0]:
            (batch, asked_s), results = asked.pop(call), tasks.answer(call)
            if results is None:
                batches.repeat(batch)
                continue
            if results and isinstance(results[-1], ValueError):
                batches.end_at(batch.start)
            heard_s, limit_s = time.monotonic(), SILENCE_TIMEOUT_S
            batches.took(batch, heard_s - asked_s)
            yield batch, results
        watch.check()
        if time.monotonic() - heard_s > limit_s:
            raise RayUnavailableError(f"no Ray worker has answered in {limit_s:g} s: {_shortage()}")


class _SearchTasks:
    """Ray tasks that plan batches of candidates, on nodes with this version of the package."""

    def __init__(self, work: Work) -> None:
        """Put the work into the object store.

        The work is pickled here, not by Ray: Ray would make its arrays read-only, and the compiled
        kernels refuse read-only arrays.
        """
        self._task = ray.remote(num_cpus=1, max_retries=-1)(_search_task())
        self._options: dict[str, Any] = {}
        self._work = ray.put(cloudpickle.dumps(work))
        self._unfit: set[str] = set()

    def ask(self, batch: range) -> Any:  # noqa: ANN401 - Ray's
        task = self._task.options(**self._options)
        return task.remote(amp_ray.__version__, self._work, batch)

    def answer(self, call: Any) -> list[Result | ValueError] | None:  # noqa: ANN401 - Ray's
        """Return the results of a finished task; None if its batch has to be planned again."""
        try:
            node, problem, results = ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayTaskError:
            raise  # a bug of this package: keep its traceback
        except RayError as error:
            _LOGGER.info("a batch of the search is lost and planned again: %s", gist_of(error))
            return None
        if problem is None:
            answer: list[Result | ValueError] = results
            return answer
        if node not in self._unfit:
            self._leave_out(node, f"the Ray node {problem}; install this version on every node")
        return None

    def _leave_out(self, node: str, problem: str) -> None:
        self._unfit.add(node)
        if {node["NodeID"] for node in ray.nodes() if node["Alive"]} <= self._unfit:
            raise RayUnavailableError(problem)
        _LOGGER.warning("%s. The others go on with the search", problem)
        self._options = {"label_selector": {"ray.io/node-id": f"!in({','.join(self._unfit)})"}}


def _search_task() -> Callable[..., Any]:
    """Return the function that a worker runs.

    It is nested, because Ray pickles a nested function by value. So it also runs on a node without
    this package, and can report that the package is missing.
    """

    def plan(version, work, numbers):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - see above
        """Plan a batch; return the node, its problem or None, and the results."""
        import gc  # noqa: PLC0415
        import platform  # noqa: PLC0415

        import ray  # noqa: PLC0415

        node, host = ray.get_runtime_context().get_node_id(), platform.node()
        gc.disable()  # imports only make what lives to the end
        try:
            import amp_ray  # noqa: PLC0415
        except ImportError as error:
            return node, f"{host} cannot import amp_ray: {error}", []
        if amp_ray.__version__ != version:
            return node, f"{host} has amp-ray {amp_ray.__version__}, not {version}", []
        from amp_ray.runtime.ray.worker import work_of  # noqa: PLC0415

        here = work_of(work)
        gc.enable()
        return node, None, here.plan(numbers)

    return plan


def _shortage() -> str:
    have, free = ray.cluster_resources(), ray.available_resources()
    return (
        f"each needs a CPU, and of the {have.get('CPU', 0):g} of the Ray cluster "
        f"{free.get('CPU', 0):g} are free"
    )


# -------------------------------------------------------------------------------- trials


class TrialWorker:
    """The actor of one host group's runner; each method call has a thread.

    Trials are ended by ``interrupt``, not by killing the process, since the runner has to clean up.
    If the runner cannot, the hosts' agents clean up when their lease ends.
    """

    def __init__(self, make_runner: MakeRunner, group: int) -> None:
        """Store the arguments for ``open``, since Ray turns an exception raised here into text."""
        self._make_runner, self._group = make_runner, group
        self._runner: Runner | None = None

    def open(self, folder: str, environment: Mapping[str, str]) -> str | AmpRayError:
        """Make the runner; return this package's version, or the error if that fails.

        First enter the driver's working folder, for relative paths, and take over the driver's
        values of `SET_BY_RAY`.
        """
        os.chdir(folder)
        for name in SET_BY_RAY:
            os.environ.pop(name, None)
        os.environ.update(environment)
        try:
            self._runner = self._make_runner(self._group)
        except AmpRayError as error:
            return error
        return amp_ray.__version__

    def run(self, task: Task) -> Outcome | Fault | None:
        """Run one attempt; see `run_task`."""
        return run_task(self._opened, task)

    def interrupt(self) -> None:
        """End the running trial."""
        self._opened.interrupt()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Sweep after attempts; see ``Runner.sweep``."""
        return sweep_lines(self._opened, trial_ids)

    def close(self) -> None:
        """Close the runner, if it was opened."""
        if self._runner is not None:
            self._runner.close()

    @property
    def _opened(self) -> Runner:
        assert self._runner is not None, "open() comes first"
        return self._runner


def actor_pool(make_runner: MakeRunner, num_groups: int) -> RunnerPool:
    """Start a pool whose runners are actors of the connected cluster.

    ``make_runner`` is sent to the actors and must be picklable. They run on the driver's machine,
    which has the keys for the hosts and the folder of the study.
    """
    watch = Watch()
    return RunnerPool(lambda group: RayRunner(make_runner, group, watch), num_groups)


class RayRunner:
    """A `pool.Runner` that runs the trials of one group in an actor.

    The actor reserves no CPU, since it mostly waits. A dead actor is restarted once.
    """

    def __init__(self, make_runner: MakeRunner, group: int, watch: Watch) -> None:
        self._make_runner, self._group, self._watch = make_runner, group, watch
        self._may_restart = True
        self._open()

    def run(self, task: Task) -> Outcome | Fault | None:
        """Run a trial to its end, with `run_task`; restart the actor if it dies."""
        start_s = time.monotonic()
        try:
            outcome: Outcome | Fault | None = self._get(self._actor.run.remote(task))
        except RunnerLostError as error:
            if not self._may_restart:
                raise
            self._restart(task, error)
            return Unreachable(reason=str(error), host="", wall_s=time.monotonic() - start_s)
        return outcome

    def interrupt(self) -> None:
        """Interrupt the running trial, without waiting for its end."""
        self._may_restart = False
        self._actor.interrupt.remote()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Sweep after attempts; see ``Runner.sweep``."""
        lines: list[str] = self._get(self._actor.sweep.remote(trial_ids))
        return lines

    def close(self) -> None:
        """End everything that was started, and the actor."""
        with contextlib.suppress(RunnerLostError):
            self._get(self._actor.close.remote(), CLOSE_TIMEOUT_S)
        ray.kill(self._actor)  # not if the cluster is lost: that takes minutes

    def _open(self) -> None:
        """Start the actor, without Ray's retries: the study's driver decides on those."""
        # Not soft affinity: with it, Ray would spread actors that reserve no CPU over all nodes
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
        worker = ray.remote(TrialWorker).options(scheduling_strategy=here, **options)
        self._actor = worker.remote(self._make_runner, self._group)
        environment = {name: os.environ[name] for name in SET_BY_RAY if name in os.environ}
        try:
            opened = self._actor.open.remote(str(Path.cwd()), environment)
            check_opened(self._get(opened, ACTOR_TIMEOUT_S))
        except RayUnavailableError:
            raise
        except BaseException:
            ray.kill(self._actor)
            raise

    def _restart(self, task: Task, death: RunnerLostError) -> None:
        """Replace a dead actor; the new one first sweeps after the old one's trial."""
        self._may_restart = False
        ray.kill(self._actor)
        try:
            self._open()
            self.sweep((task.trial_id,))
        except RayUnavailableError:
            raise
        except AmpRayError as error:
            raise RunnerLostError(f"{death}; no other could be started: {error}") from error

    def _get(self, call: Any, timeout_s: float = math.inf) -> Any:  # noqa: ANN401 - of any method
        """Wait for the result of an actor's method; raise an error if the cluster is lost."""
        deadline_s = time.monotonic() + timeout_s
        while not ray.wait([call], timeout=POLL_S)[0]:
            self._watch.check()
            if time.monotonic() > deadline_s:
                raise AmpRayError(
                    f"the trial actor of host group {self._group} has not answered in "
                    f"{timeout_s:g} s: see whether the nodes of the Ray cluster are alive"
                )
        try:
            return ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayTaskError:
            raise
        except RayError as error:
            self._watch.check(at_once=True)
            message = f"the actor of host group {self._group} died: {gist_of(error)}"
            raise RunnerLostError(message) from error


def check_opened(answer: str | AmpRayError) -> None:
    """Raise the error that `TrialWorker.open` returned, or one if it returned another version."""
    if isinstance(answer, AmpRayError):
        raise answer
    if answer != amp_ray.__version__:  # it might launch trials differently
        raise AmpRayError(
            f"{platform.node()} has amp-ray {answer} and this machine {amp_ray.__version__}: "
            "install the same version on every node of the Ray cluster"
        )
