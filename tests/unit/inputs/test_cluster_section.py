import pytest

from amp_ray.clusters.cluster import (
    DEFAULT_INTER_LATENCY_S,
    DEFAULT_INTRA_LATENCY_S,
    Cluster,
    Link,
    Node,
    ZoneLink,
)
from amp_ray.clusters.constants import Constants
from amp_ray.errors import InputError
from support.experiments import SMALL, experiment_from

NODES = "    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}\n"
MINE = "{name: mine, memory_gib: 2, memory_gbyte_per_s: 100, fp16_tflops: 3}"


def cluster(nodes: str = NODES, hostfile: str | None = None, links: str = "") -> Cluster:
    named = "" if hostfile is None else "  hostfile: hosts\n"
    text = SMALL.replace("  nodes:\n" + NODES, f"{named}  nodes:\n{nodes}{links}")
    return experiment_from(text, {} if hostfile is None else {"hosts": hostfile}).cluster


def test_nodes_without_a_hostfile_are_numbered() -> None:
    assert [node.name for node in cluster().nodes] == ["node0", "node1"]


def test_nodes_with_a_hostfile_are_named_in_its_order() -> None:
    assert [node.name for node in cluster(hostfile="b slots=2\na slots=2\n").nodes] == ["b", "a"]


def test_rates_and_latencies_become_si_units() -> None:
    found = cluster(NODES.replace("}", ", intra_latency_us: 3, inter_latency_us: 40}")).nodes[0]
    assert found.intra == Link(bandwidth_bytes_per_s=6.25e9, latency_s=3e-6)
    assert found.inter == Link(bandwidth_bytes_per_s=1.25e9, latency_s=4e-5)


def test_entries_of_one_device_may_differ_in_their_power() -> None:
    plain = NODES.replace("count: 2", "count: 1")
    both = cluster(plain + plain.replace("}", ", power_w: 50}")).nodes
    assert [node.device.power_limit_w for node in both] == [None, 50]
    assert both[0].device != both[1].device
    usual = cluster(NODES.replace("}", ", power_w: 70}")).nodes[0].device
    assert usual == both[0].device


@pytest.mark.parametrize(
    ("device", "power_w", "message"),
    [
        ("T4", "71", "found 71 W; device 'T4' takes more than 13 W and at most 70"),
        ("T4", "13", "found 13 W; device 'T4' takes more than 13 W and at most 70"),
        ("T4", "0", "0"),
        (MINE, "50", "the catalogue has no power of device 'mine'"),
        ("GH200", "500", "the catalogue has no power of device 'GH200'"),
    ],
)
def test_a_power_that_the_board_cannot_have_is_refused(
    device: str, power_w: str, message: str
) -> None:
    nodes = NODES.replace("device: T4", f"device: {device}")
    with pytest.raises(InputError, match=message) as raised:
        cluster(nodes.replace("10}", f"10, power_w: {power_w}}}"))
    assert "power_w" in str(raised.value)


def test_a_collectives_latency_is_that_of_a_message_unless_it_is_given() -> None:
    links = "  links:\n    - {between: [node0, node1], gbit_per_s: 8, collective_us: 70}\n"
    given = NODES.replace("}", ", intra_latency_us: 3, intra_collective_us: 90}")
    found = cluster(given, links=links)
    assert found.nodes[0].intra.step_s == pytest.approx(9e-5)
    assert found.nodes[0].inter.step_s == found.nodes[0].inter.latency_s
    assert found.pair_links[0, 1].step_s == pytest.approx(7e-5)


def test_latencies_that_are_left_out_are_the_defaults() -> None:
    node = cluster().nodes[0]
    assert node.intra.latency_s == DEFAULT_INTRA_LATENCY_S["pcie"]
    assert node.inter.latency_s == DEFAULT_INTER_LATENCY_S["tcp"]
    assert (node.intra.fabric, node.inter.fabric) == ("pcie", "network")


