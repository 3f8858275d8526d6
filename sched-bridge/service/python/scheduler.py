"""A small scheduler on top of vbridged, by the client that client/python/generate.sh makes.

    scheduler.py SOCKET

Publishes a fleet, takes jobs off a queue, leases compact places for them, keeps the leases alive, gives them back, and reads the
account. It stands for what a batch system would do; the tests run it.
"""

import sys
import uuid

import httpx
from vbridged_client import Client
from vbridged_client.api.account import account
from vbridged_client.api.leases import grant_lease, list_leases, release_lease, renew_lease
from vbridged_client.api.nodes import list_nodes, publish_node
from vbridged_client.api.topology import import_topology
from vbridged_client.models import (
    LeaseAnswer,
    LeaseRequest,
    LeaseRequestRequestType0,
    Problem,
    PublishNodeBody,
    TopologyFormat,
    TopologyText,
)


def fleet(client, nodes, gpus):
    """Nodes with GPUs, half of them under each of two leaf switches."""
    for number in range(nodes):
        devices = [{"address": f"0000:{gpu:02x}:00.0", "kind": "gpu", "id": "10de:2330"} for gpu in range(gpus)]
        numa = [{"id": 0, "socket": 0, "cores": 32, "memory": 65536}]
        body = PublishNodeBody.from_dict({"name": f"n{number}", "numa": numa, "devices": devices})
        assert not isinstance(publish_node.sync(f"n{number}", client=client, body=body), Problem)
    half = nodes // 2
    text = f"SwitchName=l0 Nodes=n[0-{half - 1}]\nSwitchName=l1 Nodes=n[{half}-{nodes - 1}]\nSwitchName=s Switches=l[0-1]\n"
    body = TopologyText(format_=TopologyFormat.TOPOLOGY_CONF, text=text)
    answer = import_topology.sync(client=client, body=body)
    assert not isinstance(answer, Problem), answer


def job(name, vms, gpus):
    """What a job needs, as a request for a lease. Its id makes it safe to repeat."""
    need = {"vcpus": 4, "memory": 1024, "devices": [{"count": gpus, "filter": {"kind": "gpu"}}]}
    cluster = {"name": name, "groups": [{"name": "vm", "count": vms, "alternatives": [need]}]}
    request = LeaseRequestRequestType0.from_dict(cluster)
    return LeaseRequest(holder="scheduler", id=f"{name}-{uuid.uuid4().hex[:8]}", ttl_ms=30_000, request=request)


def main(socket):
    client = Client(base_url="http://vbridged", httpx_args={"transport": httpx.HTTPTransport(uds=socket)})
    fleet(client, nodes=4, gpus=8)
    queue = [job("train", 2, 8), job("big", 4, 8), job("infer", 2, 4)]
    running, waiting = [], []
    for wanted in queue:
        answer = grant_lease.sync(client=client, body=wanted)
        if isinstance(answer, LeaseAnswer):
            running.append(answer)
            # A lost answer is asked for again, with the same id.
            repeated = grant_lease.sync(client=client, body=wanted)
            assert repeated.again and repeated.lease.id == answer.lease.id
        else:
            assert isinstance(answer, Problem) and answer.code.value == "no-room", answer
            waiting.append(wanted)
    assert [lease.lease.cluster for lease in running] == ["train", "infer"], running
    assert running[0].placement.score.max_hops == 1, "two whole nodes of one leaf"
    assert len(waiting) == 1
    for answer in running:
        assert renew_lease.sync(answer.lease.id, client=client).beats == 1
    assert len(list_leases.sync(client=client).leases) == 2
    for answer in running:
        assert release_lease.sync(answer.lease.id, client=client).holder == "scheduler"
    # Now there is room for the one that waited.
    assert isinstance(grant_lease.sync(client=client, body=waiting[0]), LeaseAnswer)
    assert sum(node.gpus_free for node in list_nodes.sync(client=client).nodes) == 0
    records = account.sync_detailed(client=client, format_="jsonl").content.decode().splitlines()
    assert len(records) == 2, records
    gone = release_lease.sync("nobody", client=client)
    assert isinstance(gone, Problem) and gone.status == 404
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
