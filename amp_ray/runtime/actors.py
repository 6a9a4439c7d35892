"""Ray: a connection to a cluster, and actors that search and run trials. The only ``import ray``.

Actors hold no logic: what they do stands in `search_crew.SearchWorker` and
`trial_worker.TrialWorker`, what is done with them in `search_crew` and `actor_pool`.
"""

import contextlib
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import ray
from ray import cloudpickle
from ray._private import worker as ray_worker
from ray.exceptions import (
    ActorUnavailableError,
    AuthenticationError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from amp_ray.cost.estimate import Result
from amp_ray.errors import AmpRayError
from amp_ray.runtime.actor_pool import ActorLostError, ActorPool
from amp_ray.runtime.ray_address import (
    LOCAL,
    cause_of,
    environment_kept,
    find_address,
    gist_of,
    session_folder,
    set_token,
)
from amp_ray.runtime.search_batches import Answer, Batch
from amp_ray.runtime.search_crew import CrewSearch, Event, Hello, SearchWorker, Work
from amp_ray.runtime.trial_worker import Home, MakeRunner, TrialWorker
from amp_ray.units import MIB

_LOGGER = logging.getLogger(__name__)

OBJECT_STORE_BYTES: Final = 256 * MIB
"""Of a cluster that is started here: it holds one experiment and a few results."""

FETCH_TIMEOUT_S: Final = 30.0
"""To fetch a result that is ready: more than Ray needs to notice that a node has died."""


# ---------------------------------------------------------------------------- connection


@contextlib.contextmanager
def connect(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """Be connected to a Ray cluster inside a ``with`` block; a connection that is there is used.

    A cluster that is started here has no dashboard and ends with the block, or with this process
    however that dies; killed, it leaves a folder of logs, and while Ray starts, two idle processes
    for 80 s. Ray listens on all interfaces of the machine, whatever address it is told; so such a
    cluster takes orders only with a token, made for this process (``RAY_AUTH_MODE=token``, unless
    the environment says otherwise). A cluster that is there keeps the authentication that it has.

    Args:
        address: ``host:port`` of the head of a cluster of which this machine is a node, ``auto``
            for the one that was started on this machine, or ``local``; None for what RAY_ADDRESS
            says, or else ``local``.
        num_cpus: Of a cluster that is started here; None for all.

    Raises:
        InputError: If the address cannot be one.
        AmpRayError: If there is no cluster, or it is of other versions or refuses us.
    """
    if ray.is_initialized():
        yield
        return
    place = find_address(address)
    with environment_kept(), contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if place == LOCAL:
            folder = stack.enter_context(session_folder())
            size = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
            options = {**size, "include_dashboard": False, "_temp_dir": folder}
            set_token()
        stack.callback(ray.shutdown, wait_for_processes=True)
        _init(place, options)
        # Ray prints the death of a worker to stdout, log_to_driver or not; results belong there.
        ray_worker._worker_logs_enabled = False  # noqa: SLF001 - as Ray's own debugger does
        yield


def _init(place: str, options: dict[str, Any]) -> None:
    """Start or join a cluster, quietly; SIGTERM keeps the meaning that it has."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=place, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError, AuthenticationError) as error:
        message = f"the Ray cluster at {place} cannot be used: {cause_of(error)}"
        raise AmpRayError(message) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


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


def plan_candidates(work: Work, num_workers: int, num_done: Callable[[int], None]) -> list[Result]:
    """Plan all candidates with actors, one CPU each; a dead one only costs time.

    Args:
        work: Planner and candidates; put once into the cluster.
        num_workers: How many actors. The search goes on with those that get a CPU.
        num_done: Called with the number of results that there are.

    Returns:
        Results in the order of the candidates.

    Raises:
        ValueError: What planning in one process would raise.
        AmpRayError: If no actor starts, or all fall silent.
    """
    crew = RayCrew(work, num_workers)
    try:
        return CrewSearch(crew, len(work.candidates), num_done).run()
    finally:
        crew.close()


class _SearchActor:
    """A search worker that fetches its work once: Ray stores no arguments of a restart."""

    _worker: SearchWorker | None = None

    def hello(self) -> Hello:
        """Tell that the process is there."""
        return Hello.here()

    def plan(self, batch: Batch, shared: Sequence[Any]) -> Answer:
        """Plan a batch of the work that lies in the object store."""
        if self._worker is None:
            pickled = ray.get(shared[0], timeout=FETCH_TIMEOUT_S)
            self._worker = SearchWorker(cloudpickle.loads(pickled))
        return self._worker.plan(batch)


class RayCrew:
    """Search workers as actors; Ray starts them again, elsewhere if need be."""

    def __init__(self, work: Work, num_workers: int) -> None:
        """Ask for the actors, and for a sign of life from each."""
        worker = ray.remote(_SearchActor).options(
            num_cpus=1, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD"
        )
        # Pickled here: arrays straight from the object store are read-only, which kernels refuse.
        # Held here as long as an actor may start again.
        self._shared = (ray.put(cloudpickle.dumps(work)),)
        self._actors = [worker.remote() for _ in range(num_workers)]
        self._asked: dict[Any, tuple[int, Batch | None]] = {
            actor.hello.remote(): (number, None) for number, actor in enumerate(self._actors)
        }

    @property
    def num_workers(self) -> int:
        """How many were asked for."""
        return len(self._actors)

    def ask(self, worker: int, batch: Batch) -> None:
        """Give a worker a batch."""
        self._asked[self._actors[worker].plan.remote(batch, self._shared)] = (worker, batch)

    def events(self, timeout_s: float) -> list[Event]:
        """Wait for answers."""
        return [self._event(ref, *self._asked.pop(ref)) for ref in _ready(self._asked, timeout_s)]

    def shortage(self) -> str:
        """Say how many CPUs there are."""
        have, free = ray.cluster_resources(), ray.available_resources()
        return (
            f"each needs a CPU, and of the {have.get('CPU', 0):g} of the Ray cluster "
            f"{free.get('CPU', 0):g} are free; end what uses them, or search without Ray"
        )

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _event(self, ref: Any, worker: int, batch: Batch | None) -> Event:  # noqa: ANN401 - Ray's
        """Fetch an answer; one that is lost can be worked out again."""
        try:
            value = ray.get(ref, timeout=FETCH_TIMEOUT_S)
        except RayTaskError:
            raise  # a mistake of ours, with its traceback
        except RayActorError as error:
            passing = isinstance(error, ActorUnavailableError) and batch is not None
            return Event(worker=worker, batch=batch, gone=None if passing else gist_of(error))
        except RayError:
            return Event(worker=worker, batch=batch)
        if isinstance(value, Hello):
            value.check_version()
            _LOGGER.info("search worker %d: process %d on %s", worker, value.pid, value.host)
            return Event(worker=worker)
        return Event(worker=worker, batch=batch, answer=value)


# -------------------------------------------------------------------------------- trials


def actor_pool(make_runner: MakeRunner, num_groups: int, *, spread: bool = False) -> ActorPool:
    """Start a pool of trial actors on the cluster that we are connected to.

    Args:
        make_runner: From the number of a group to its runner; sent to the actors, so it and what
            it holds must be picklable.
        num_groups: How many groups, an actor each.
        spread: Whether actors are spread over the nodes of the cluster. By default they run on
            the driver's machine, which has the keys for the hosts and the folder of the study.

    Raises:
        InputError: What making a runner raised.
        AmpRayError: If an actor does not start in time.
    """
    return ActorPool(RayTrialActors(make_runner, spread=spread), num_groups)


class RayTrialActors:
    """Trial actors: no CPU, since they wait, and no retries, since the journal decides on those."""

    def __init__(self, make_runner: MakeRunner, *, spread: bool) -> None:
        """Prepare; actors are started by ``begin``."""
        here = _this_node()
        self._spread = spread
        self._worker = ray.remote(TrialWorker)
        self._make_runner = make_runner
        self._home = Home.of_this_process(here)
        self._actors: dict[int, Any] = {}
        self._num_begun: Counter[int] = Counter()

    def begin(self, group: int) -> None:
        """Start a group's actor anew, on the next node if actors are spread."""
        node = self._home.node
        if self._spread:
            alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
            node = alive[(group + self._num_begun[group]) % len(alive)]
        self._num_begun[group] += 1
        worker = self._worker.options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            # Soft affinity scatters actors that need no CPU over all nodes.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        self._actors[group] = worker.remote(self._make_runner, group, self._home, _this_node)

    def call(self, group: int, method: str, *arguments: object) -> Any:  # noqa: ANN401 - Ray's
        """Call a method."""
        return getattr(self._actors[group], method).remote(*arguments)

    def ready(self, calls: Iterable[Any], timeout_s: float) -> list[Any]:
        """Wait for the first of some calls to end; return all that have."""
        return _ready(calls, timeout_s)

    def result(self, call: Any) -> Any:  # noqa: ANN401 - Ray's
        """Return the result of a call that has ended."""
        try:
            return ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayTaskError:
            raise
        except RayError as error:
            raise ActorLostError(gist_of(error)) from error

    def end(self, group: int) -> None:
        """Kill a group's actor."""
        ray.kill(self._actors[group], no_restart=True)


def _this_node() -> str:
    """Return what the cluster calls the machine of this process."""
    return str(ray.get_runtime_context().get_node_id())
