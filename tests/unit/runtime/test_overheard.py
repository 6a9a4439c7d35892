from collections.abc import Iterable, Mapping
from typing import Any

from amp_ray.runtime.overheard import OverheardHost
from amp_ray.testing.scripted_host import Message, ScriptedHost


def silent(message: Message) -> Iterable[Message | bytes]:
    del message
    return ()


def test_events_of_ranks_are_heard_and_everything_is_passed_on() -> None:
    heard: list[Mapping[str, Any]] = []
    host = ScriptedHost("h", silent)
    channel = OverheardHost(host, heard.append).open_channel(["agent"])
    said: Message = {"kind": "said", "rank": 0, "data": {"event": "layer"}}
    for message in ({"kind": "alive"}, said):
        host.say(message)
    host.say(b"noise {")  # type: ignore[arg-type] # bytes are sent as they are
    passed = b"".join(channel.read() for _ in range(3))
    assert heard == [{"event": "layer"}]
    assert passed.splitlines()[0] == b'{"kind": "alive"}'
    assert passed.splitlines()[2] == b"noise {"


def test_an_event_that_comes_in_pieces_is_heard_once() -> None:
    class Pieces:
        def __init__(self) -> None:
            self.pieces = [b'{"kind": "sa', b'id", "data": {"event": "x"}}', b"\n", b""]

        def read(self) -> bytes:
            return self.pieces.pop(0)

        def write(self, data: bytes) -> None:
            self.pieces.append(data)

        def close(self) -> None:
            self.pieces.clear()

    class PiecesHost(ScriptedHost):
        def open_channel(self, argv: object) -> Pieces:
            del argv
            return Pieces()

    heard: list[Mapping[str, Any]] = []
    channel = OverheardHost(PiecesHost("h", silent), heard.append).open_channel([])
    while channel.read():
        pass
    assert heard == [{"event": "x"}]


def test_it_is_the_host_that_it_listens_to() -> None:
    host = ScriptedHost("h", silent)
    overheard = OverheardHost(host, lambda _event: None)
    overheard.connect()
    assert (overheard.name, overheard.addresses, overheard.python) == ("h", ("h",), "python")
    assert overheard.run(["true"], timeout_s=1.0).exit_code == 0
