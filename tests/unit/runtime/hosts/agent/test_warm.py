from support.programs import python

CLOSE = """
import os
from amp_ray.runtime.hosts.agent.warm import _close_all_but

ends = [*os.pipe(), *os.pipe()]
_close_all_but(ends[1])
for end in ends:
    try:
        os.fstat(end)
        print("open")
    except OSError:
        print("closed")
"""


def test_a_rank_keeps_no_descriptor_but_its_pipe() -> None:
    assert python("-c", CLOSE).stdout.split() == ["closed", "open", "closed", "closed"]