@pytest.mark.parametrize(
    ("said", "protocol"),
    [
        ("device: T4, inter_gbit_per_s: 50", "tcp"),
        ("device: V100-16, inter_gbit_per_s: 100", "tcp"),
        ("device: V100-16, inter_gbit_per_s: 150", None),
        ("device: V100-16, inter_gbit_per_s: 10, inter_latency_us: 40", None),
        ("device: A100-80, inter_gbit_per_s: 100", None),
        ("device: A100-80, inter_gbit_per_s: 200", "rdma"),
        ("device: H100, inter_gbit_per_s: 3200", "rdma"),
    ],
)
def test_board_and_rate_tell_a_protocol_where_the_file_measured_nothing(
    said: str, protocol: str | None
) -> None:
    line = f"    - {{count: 2, slots: 2, {said}}}\n"
    found = cluster(line).nodes[0]
    assert found.inter.protocol == protocol
    assert found.inter.assumed == (protocol is not None)


def test_measured_collectives_count_where_the_file_states_nothing_of_the_link() -> None:
    line = "    - {count: 2, slots: 2, device: H100, inter_gbit_per_s: 400}\n"
    assert cluster(line).nodes[0].intra.board == "H100"
    for stated in ("intra_gbit_per_s: 3600", "intra_latency_us: 3"):
        assert cluster(line.replace("}", f", {stated}}}")).nodes[0].intra.board == ""


def test_entries_may_differ() -> None:
    other = "    - {device: V100-16, slots: 8, intra_gbit_per_s: 170, inter_gbit_per_s: 10}\n"
    found = cluster(NODES + other)
    assert [(node.device.name, node.num_slots) for node in found.nodes] == [
        ("T4", 2),
        ("T4", 2),
        ("V100-16", 8),
    ]


def test_memory_may_be_less_than_the_data_sheet_says() -> None:
    found = cluster(NODES.replace("slots: 2", "slots: 2, memory_gib: 1.5")).nodes[0].device
    assert (found.name, found.memory_gib) == ("T4", 1.5)


def test_a_described_device_becomes_si_units() -> None:
    found = cluster(NODES.replace("T4", MINE)).nodes[0].device
    assert (found.name, found.memory_gib, found.memory_bytes_per_s) == ("mine", 2.0, 1e11)
    assert (found.fp16_flops, found.bf16_flops) == (3e12, None)


def test_a_described_device_needs_the_rate_of_the_precision() -> None:
    with pytest.raises(InputError, match="'mine' does not compute in fp16; it can do bf16"):
        cluster(NODES.replace("T4", MINE.replace("fp16", "bf16")))


def test_a_pair_of_nodes_may_have_its_own_link() -> None:
    links = "  links: [{between: [node1, node0], gbit_per_s: 8, latency_us: 7}]\n"
    assert cluster(links=links).pair_links == {
        (0, 1): Link(bandwidth_bytes_per_s=1e9, latency_s=7e-6)
    }


def test_links_speak_the_names_of_the_hostfile() -> None:
    links = "  links: [{between: [node0, node1], gbit_per_s: 8}]\n"
    with pytest.raises(InputError, match=r"links\.0\.between: host 'node0' is not one of a, b"):
        cluster(hostfile="a slots=2\nb slots=2\n", links=links)


ZONES = "".join(
    NODES.replace("count: 2, ", "").replace("}", f", zone: {zone}, price_per_device_hour: 2}}")
    for zone in ("east", "west")
)


def test_two_zones_have_a_link_with_a_price_for_what_crosses_it() -> None:
    links = "  links: [{between: [west, east], gbit_per_s: 8, latency_us: 7, price_per_gbyte: 2}]\n"
    found = cluster(ZONES, links=links)
    joined = ZoneLink(link=Link(bandwidth_bytes_per_s=1e9, latency_s=7e-6), price_per_byte=2e-9)
    assert found.zone_links == {("east", "west"): joined}
    assert [node.zone for node in found.nodes] == ["east", "west"]
    assert found.has_prices
    assert not found.pair_links


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("between: [east, north]", "zone 'north' is not one of east, west"),
        ("between: [east, node0]", "zone 'node0' is not one of east, west"),
        ("between: [east, east]", "expected two different zones of east, west"),
        ("between: [node0, node1], price_per_gbyte: 1", "belongs to a link between two zones"),
        ("between: [a, west]", "'a' is a zone and a host; give the zone another name"),
    ],
)
def test_a_link_joins_two_hosts_or_two_zones(link: str, message: str) -> None:
    nodes, hostfile = (ZONES, None)
    if "[a" in link:
        nodes, hostfile = ZONES.replace("east", "a"), "a slots=2\nb slots=2\n"
    with pytest.raises(InputError, match=message):
        cluster(nodes, hostfile, links=f"  links: [{{{link}, gbit_per_s: 8}}]\n")


