"""Ray: a connection to a cluster, tasks that search, and actors that run trials.

The only ``import ray``. What an actor does stands in `trial_worker.TrialWorker`, what is done with
actors in `actor_pool`.
"""

import atexit
import contextlib
import functools
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import ray
from ray import cloudpickle
from ray._private import services as ray_services
from ray._private import worker as ray_worker
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import amp_ray
from amp_ray.cost.estimate import Result
from amp_ray.runtime.ray.actor_pool import ActorLostError, ActorPool, ThreadActors
from amp_ray.runtime.ray.address import (
    AUTO,
    LOCAL,
    RayUnavailableError,
    allow_slow_start,
    cause_of,
    check_address,
    environment_kept,
    find_address,
    gist_of,
    head_problem,
    listens,
    session_folder,
    set_token,
)
from amp_ray.runtime.ray.trial_worker import Home, MakeRunner, TrialWorker
from amp_ray.search.candidate_queue import Work
from amp_ray.units import MIB

_LOGGER = logging.getLogger(__name__)
OBJECT_STORE_BYTES: Final = 256 * MIB  # of our own cluster: one experiment and a few results
FETCH_TIMEOUT_S: Final = 30.0  # of a ready result: longer than Ray takes to notice a death
LOST_TIMEOUT_S: Final = 12.0  # of a silent head; after 60 s Ray would end this process
LEAVE_TIMEOUT_S: Final = 15.0  # of a lost cluster: 1 to 7 s, or for ever if its head hangs
# Until the node has started, and until its first worker answers: 1 s, on a busy machine over 60 s
START_TIMEOUT_S: Final = 120.0
SILENCE_TIMEOUT_S: Final = 300.0  # without any answer: a dead node is noticed in 30 s
BATCHES_PER_WORKER: Final = 32  # enough that all workers end about together; a task costs 2 ms
WATCH_S: Final = 2.0  # between looks at the cluster, and for its head to answer
RAYLET_DIED: Final = "its process on this machine, the raylet, has died"
POLL_S: Final = 0.5  # how often a wait for answers stops to see whether the cluster lives


# ---------------------------------------------------------------------------- connection


