"""Lines of known_hosts files, as OpenSSH writes and reads them."""

import base64
import subprocess
from pathlib import Path

import pytest

from amp_ray.runtime.hosts.ssh import AUTHORITY, REVOKED, read_known_hosts
from support.namespaces import generate_key

KEYGEN = "ssh-keygen"
KEY = base64.b64encode(b"a key").decode()
OTHER = base64.b64encode(b"another key").decode()


def keys_of(tmp_path: Path, text: str | bytes, name: str) -> list[tuple[str, bytes]]:
    """Return marker and key of the lines that speak of a host."""
    path = tmp_path / "known_hosts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    keys = read_known_hosts([str(path), str(tmp_path / "none")])
    return [(key.marker, key.data) for key in keys if key.is_of(name)]


@pytest.mark.parametrize(
    ("names", "name", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a,b", "b", True),
        ("[a]:22", "a", False),
        ("[a]:2222", "[a]:2222", True),
        ("A.Example.COM", "a.example.com", True),
        ("*.example.com", "a.example.com", True),
        ("a?", "ab", True),
        ("*,!b", "b", False),
        ("!b", "a", False),
        ("a.b", "axb", False),
        ("|1|no|base64!", "a", False),
    ],
)
def test_names_are_patterns(tmp_path: Path, names: str, name: str, *, expected: bool) -> None:
    assert bool(keys_of(tmp_path, f"{names} ssh-ed25519 {KEY}", name)) == expected


def test_markers_comments_and_lines_that_nobody_can_read(tmp_path: Path) -> None:
    text = f"""
# a comment
   # another
@cert-authority *.example.com,a ssh-rsa {KEY} who made it \x1b[31m
@revoked * ssh-rsa\t{OTHER}
@new-marker a ssh-rsa {KEY}
a ssh-rsa
a ssh-rsa not!base64
a key-of-the-future {KEY}
\ta  ssh-ed25519   {OTHER}  comment
""".encode()
    keys = keys_of(tmp_path, text + b"a ssh-rsa \xff\xfe\n\xff\0\n", "a")
    assert keys == [
        (AUTHORITY, b"a key"),
        (REVOKED, b"another key"),
        ("", b"a key"),
        ("", b"another key"),
    ]


def test_hashed_names_and_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    generate_key(tmp_path / "key", "host")
    public = (tmp_path / "key.pub").read_text(encoding="ascii")
    path = tmp_path / "hashed"
    path.write_text(f"[a.example.com]:2222 {public}b {public}", encoding="ascii")
    subprocess.run([KEYGEN, "-H", "-f", path], check=True, capture_output=True)
    assert "a.example.com" not in path.read_text(encoding="ascii")
    first, second = read_known_hosts([str(path)])
    assert first.is_of("[a.example.com]:2222")
    assert not first.is_of("a.example.com")
    assert second.is_of("b")
    shown = subprocess.run(
        [KEYGEN, "-lf", tmp_path / "key.pub"], check=True, capture_output=True, text=True
    )
    assert first.fingerprint in shown.stdout
    assert first.where == f"{path}:1"
