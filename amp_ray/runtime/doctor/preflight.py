"""Before a study launches anything: what the doctor says would keep its trials from running."""

from amp_ray.errors import HostError
from amp_ray.runtime.doctor.diagnosis import preflight
from amp_ray.runtime.hosts.make_hosts import host_maker
from amp_ray.spec.experiment import Experiment


def check_hosts(experiment: Experiment) -> None:
    """Refuse to begin on hosts where trials cannot run.

    Raises:
        InputError: If trials shall run over SSH and the experiment names no hosts.
        HostError: With everything that was found and how to mend it.
    """
    findings = preflight(experiment, host_maker(experiment))
    if findings:
        told = "\n".join(f"  {finding}" for finding in findings)
        message = f"hosts are not fit for trials (amp-ray doctor tells more):\n{told}"
        raise HostError(message)
