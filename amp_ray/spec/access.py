"""How hosts are reached by SSH: what an experiment file says of keys, users and time limits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """How hosts are reached; whatever stands in a target goes first, then this, then the config.

    Args:
        known_hosts: File of the keys that are trusted; no other is.
        identities: Private key files to try, in order.
        config: OpenSSH client configuration to follow; None for none.
        user: For targets that name none.
        use_agent: Whether keys of a running ssh-agent are tried too.
        connect_timeout_s: For each step of setting up a connection.
        python: Interpreter on the hosts that runs the agent; an absolute path is safest.
    """

    known_hosts: str = "~/.ssh/known_hosts"
    identities: tuple[str, ...] = ()
    config: str | None = "~/.ssh/config"
    user: str | None = None
    use_agent: bool = False
    connect_timeout_s: float = 10.0
    python: str = "python3"
