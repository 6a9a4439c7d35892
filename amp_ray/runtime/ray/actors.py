"""Ray: a connection to a cluster, tasks that search, and actors that run trials.

The only ``import ray``. What a trial actor does stands in `TrialWorker`.
"""

import atexit
import contextlib
import functools
import logging
import math
import os
import platform
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import amp_ray
from amp_ray.cost.estimate import Result
from amp_ray.errors import AmpRayError, InterruptedTrialError
from amp_ray.runtime.ray.address import (
    LOCAL,
    RayUnavailableError,
    allow_slow_start,
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
from amp_ray.search.candidate_queue import Work
from amp_ray.trials.outcome import Outcome, Unreachable
from amp_ray.units import MIB

with environment_kept():
    # Ray prints the death of a worker to stdout, log_to_driver or not; results belong there. It
    # reads what it is to leave out when it is imported.
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = ".*"
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_LOGGER = logging.getLogger(__name__)
OBJECT_STORE_BYTES: Final = 256 * MIB  # of our own cluster: one experiment and a few results
FETCH_TIMEOUT_S: Final = 30.0  # of a ready result: longer than Ray takes to notice a death
LOST_TIMEOUT_S: Final = 12.0  # of a silent head; after 60 s Ray would end this process
LEAVE_TIMEOUT_S: Final = 15.0  # of a lost cluster: 1 to 8 s, or for ever if its head hangs
# Until the node has started, and until its first worker answers: 1 s, on a busy machine over 60 s
START_TIMEOUT_S: Final = 120.0
ACTOR_TIMEOUT_S: Final = 180.0  # of an actor: a new process takes 1 s, if busy 60 s
SILENCE_TIMEOUT_S: Final = 300.0  # without any answer: a dead node is noticed in 30 s
BATCHES_PER_WORKER: Final = 32  # enough that all workers end about together; a task costs 2 ms
WATCH_S: Final = 2.0  # between looks at the cluster, and for its head to answer
RAYLET_DIED: Final = "its process on this machine, the raylet, has died"
POLL_S: Final = 0.5  # how often a wait for answers stops to see whether the cluster lives
# Variables that Ray may set in its workers; trials of this machine inherit the driver's
SET_BY_RAY: Final = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


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
    address = find_address(address)
    with environment_kept(), contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        folder = None
        if address == LOCAL:
            folder = stack.enter_context(session_folder())
            size = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
            options = {**size, "include_dashboard": False, "_temp_dir": folder}
            set_token()
            allow_slow_start(START_TIMEOUT_S)
        stack.callback(leave, folder)
        _init(address, options)
        _raylet_socket(ray.get_runtime_context().get_node_id())
        yield


def _init(address: str, options: dict[str, Any]) -> None:
    """Start or join a cluster, quietly; SIGTERM keeps the meaning that it has."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # of a slow start Ray says so by a plain Exception
        message = f"the Ray cluster at {address} cannot be used: {cause_of(error)}"
        raise RayUnavailableError(message) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def leave(folder: str | None) -> None:
    """Disconnect, and end a cluster of our own, which has a folder.

    Of a lost one, a head that hangs would be waited for without an end.
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
    """Kill the processes that have the folder of a cluster among their arguments."""
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if folder.encode() in arguments.read_bytes():
                os.kill(int(arguments.parent.name), signal.SIGKILL)


class Watch:
    """Notices that the cluster that we are connected to is lost, much sooner than Ray does."""

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        self._head = context.gcs_address
        self._raylet = _raylet_socket(context.get_node_id())
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


@functools.cache
def _raylet_socket(node_id: str) -> str:
    """Return where the process of a node listens; asked once, while the head answers."""
    [path] = [node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == node_id]
    return str(path)


def num_cluster_cpus() -> int:
    """Count the CPUs of the cluster that we are connected to."""
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


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
        for call in ray.wait(list(asked), num_returns=1, timeout=POLL_S)[0]:
            batch, results = asked.pop(call), tasks.answer(call)
            if results is None:
                waiting.appendleft(batch)
                continue
            if results and isinstance(results[-1], ValueError):
                waiting = deque(later for later in waiting if later.start < batch.start)
            heard_s, limit_s = time.monotonic(), SILENCE_TIMEOUT_S
            yield batch, results
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
            node, problem, results = ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayTaskError:
            raise  # a mistake of ours, with its traceback
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a process tells of itself before it gets work."""

    version: str
    pid: int
    host: str

    @classmethod
    def here(cls) -> "Hello":
        """Describe this process."""
        return cls(version=amp_ray.__version__, pid=os.getpid(), host=platform.node())

    def check_version(self) -> None:
        """Refuse a process that runs another version: it might launch differently."""
        if self.version != amp_ray.__version__:
            raise AmpRayError(
                f"{self.host} has amp-ray {self.version} and this machine {amp_ray.__version__}: "
                "install the same version on every node of the Ray cluster"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where the driver runs."""

    folder: str  # its working folder, from which experiments name their files
    environment: Mapping[str, str]  # what it has of `SET_BY_RAY`

    @classmethod
    def of_this_process(cls) -> "Home":
        """Describe this process as the driver."""
        environment = {name: os.environ[name] for name in SET_BY_RAY if name in os.environ}
        return cls(folder=str(Path.cwd()), environment=environment)

    def enter(self) -> None:
        """Make this process, on the same machine, see what the driver sees."""
        os.chdir(self.folder)
        for name in SET_BY_RAY:
            os.environ.pop(name, None)
        os.environ.update(self.environment)


class TrialWorker:
    """One host group's runner, in a process of its own; each call of a method is a thread.

    Trials end by an interruption, never by killing the process: only the runner can clean up, and
    where it cannot, the hosts' agents do by their lease.
    """

    def __init__(self, make_runner: MakeRunner, group: int, home: Home) -> None:
        """Remember what ``open`` needs: an error there arrives as it is, one here as text."""
        self._make_runner, self._group, self._home = make_runner, group, home
        self._runner: Runner | None = None

    def open(self) -> Hello | AmpRayError:
        """Make the runner, or return why not."""
        self._home.enter()
        try:
            self._runner = self._make_runner(self._group)
        except AmpRayError as error:
            return error
        return Hello.here()

    def run(self, task: Task) -> Outcome | Fault | None:
        """Run one attempt."""
        return run_task(self._opened, task)

    def interrupt(self) -> None:
        """End the trial that runs."""
        self._opened.interrupt()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """End and remove what attempts have left."""
        return sweep_lines(self._opened, trial_ids)

    def close(self) -> None:
        """End everything; an actor that never opened has nothing to end."""
        if self._runner is not None:
            self._runner.close()

    @property
    def _opened(self) -> Runner:
        assert self._runner is not None, "open() comes first"
        return self._runner


def actor_pool(make_runner: MakeRunner, num_groups: int) -> RunnerPool:
    """Start a pool whose runners are actors of the cluster that we are connected to.

    ``make_runner`` is sent to the actors and must be picklable. They run on the driver's machine,
    which has the keys for the hosts and the folder of the study.
    """
    watch = Watch()
    return RunnerPool(lambda group: RayRunner(make_runner, group, watch), num_groups)


class RayRunner:
    """Runs the trials of one group by an actor; see `pool.Runner`.

    The actor needs no CPU, since it waits. An actor that dies is started again once.
    """

    def __init__(self, make_runner: MakeRunner, group: int, watch: Watch) -> None:
        self._make_runner, self._group, self._watch = make_runner, group, watch
        self._may_restart = True
        self._open()

    def run(self, task: Task) -> Outcome:
        """Run a trial to its end, which is also the death of the actor."""
        start_s = time.monotonic()
        try:
            answer = self._get(self._actor.run.remote(task))
        except RunnerLostError as error:
            if not self._may_restart:
                raise
            self._restart(task, error)
            return Unreachable(reason=str(error), host="", wall_s=time.monotonic() - start_s)
        if isinstance(answer, Fault):
            raise answer.error
        if answer is None:
            raise InterruptedTrialError
        outcome: Outcome = answer
        return outcome

    def interrupt(self) -> None:
        """End the trial that runs; returns at once."""
        self._may_restart = False
        self._actor.interrupt.remote()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """End and remove what attempts have left."""
        lines: list[str] = self._get(self._actor.sweep.remote(trial_ids))
        return lines

    def close(self) -> None:
        """End everything that was started, and the actor."""
        with contextlib.suppress(RunnerLostError):
            self._get(self._actor.close.remote(), CLOSE_TIMEOUT_S)
        ray.kill(self._actor)  # not of a lost cluster, where that takes minutes

    def _open(self) -> None:
        """Start the actor. There are no retries by Ray, since the journal decides on those."""
        # Soft affinity scatters actors that need no CPU over all nodes.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
        worker = ray.remote(TrialWorker).options(scheduling_strategy=here, **options)
        self._actor = worker.remote(self._make_runner, self._group, Home.of_this_process())
        try:
            hello = self._get(self._actor.open.remote(), ACTOR_TIMEOUT_S)
            if isinstance(hello, Hello):
                hello.check_version()
        except RayUnavailableError:
            raise
        except BaseException:
            ray.kill(self._actor)
            raise
        if not isinstance(hello, Hello):
            ray.kill(self._actor)
            raise hello
        _LOGGER.info("trial actor %d: process %d on %s", self._group, hello.pid, hello.host)

    def _restart(self, task: Task, death: RunnerLostError) -> None:
        """Replace a dead actor; the new one first ends what the old one has left."""
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
        """Wait for the result of a call, as long as the cluster lives."""
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
