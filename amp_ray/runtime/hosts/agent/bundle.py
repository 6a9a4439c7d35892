"""How the agent travels: all modules in one message, run from memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULES = (
    *("bundle", "processes", "isolation", "network", "wire", "stdio", "store"),
    *("log", "rank", "warm", "job", "slots", "leftovers", "main"),
)
"""In the order of their imports."""

LENGTH_DIGITS = 10

BOOTSTRAP = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import json, os, types
def take(num_bytes):
    data = b""
    while len(data) < num_bytes:
        piece = os.read(0, num_bytes - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data
head = take(10)
body = take(int(head))
package = types.ModuleType("amp_ray_agent")
package.__path__, package.data = [], head + body
sys.modules["amp_ray_agent"] = package
for name, source in json.loads(body.decode()):
    module = types.ModuleType("amp_ray_agent." + name)
    module.__package__ = "amp_ray_agent"
    sys.modules[module.__name__] = module
    exec(compile(source, "amp_ray_agent/" + name + ".py", "exec"), module.__dict__)
sys.modules["amp_ray_agent." + sys.argv[1]].main()
"""
"""Runs as ``python -c BOOTSTRAP MODULE ...`` and reads no byte more than the bundle; nothing is
imported from the folder that it is started in."""


def make_bundle(modules: Sequence[str] = MODULES) -> bytes:
    """Pack the agent's modules: the length in ten digits, then JSON."""
    folder = Path(__file__).parent
    pairs = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in modules]
    body = json.dumps(pairs).encode()
    return f"{len(body):0{LENGTH_DIGITS}d}".encode() + body
