from pathlib import Path

import pytest

from amp_ray.errors import HostError
from amp_ray.inputs.hostfile import SshTarget
from amp_ray.inputs.ssh_settings import SshSettings
from amp_ray.runtime.hosts.ssh_target import find_routes


def test_a_target_wins_over_settings_and_settings_over_the_configuration() -> None:
    found = {"hostname": "10.0.0.1", "user": "config", "port": "7"}
    settings = SshSettings(user="setting")
    (full,) = find_routes(SshTarget(host="a", user="own", port=5), settings, lambda _: found)
    (bare,) = find_routes(SshTarget(host="a"), settings, lambda _: found)
    assert (full.host, full.user, full.port) == ("10.0.0.1", "own", 5)
    assert (bare.user, bare.port) == ("setting", 7)


def test_jumps_come_after_the_target_the_nearest_last() -> None:
    config = {"far": {"proxyjump": "one,two"}, "one": {"proxyjump": "zero"}}
    routes = find_routes(SshTarget(host="far"), SshSettings(), lambda host: config.get(host, {}))
    assert [route.host for route in routes] == ["far", "two", "one", "zero"]


def test_jumps_in_a_circle_are_refused() -> None:
    config = {"a": {"proxyjump": "b"}, "b": {"proxyjump": "a"}}
    with pytest.raises(HostError, match="more than 4 ProxyJump"):
        find_routes(SshTarget(host="a"), SshSettings(), lambda host: config[host])


def test_a_proxy_command_is_refused() -> None:
    with pytest.raises(HostError, match="ProxyCommand, which is not supported"):
        find_routes(SshTarget(host="a"), SshSettings(), lambda _: {"proxycommand": "nc"})


def test_a_missing_identity_is_refused_by_name() -> None:
    settings = SshSettings(identities=("/no/such key",))
    with pytest.raises(HostError, match="key file /no/such key does not exist"):
        find_routes(SshTarget(host="a"), settings, lambda _: {})


def test_one_existing_identity_of_the_configuration_is_enough(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    found = {"identityfile": ["/no/such key", str(key)]}
    (route,) = find_routes(SshTarget(host="a"), SshSettings(), lambda _: found)
    assert route.identities == (str(key),)