def test_a_link_may_be_a_table_of_rates_by_size() -> None:
    table = "[[1048576, 16], [1024, 8]]"
    found = cluster(NODES.replace("inter_gbit_per_s: 10", f"inter_gbit_per_s: {table}"))
    inter = found.nodes[0].inter
    assert list(inter.rates) == [(1024, 1e9), (1048576, 2e9)]
    assert inter.bandwidth_bytes_per_s == 2e9
    at = [inter.at(size).bandwidth_bytes_per_s for size in (1, 1024, 32768, 2**20, 2**40)]
    assert at == pytest.approx([1e9, 1e9, 1.5e9, 2e9, 2e9])
    assert found.has_rates_by_size
    assert not cluster().has_rates_by_size


@pytest.mark.parametrize("table", ["[]", "[[0, 8]]", "[[1024, -1]]", "[[a, 8]]", "[8]"])
def test_a_wrong_table_of_rates_is_led_to_its_key(table: str) -> None:
    with pytest.raises(InputError, match=r"test\.yaml:\d+: cluster\.nodes\.0\.inter_gbit_per_s"):
        cluster(NODES.replace("inter_gbit_per_s: 10", f"inter_gbit_per_s: {table}"))


def one(node: str) -> Node:
    """The first node of a cluster whose entry ends so."""
    return cluster(f"    - {{device: H100, slots: 8, {node}}}\n").nodes[0]


def test_boards_know_what_their_own_links_reach() -> None:
    assert one("inter_gbit_per_s: 400").intra.bandwidth_bytes_per_s == pytest.approx(355.5e9)
    described = "    - {device: {name: X, memory_gib: 8, memory_gbyte_per_s: 100, fp16_tflops: 10}"
    with pytest.raises(InputError, match=r"intra_gbit_per_s is missing .*knows no link"):
        cluster(f"{described}, slots: 2, inter_gbit_per_s: 10}}\n")


def test_rates_may_be_given_in_bytes() -> None:
    node = one("intra_gbyte_per_s: 100, inter_gbyte_per_s: [[1, 10], [1000, 50]]")
    assert node.intra.bandwidth_bytes_per_s == 100e9
    assert node.inter.rates == ((1.0, 10e9), (1000.0, 50e9))
    with pytest.raises(InputError, match="found inter_gbit_per_s and inter_gbyte_per_s"):
        one("inter_gbit_per_s: 400, inter_gbyte_per_s: 50")
    with pytest.raises(InputError, match=r"inter_gbit_per_s is missing \(or inter_gbyte_per_s\)"):
        one("intra_gbyte_per_s: 100, count: 2")


def test_one_node_or_rack_needs_no_rate_of_a_network() -> None:
    assert one("count: 1").inter.bandwidth_bytes_per_s > 0
    rack = "    - {{device: GB200, slots: 4, count: {}}}\n"
    assert len(cluster(rack.format(18)).nodes) == 1
    for nodes in (rack.format(19), 2 * rack.format(1)):
        with pytest.raises(InputError, match="the line rate of all network interfaces of a node"):
            cluster(nodes)


def test_a_rate_below_a_quarter_of_the_boards_is_named() -> None:
    fast, slow = "intra_gbit_per_s: 711", "intra_gbit_per_s: 710"
    assert (
        cluster(f"    - {{device: H100, slots: 8, inter_gbit_per_s: 9, {fast}}}\n").slow_links == ""
    )
    found = cluster(f"    - {{device: H100, slots: 8, inter_gbit_per_s: 9, {slow}}}\n").slow_links
    assert found == "88.8 GB/s within nodes of H100"
    alone = cluster(f"    - {{device: H100, slots: 1, inter_gbit_per_s: 9, {slow}}}\n")
    assert alone.slow_links == ""


