"""How hosts are reached by SSH: what an experiment file says of keys, users and time limits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """How hosts are reached; whatever stands in a target goes first, then this, then the config."""

    known_hosts: str = "~/.ssh/known_hosts"  # file of the keys that are trusted; no other is
    identities: tuple[str, ...] = ()  # private key files to try, in order
    config: str | None = "~/.ssh/config"  # OpenSSH client configuration to follow; None for none
    user: str | None = None  # for targets that name none
    use_agent: bool = False  # whether keys of a running ssh-agent are tried too
    connect_timeout_s: float = 10.0  # for each step of setting up a connection
    # Interpreter on the hosts that runs the agent; an absolute path is safest
    python: str = "python3"
