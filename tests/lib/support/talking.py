"""Commands on hosts, for tests of what their output says."""

from collections.abc import Sequence

from amp_ray.runtime.hosts.host import Host


def output_of(host: Host, argv: Sequence[str], text: str = "") -> str:
    """Return what a command prints, both streams together, given ``text`` as its stdin."""
    channel = host.open_channel(argv)
    channel.write(text.encode())
    channel.close()
    return b"".join(iter(channel.read, b"")).decode()