@pytest.mark.parametrize(
    ("protocol", "gbit_per_s", "reached"),
    [("tcp", 10, 9.5), ("tcp", 50, 38), ("rdma", 200, 192), ("efa", 100, 85), (None, 100, 85)],
)
def test_what_a_network_reaches_follows_from_its_protocol(
    protocol: str | None, gbit_per_s: float, reached: float
) -> None:
    said = "" if protocol is None else f", protocol: {protocol}"
    line = one(f"inter_gbit_per_s: {gbit_per_s}{said}").inter.line_bytes_per_s
    assert line * Constants().nic_efficiency * 8 / 1e9 == pytest.approx(reached)


@pytest.mark.parametrize(
    ("said", "step_us", "message_us"),
    [
        ("protocol: efa", 60, 60),
        ("protocol: efa, inter_collective_us: 70", 70, 60),
        ("protocol: rdma", 5, 5),
        ("protocol: rdma, inter_latency_us: 10", 10, 10),
        ("protocol: tcp", 25, 25),
    ],
)
def test_a_protocol_has_a_latency_of_its_own(said: str, step_us: float, message_us: float) -> None:
    link = one(f"inter_gbit_per_s: 3200, {said}").inter
    assert link.step_s == pytest.approx(step_us * 1e-6)
    assert link.latency_s == pytest.approx(message_us * 1e-6)


RACKS = "    - {count: 5, device: H100, slots: 4, inter_gbit_per_s: 100, rack: {nodes: 2}}\n"


def test_hosts_fill_racks_in_the_hostfiles_order() -> None:
    hostfile = "".join(f"{name} slots=4\n" for name in "edcba")
    found = cluster(RACKS, hostfile)
    assert [node.host_names for node in found.nodes] == [("e", "d"), ("c", "b"), ("a",)]
    assert {node.host_link for node in found.nodes} == {None}
    assert found.nodes[0].intra == found.nodes[2].intra


def test_a_rack_may_be_slower_than_its_hosts() -> None:
    keys = "nodes: 2, gbyte_per_s: 50, latency_us: 3, collective_us: 4"
    first, _, last = cluster(RACKS.replace("nodes: 2", keys)).nodes
    assert (first.intra.bandwidth_bytes_per_s, first.intra.latency_s) == (50e9, 3e-6)
    assert first.intra.step_s == 4e-6
    assert first.host_link == last.intra
    assert last.intra.bandwidth_bytes_per_s > 300e9


@pytest.mark.parametrize(
    ("entry", "num_hosts"),
    [
        ("count: 36, device: GB200, slots: 4", [18, 18]),
        ("count: 20, device: GB300, slots: 4", [18, 2]),
        ("count: 2, device: GB200, slots: 64", [1, 1]),
        ("count: 2, device: GB200, slots: 4, rack: {nodes: 1}", [1, 1]),
        ("count: 2, device: B200, slots: 8", [1, 1]),
    ],
)
def test_the_catalogue_knows_which_boards_come_in_racks(entry: str, num_hosts: list[int]) -> None:
    found = cluster(f"    - {{{entry}, inter_gbit_per_s: 100}}\n")
    assert [node.num_hosts for node in found.nodes] == num_hosts


