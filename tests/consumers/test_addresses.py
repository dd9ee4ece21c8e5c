"""Which addresses are public: the same on every patch level of Python, whose own lists differ."""

import pytest

from consumers.addresses import is_private

PUBLIC = [
    "8.8.8.8", "192.0.1.1", "100.128.0.1", "172.32.0.1", "198.20.0.1", "223.255.255.255", "168.63.129.17",
    "2606:4700::1111", "2001:200::1", "2a00::1", "3ffe::1", "files.example.com", "0x7f.example.com", "",
    "64:ff9b::808:808", "::ffff:8.8.8.8", "::808:808", "2002:808:808::1",
]  # fmt: skip
SPECIAL = [
    "0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.31.255.255", "192.0.0.1", "192.0.0.9",
    "192.0.0.255", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.19.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.1.1.1", "240.0.0.1", "255.255.255.255", "168.63.129.16",
]  # fmt: skip
SPECIAL_V6 = [
    "::", "::1", "100::1", "100:0:0:1::1", "2001::1", "2001:0:4136:e378:8000:63bf:f7f7:f7f7", "2001:2::1", "2001:3::1",
    "2001:4:112::1", "2001:10::1", "2001:20::1", "2001:30::1", "2001:db8::1", "3fff::1", "3fff:fff::1", "5f00::1",
    "64:ff9b:1::1", "::ffff:0:808:808", "fc00::1", "fd00::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
    "4000::1",
]  # fmt: skip
NUMBERS = ["127.1", "2130706433", "127.0.0.1.", "010.8.8.8", "::ffff:127.1", "1:2", "fe80::1::"]


def inside(v4: str) -> list[str]:
    """The IPv6 addresses that contain this IPv4 address."""
    high, low = (int(a) * 256 + int(b) for a, b in (v4.split(".")[:2], v4.split(".")[2:]))
    return [f"{begin}{high:x}:{low:x}" for begin in ("::", "::ffff:", "64:ff9b::")] + [f"2002:{high:x}:{low:x}::1"]


@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_address_and_a_name_are_not_private(host: str) -> None:
    assert not is_private(host)


@pytest.mark.parametrize("host", [*SPECIAL, *SPECIAL_V6, *NUMBERS])
def test_an_address_that_is_not_public_is_private(host: str) -> None:
    assert is_private(host)


@pytest.mark.parametrize("v4", [*SPECIAL, "8.8.8.8"])
def test_an_address_that_contains_one_is_decided_by_it(v4: str) -> None:
    assert {is_private(each) for each in inside(v4)} == {is_private(v4)}
