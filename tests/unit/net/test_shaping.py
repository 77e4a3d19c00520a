"""Shaping is data: read the argument lists without root."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from testbed.net.shaping import (
    Bucket,
    Shaping,
    congestion,
    difference,
    read_buckets,
    reshape,
    route_congestion,
    routes_congestion,
    shape,
    unshape,
)
from testbed.spec.errors import NetworkInvalid
from testbed.spec.link import Link
from testbed.spec.units import burst_bytes


def lines(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def test_an_unshaped_link_needs_no_command() -> None:
    assert shape(Link()) == []


def test_both_ways_get_the_same_bucket() -> None:
    commands = lines(shape(Link(rate=200_000_000)))
    bucket = "tbf rate 200mbit burst 100000b latency 50000us"
    assert commands[0] == f"tc qdisc add dev eth0 root {bucket}"
    assert commands[-1] == f"tc qdisc add dev ifb0 root {bucket}"


def test_everything_that_arrives_is_redirected_to_the_ifb() -> None:
    assert lines(shape(Link(rate=10**9)))[1:-1] == [
        "ip link add ifb0 type ifb",
        "ip link set ifb0 up",
        "tc qdisc add dev eth0 ingress",
        "tc filter add dev eth0 parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev ifb0",
    ]


def test_the_segment_size_is_set_on_the_interface() -> None:
    assert lines(shape(Link(segment=2**14))) == ["ip link set dev eth0 gso_max_size 16384"]
    assert lines(shape(Link.load({"rate": "100mbit", "segment": "16KiB"}, "test")))[1:] == lines(
        shape(Link(rate=10**8))
    )


def test_egress_only_leaves_the_ifb_out() -> None:
    commands = lines(shape(Link(rate=10**9), ingress=False))
    assert len(commands) == 1 and "ifb" not in commands[0] and "ingress" not in commands[0]


def test_other_devices_are_named_throughout() -> None:
    commands = lines(shape(Link(rate=10**9), iface="net1", ifb="ifb9"))
    assert not [command for command in commands if "eth0" in command or "ifb0" in command]


def test_delay_and_loss_come_once_before_the_bucket() -> None:
    link = Link(rate=100_000_000, delay=0.02, jitter=0.001, loss=0.01)
    segments, netem, bucket, *rest = lines(shape(link))
    assert segments == "ip link set dev eth0 gso_max_segs 1"  # so that a lost packet is one frame
    assert netem == "tc qdisc add dev eth0 root handle 1: netem limit 1173 delay 20000us 1000us loss 1%"
    assert bucket.startswith("tc qdisc add dev eth0 parent 1:1 tbf rate 100mbit")
    assert not [command for command in rest if "netem" in command]


@pytest.mark.parametrize(("rate", "delay"), [(10**9, 0.1), (10**10, 0.05), (None, 0.05)])
def test_netem_has_room_for_all_packets_in_flight(rate: int | None, delay: float) -> None:
    netem = shape(Link(rate=rate, delay=delay))[0]
    limit = int(netem[netem.index("limit") + 1])
    assert limit >= (rate or 10**10) * delay / 8 / 1514


def test_loss_without_rate_shapes_only_with_netem() -> None:
    _, netem = lines(shape(Link(loss=0.005)))
    assert netem == "tc qdisc add dev eth0 root handle 1: netem limit 1000 loss 0.5%"


def test_the_queue_lasts_a_round_trip_to_an_equal_node() -> None:
    assert [line.rpartition(" ")[2] for line in lines(shape(Link(rate=10**8, delay=0.05))) if "tbf" in line] == [
        "100000us",
        "100000us",
    ]
    assert lines(shape(Link(rate=10**8, delay=0.005)))[1].endswith("latency 50000us")


def test_congestion_control_is_set_per_namespace_or_per_route() -> None:
    assert congestion("cubic")[-1] == "net.ipv4.tcp_congestion_control=cubic"
    assert route_congestion("cubic", "10.77.0.0/24", address="10.77.0.10")[-4:] == [
        "src",
        "10.77.0.10",
        "congctl",
        "cubic",
    ]


def test_a_rate_changes_without_shrinking_the_bucket() -> None:
    link = Link(rate=100_000_000)
    slower = reshape(link, 100_000_000, 10_000_000)
    assert [command[:6] for command in slower] == [
        ["tc", "qdisc", "change", "dev", "eth0", "root"],
        ["tc", "qdisc", "change", "dev", "ifb0", "root"],
    ]
    assert all("10mbit" in command and f"{burst_bytes(100_000_000)}b" in command for command in slower)
    assert reshape(Link(), None, 10_000_000) == shape(Link(rate=10_000_000))
    assert reshape(Link(), None, None) == []
    assert reshape(Link(), 10_000_000, None)[-1] == ["ip", "link", "del", "ifb0"]
    delayed = Link(rate=10**8, delay=0.01)
    assert [command[5:7] for command in reshape(delayed, 10**8, 10**7)] == [["parent", "1:1"], ["root", "tbf"]]


def test_congestion_control_is_set_on_all_routes_of_an_interface() -> None:
    routes = [{"dst": "10.0.0.0/24", "prefsrc": "10.0.0.7", "dev": "eth0"}, {"dst": "10.1.0.0/24"}]
    assert routes_congestion("reno", routes) == [
        route_congestion("reno", "10.0.0.0/24", "eth0", "10.0.0.7"),
        route_congestion("reno", "10.1.0.0/24", "eth0"),
    ]


def test_where_only_egress_is_shaped_a_new_rate_changes_only_egress() -> None:
    link = Link(rate=100_000_000)
    for before, rate in ((100_000_000, 10_000_000), (None, 10_000_000), (10_000_000, None)):
        (command,) = reshape(link, before, rate, ingress=False)
        assert command[:2] == ["tc", "qdisc"] and command[4] == "eth0"


# --- reading it again --------------------------------------------------------------------------------------------

MB = 10**6
LISTED = """[{"kind":"tbf","handle":"8747:","dev":"eth0","root":true,"refcnt":2,"options":{"rate":6250000,"burst":25000,
"lat":50000},"bytes":1200,"packets":3,"drops":2,"overlimits":0,"requeues":0,"backlog":0,"qlen":0},{"kind":"ingress",
"handle":"ffff:","dev":"eth0","parent":"ffff:fff1","options":{},"bytes":0,"packets":0,"drops":0,"overlimits":0},
{"kind":"pfifo_fast","handle":"0:","dev":"ifb0","root":true,"options":{"bands":3},"bytes":70,"packets":1,"drops":0}]"""


def shaping(egress: int = 50 * MB, ingress: int = 50 * MB, passed: tuple[int, int] = (0, 0), drops: int = 0) -> Shaping:
    """A link of 50mbit whose buckets have these rates, and have passed so many bytes."""
    return Shaping(50 * MB, {"eth0": Bucket(egress, passed[0]), "ifb0": Bucket(ingress, passed[1], drops)})


def test_the_buckets_that_tc_lists_are_read() -> None:
    assert read_buckets(LISTED) == {"eth0": Bucket(50 * MB, 1200, 2)}
    assert read_buckets("[]") == {}


@pytest.mark.parametrize("text", ["", "qdisc tbf 8001: dev eth0", '[{"kind": "tbf"}]', "[1]"])
def test_what_is_no_list_of_qdiscs_is_refused(text: str) -> None:
    with pytest.raises(NetworkInvalid, match="iproute2"):
        read_buckets(text)


def test_a_link_as_requested_does_not_differ() -> None:
    assert difference("node1", shaping(), shaping(passed=(21 * MB, 11 * MB)), (20 * MB, 10 * MB)) == ""
    assert difference("node1", Shaping(), Shaping()) == ""  # nothing is requested
    odd = Shaping(50 * MB + 5, {"eth0": Bucket(50 * MB), "ifb0": Bucket(50 * MB)})
    assert difference("node1", odd, odd) == ""  # tc counts bytes


CHANGED = {
    "no shaping": (Shaping(50 * MB), "node1: egress .* requested 50mbit, found no token bucket on eth0"),
    "no ingress": (
        Shaping(50 * MB, {"eth0": Bucket(50 * MB, 20 * MB)}),
        "node1: ingress .* requested 50mbit, found no token bucket on ifb0",
    ),
    "another rate out": (shaping(egress=60 * MB), "node1: egress .* requested 50mbit, found 60mbit on eth0"),
    "another rate in": (
        shaping(ingress=1000 * MB, passed=(20 * MB, 20 * MB)),
        "node1: ingress .* requested 50mbit, found 1gbit on ifb0",
    ),
    "bytes that went round egress": (
        shaping(passed=(MB, 20 * MB)),
        "node1: egress .* only 1 MB of the 20 MB of the steps passed the token bucket on eth0",
    ),
    "bytes that went round ingress": (
        shaping(passed=(20 * MB, 0)),
        "node1: ingress .* only 0 MB of the 10 MB of the steps passed the token bucket on ifb0",
    ),
}


@pytest.mark.parametrize(("now", "words"), CHANGED.values(), ids=CHANGED.keys())
def test_a_link_that_changed_is_named_with_requested_and_found(now: Shaping, words: str) -> None:
    assert re.search(words, difference("node1", shaping(), now, (20 * MB, 10 * MB)))


def test_only_what_passed_since_the_first_reading_counts_and_drops_explain_a_difference() -> None:
    before = shaping(passed=(30 * MB, 30 * MB))
    assert "only 5 MB" in difference("node1", before, shaping(passed=(60 * MB, 35 * MB)), (20 * MB, 10 * MB))
    dropped = shaping(passed=(60 * MB, 35 * MB), drops=100)  # the interface counts what the bucket then drops
    assert difference("node1", before, dropped, (20 * MB, 10 * MB)) == ""


def test_a_bucket_that_a_fault_added_during_training_is_compared_by_its_rate_only() -> None:
    sizes = (20 * MB, 10 * MB)  # most of it was sent before the fault
    assert difference("node1", Shaping(), shaping(passed=(6 * MB, 3 * MB)), sizes) == ""
    assert "found 60mbit on eth0" in difference("node1", Shaping(), shaping(egress=60 * MB), sizes)


@pytest.mark.net
@pytest.mark.parametrize("ingress", [True, False])
def test_what_was_shaped_can_be_removed_and_shaped_again(ingress: bool) -> None:
    link = Link(rate=100_000_000)
    made, removed = ([shlex.join(command) for command in make(link, ingress=ingress)] for make in (shape, unshape))
    script = ["ip link add eth0 type veth peer name other", *made, *removed, "tc qdisc show dev eth0 >&2", *made]
    argv = ["unshare", "--net", "sh", "-ec", "\n".join([*script, "tc qdisc show dev eth0"])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "tbf" in done.stdout and "tbf" not in done.stderr, done.stderr


def test_nothing_is_removed_where_nothing_was_shaped() -> None:
    assert unshape(Link()) == []
    assert unshape(Link(delay=0.01)) == [["tc", "qdisc", "del", "dev", "eth0", "root"]]


def test_the_queue_of_a_slower_network_holds_the_same_bytes() -> None:
    link = Link(rate=200_000_000, delay=0.01, jitter=0.001, queue=0.05, loss=0.01)
    slower = link.slowed(4.0)
    assert (slower.rate, slower.delay, slower.jitter, slower.queue, slower.loss) == (50_000_000, 0.04, 0.004, 0.2, 0.01)
    (bucket,) = [command for command in shape(slower, ingress=False) if "tbf" in command]
    assert bucket[bucket.index("rate") + 1] == "50mbit" and bucket[bucket.index("latency") + 1] == "200000us"
    assert bucket[bucket.index("burst") + 1] == "25000b", "4 ms at 50 Mbit/s"
    assert link.slowed(1.0) is link
