"""How hosts are reached by SSH: keys, users and time limits of an experiment file."""

from amp_ray.inputs.section import Flag, Seconds, Section, Text


class SshSettings(Section):
    """``trials.ssh``; what stands in a target goes first, then this, then the configuration."""

    user: Text | None = None
    """For hosts that are not written `user@host`. Default: the configuration's, else yours."""
    identities: tuple[Text, ...] = ()
    """Private keys to try, in order."""
    known_hosts: Text = "~/.ssh/known_hosts"
    """Keys of hosts that are trusted; no other is. Default: OpenSSH's files."""
    config: Text | None = "~/.ssh/config"
    """OpenSSH client configuration to follow."""
    use_agent: Flag = False
    """Whether the keys of a running ssh-agent are tried too."""
    connect_timeout_s: Seconds = 10.0
    """Limit of each step of setting up a connection."""
    python: Text = "python3"
    """Interpreter that runs the agent: 3.8 or newer, an absolute path is safest."""
