from amp_ray.trials.doctor.host_facts import read_facts
from support.host_reports import healthy_report


def test_facts_are_read_part_by_part() -> None:
    facts = read_facts(
        {"kind": "facts", "version": "3.11.7", "executable": "/p", "disk": {"path": "/x"}}
    )
    assert (facts.version, facts.executable, facts.is_old) == ("3.11.7", "/p", False)
    assert facts.part("disk") == {"path": "/x"}


def test_a_part_that_was_not_sent_has_a_problem() -> None:
    facts = read_facts({"kind": "old", "version": "3.6.9", "executable": None})
    assert facts.is_old
    assert facts.part("disk") == {"problem": "the probe did not say"}
    assert facts.machine is None


def test_root_needs_no_sudo() -> None:
    users = {0: False, 1000: True}
    for uid, needs_sudo in users.items():
        facts = healthy_report(changes={"identity": {"uid": uid}}).facts
        assert facts is not None
        assert facts.needs_sudo is needs_sudo


def test_only_the_device_cpu_is_no_gpu() -> None:
    assert not healthy_report(device="cpu").spec.has_gpu
    assert healthy_report(device="T4").spec.has_gpu