@pytest.mark.parametrize(
    ("nodes", "links", "message"),
    [
        (
            RACKS,
            "[{between: [node1, node4], gbit_per_s: 8}]",
            "links.0.between.*host 'node1' is in",
        ),
        (RACKS.replace("nodes: 2", "nodes: 0"), "[]", r"nodes.0.rack.nodes"),
        (RACKS.replace("nodes: 2", "gbit_per_s: 1"), "[]", r"nodes.0.rack.*nodes"),
        (RACKS.replace("nodes: 2", "nodes: 2, gbit_per_s: 1, gbyte_per_s: 1"), "[]", "one of them"),
    ],
)
def test_a_wrong_rack_is_led_to_its_key(nodes: str, links: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster(nodes, links=f"  links: {links}\n")


def test_nodes_outside_racks_keep_their_links() -> None:
    nodes = RACKS.replace("count: 5", "count: 4") + NODES
    found = cluster(nodes, links="  links: [{between: [node5, node4], gbit_per_s: 8}]\n")
    assert list(found.pair_links) == [(2, 3)]


BIG = (
    "    - {host: big, device: A100-80, slots: 4, inter_gbit_per_s: 25}\n"
    "    - {host: big, device: V100-32, slots: 2}\n"
)


@pytest.mark.parametrize(
    ("nodes", "hostfile"),
    [
        (BIG + NODES, None),
        (BIG + NODES, "big slots=6\na slots=2\nb\n"),
        (BIG + NODES, "ada@big\na\nb\n"),
        (BIG.replace("big", "node0") + NODES, "c slots=6\na\nb\n"),
    ],
)
def test_a_host_stands_in_two_entries(nodes: str, hostfile: str | None) -> None:
    found = cluster(nodes, hostfile)
    assert len(found.host_names) == 3
    assert [slot for _, slot in found.places] == [0, 1, 2, 3, 4, 5, 0, 1, 0, 1]
    assert found.nodes[0].inter == found.nodes[1].inter
    assert {*found.pair_links} == {(0, 1)}


def test_boards_of_one_host_are_joined_by_pcie_or_what_the_file_says() -> None:
    def link(*changes: tuple[str, str], links: str = "") -> Link:
        nodes = BIG
        for old, new in changes:
            nodes = nodes.replace(old, new)
        return cluster(nodes, links=links).pair_links[0, 1]

    assert link().bandwidth_bytes_per_s == 15.75e9 / 2  # PCIe 3 of V100
    assert link().fabric == "pcie"
    assert link(("slots: 2", "slots: 2, intra_gbit_per_s: 40")).bandwidth_bytes_per_s == 5e9
    fast = link(("25}", "3200, protocol: rdma, inter_latency_us: 1}"))
    assert fast.bandwidth_bytes_per_s > 3200e9 / 8
    assert fast.latency_s == 1e-6
    alone = link((", inter_gbit_per_s: 25", ""))
    assert alone.bandwidth_bytes_per_s == link().bandwidth_bytes_per_s
    stated = link(links="  links: [{between: [big, big], gbit_per_s: 8}]\n")
    assert (stated.bandwidth_bytes_per_s, stated.fabric) == (1e9, None)


@pytest.mark.parametrize(
    ("nodes", "hostfile", "message"),
    [
        (BIG, "big slots=7\n", r"nodes.1.slots: found 4 \+ 2; host 'big' has slots=7 in 'hosts'"),
        (BIG, "c slots=6\n", "nodes.0.host: found 'big'; the host in its place in 'hosts' is 'c'"),
        (BIG, "a\nb\n", "describes 1 host, hostfile 'hosts' names 2"),
        (
            BIG.replace("2}", "2, zone: a, protocol: tcp}").replace("25}", "25, zone: b}"),
            None,
            "one",
        ),
        (
            BIG.replace("2}", "2, inter_gbit_per_s: 50}"),
            None,
            "found 50.0; .* host 'big' has 25.0",
        ),
        (BIG.replace("V100-32", "cpu"), None, "nodes.1.device: found cpu; host 'big' has entries"),
        (BIG + NODES + BIG, None, "another host is named 'big'; entries of one host follow each"),
        (NODES + NODES.replace("count: 2", "host: node1"), None, "another host is named 'node1'"),
        (BIG.replace("big", "big, count: 2"), None, "nodes.0.host: found a name for 2 hosts"),
        (BIG.replace("big", "'b;g'"), None, "nodes.0.host: found host 'b;g'"),
    ],
)
def test_entries_of_one_host_that_do_not_fit_are_refused(
    nodes: str, hostfile: str | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        cluster(nodes, hostfile)