@contextlib.contextmanager
def connect(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """Be connected to a Ray cluster inside a ``with`` block; a connection that is there is used.

    The address is ``host:port`` of the head of a cluster of which this machine is a node, ``auto``
    for the one that was started on this machine, or ``local``; None for what RAY_ADDRESS says, or
    else ``local``. Only a cluster that is started here has ``num_cpus``, None for all.

    A cluster that is started here has no dashboard and ends with the block, or with this process
    however that dies; killed, it leaves a folder of logs, and while Ray starts, two idle processes
    for 80 s. Ray listens on all interfaces of the machine, whatever address it is told; so such a
    cluster takes orders only with a token, made for this process (``RAY_AUTH_MODE=token``, unless
    the environment says otherwise). A cluster that is there keeps the authentication that it has.
    Raises `RayUnavailableError` if there is no cluster, or it is of other versions or refuses us.
    """
    if ray.is_initialized():
        yield
        return
    found = find_address(address)
    with environment_kept(), contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if found == LOCAL:
            folder = stack.enter_context(session_folder())
            size = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
            options = {**size, "include_dashboard": False, "_temp_dir": folder}
            set_token()
            allow_slow_start(START_TIMEOUT_S)
        stack.callback(leave)
        _init(found, options)
        # Ray prints the death of a worker to stdout, log_to_driver or not; results belong there.
        ray_worker._worker_logs_enabled = False  # noqa: SLF001 - as Ray's own debugger does
        yield


def _init(address: str, options: dict[str, Any]) -> None:
    """Start or join a cluster, quietly; SIGTERM keeps the meaning that it has."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address == AUTO:  # the cluster that was started last may be dead
            check_address(ray_services.canonicalize_bootstrap_address(address) or AUTO)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # of a slow start Ray says so by a plain Exception
        message = f"the Ray cluster at {address} cannot be used: {cause_of(error)}"
        raise RayUnavailableError(message) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def leave() -> None:
    """Disconnect, and end a cluster of our own; do not wait for ever for one that is lost."""
    if not ray.is_initialized() or Watch().problem() is None:
        ray.shutdown(wait_for_processes=True)
        return
    for processes in ray_worker._global_node.all_processes.values():  # noqa: SLF001 - only ours
        for process in processes:
            process.process.kill()
    thread = threading.Thread(target=ray.shutdown, kwargs={"wait_for_processes": True}, daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive():
        atexit.unregister(ray.shutdown)


class Watch:
    """Notices that the cluster that we are connected to is lost, much sooner than Ray does."""

    def __init__(self) -> None:
        self._raylet = ray_worker._global_node.raylet_socket_name  # noqa: SLF001
        self._head = ray.get_runtime_context().gcs_address
        self._well_s = self._seen_s = time.monotonic()

    def check(self, *, at_once: bool = False) -> None:
        """Look, now and then."""
        if not at_once and time.monotonic() - self._seen_s < WATCH_S:
            return
        problem = self.problem()
        self._seen_s = time.monotonic()
        if problem is None:
            self._well_s = self._seen_s
        elif problem == RAYLET_DIED or self._seen_s - self._well_s > LOST_TIMEOUT_S:
            raise RayUnavailableError(f"the Ray cluster at {self._head} is lost: {problem}")

    def problem(self) -> str | None:
        """Tell what does not answer; None if all does."""
        if not listens(self._raylet):
            return RAYLET_DIED
        problem = head_problem(self._head, WATCH_S)
        return None if problem is None else f"its head: {problem}"


def num_cluster_cpus() -> int:
    """Count the CPUs of the cluster that we are connected to."""
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def _ready(calls: Iterable[Any], timeout_s: float) -> list[Any]:
    """Wait for the first of some calls to end; return all that have."""
    waiting = list(calls)
    if not waiting:
        time.sleep(timeout_s)
        return []
    if not ray.wait(waiting, num_returns=1, timeout=timeout_s)[0]:
        return []
    ready: list[Any] = ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
    return ready


# -------------------------------------------------------------------------------- search


def plan_batches(
    work: Work, numbers: range, num_workers: int
) -> Iterator[tuple[range, list[Result | ValueError]]]:
    """Plan candidates by tasks of one CPU each; a worker or node that dies only costs time.

    Yields some of the numbers, and what `Work.plan` makes of them. After an error of the user's,
    what comes later in their order is not begun any more. Nodes that have another version of this
    package, or none, are named in a warning and get no more work. Raises `RayUnavailableError` if
    the cluster is lost, or gives no answer.
    """
    tasks = _SearchTasks(work)
    # The first batch is empty: its answer tells that a worker has started.
    # Small batches, so that all workers end together
    size = max(1, math.ceil(len(numbers) / (num_workers * BATCHES_PER_WORKER)))
    batches = (numbers[start : start + size] for start in range(0, len(numbers), size))
    waiting = deque([numbers[:0], *batches])
    asked: dict[Any, range] = {}
    watch, heard_s, limit_s = Watch(), time.monotonic(), START_TIMEOUT_S
    while waiting or asked:
        while waiting and len(asked) < num_workers:
            batch = waiting.popleft()
            asked[tasks.ask(batch)] = batch
        for call in _ready(asked, POLL_S):
            batch, found = asked.pop(call), tasks.answer(call)
            if found is None:
                waiting.appendleft(batch)
                continue
            if found and isinstance(found[-1], ValueError):
                waiting = deque(other for other in waiting if other.start < batch.start)
            heard_s, limit_s = time.monotonic(), SILENCE_TIMEOUT_S
            yield batch, found
        watch.check()
        if time.monotonic() - heard_s > limit_s:
            raise RayUnavailableError(f"no Ray worker has answered in {limit_s:g} s: {_shortage()}")


class _SearchTasks:
    """Tasks that plan batches of a work, on nodes that have this version of the package."""

    def __init__(self, work: Work) -> None:
        """Put the work into the cluster.

        It is pickled here: arrays straight from the object store are read-only, which kernels
        refuse.
        """
        self._task = ray.remote(num_cpus=1, max_retries=-1)(_search_task())
        self._options: dict[str, Any] = {}
        self._work = ray.put(cloudpickle.dumps(work))
        self._unfit: set[str] = set()

    def ask(self, batch: range) -> Any:  # noqa: ANN401 - Ray's
        """Begin a task."""
        task = self._task.options(**self._options)
        return task.remote(amp_ray.__version__, self._work, batch)

    def answer(self, call: Any) -> list[Result | ValueError] | None:  # noqa: ANN401 - Ray's
        """Return the results of a task that has ended; None if it has to run again."""
        try:
            node, problem, found = ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayTaskError:
            raise  # a mistake of ours, with its traceback
        except RayError as error:
            _LOGGER.info("a batch of the search is lost and planned again: %s", gist_of(error))
            return None
        if problem is None:
            results: list[Result | ValueError] = found
            return results
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
    """Return what a worker does.

    Ray sends it as it stands, since it is defined within a function; so it begins also on a node
    that has no such package, and can say so.
    """

    def plan(version, work, numbers):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - see above
        """Plan a batch; return the node, what is wrong with it, and the results."""
        import platform  # noqa: PLC0415

        import ray  # noqa: PLC0415

        node, host = ray.get_runtime_context().get_node_id(), platform.node()
        try:
            import amp_ray  # noqa: PLC0415
        except ImportError as error:
            return node, f"{host} cannot import amp_ray: {error}", []
        if amp_ray.__version__ != version:
            return node, f"{host} has amp-ray {amp_ray.__version__}, not {version}", []
        from amp_ray.runtime.ray.actors import work_of  # noqa: PLC0415

        return node, None, work_of(work).plan(numbers)

    return plan


@functools.lru_cache(maxsize=1)
def work_of(pickled: bytes) -> Work:
    """Unpickle a work; once per worker, since planners fill caches."""
    work: Work = cloudpickle.loads(pickled)
    return work


def _shortage() -> str:
    have, free = ray.cluster_resources(), ray.available_resources()
    return (
        f"each needs a CPU, and of the {have.get('CPU', 0):g} of the Ray cluster "
        f"{free.get('CPU', 0):g} are free"
    )


# -------------------------------------------------------------------------------- trials


def actor_pool(make_runner: MakeRunner, num_groups: int) -> ActorPool:
    """Start a pool of trial actors on the cluster that we are connected to.

    ``make_runner`` is sent to the actors and must be picklable. They run on the driver's machine,
    which has the keys for the hosts and the folder of the study.
    """
    return ActorPool(RayTrialActors(make_runner), num_groups)


class RayTrialActors:
    """Trial actors: no CPU, since they wait, and no retries, since the journal decides on those."""

    def __init__(self, make_runner: MakeRunner) -> None:
        self._watch = Watch()
        self._worker = ray.remote(TrialWorker).options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            # Soft affinity scatters actors that need no CPU over all nodes.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                node_id=ray.get_runtime_context().get_node_id(), soft=False
            ),
        )
        self._make_runner = make_runner
        self._home = Home.of_this_process()
        self._actors: dict[int, Any] = {}

    def begin(self, group: int) -> None:
        """Start a group's actor anew."""
        self._actors[group] = self._worker.remote(self._make_runner, group, self._home)

    def call(self, group: int, method: str, *arguments: object) -> Any:  # noqa: ANN401 - Ray's
        """Call a method."""
        return getattr(self._actors[group], method).remote(*arguments)

    def ready(self, calls: Iterable[Any], timeout_s: float) -> list[Any]:
        """Wait for the first of some calls to end, or less long; return all that have."""
        self._watch.check()
        return _ready(calls, min(timeout_s, POLL_S))

    def result(self, call: Any) -> Any:  # noqa: ANN401 - Ray's
        """Return the result of a call that has ended."""
        try:
            return ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayTaskError:
            raise
        except RayError as error:
            self._watch.check(at_once=True)
            raise ActorLostError(gist_of(error)) from error

    def end(self, group: int) -> None:
        """Kill a group's actor."""
        ray.kill(self._actors[group], no_restart=True)

    def substitute(self) -> ThreadActors:
        """Disconnect from Ray, and return threads that do the same."""
        leave()  # without its head, Ray would end this process after a while
        return ThreadActors(self._make_runner)
