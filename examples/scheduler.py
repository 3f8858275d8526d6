#!/usr/bin/env python3
"""A scheduler that empties a node: moves its VMs, one after the other, to the first of the other nodes that takes them.

scheduler.py FOLDER FROM TO...    nodes as HOST:PORT; FOLDER has client.pem, client.key and ca.pem. A [[client]] entry of FROM names the
                                  certificate, with the role operator. Ends with 1 if a VM stays. Needs nothing but Python.
"""

import http.client
import json
import os
import ssl
import sys


class Node:
    def __init__(self, address, folder):
        self.address = address
        self.tls = ssl.create_default_context(cafile=os.path.join(folder, "ca.pem"))
        self.tls.load_cert_chain(os.path.join(folder, "client.pem"), os.path.join(folder, "client.key"))

    def ask(self, method, path, body=None):
        """The lines of the answer, as they come."""
        connection = http.client.HTTPSConnection(self.address, context=self.tls)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status >= 400:
            raise RuntimeError(json.load(answer)["message"])
        return (json.loads(line) for line in answer)

    def evacuate(self, vm, others):
        why = "no other node was named"
        for to in others:
            (check,) = self.ask("GET", f"/v1/vms/{vm}/check?to={to}")
            if check["blockers"]:
                why = f"{to} does not take it: {check['blockers'][0]['message']}"
                continue
            (taken,) = self.ask("POST", "/v1/migrations", {"vm": vm, "to": to})
            for now in self.ask("GET", f"/v1/migrations/{taken['id']}/events"):
                end = now["outcome"]
                if end["state"] == "done":
                    total, pause = end["report"]["total_ms"], end["report"]["downtime_ms"]
                    return f"{vm}: at {to} after {total:.0f} ms, paused for {pause:.1f} ms"
                if end["state"] in ("failed", "refused"):
                    why = f"not to {to}: {end.get('error', end.get('blockers'))}"
        raise RuntimeError(why)


folder, source, *others = sys.argv[1:]
node, stay = Node(source, folder), 0
(listed,) = node.ask("GET", "/v1/vms")
for name in [vm["name"] for vm in listed["vms"] if vm["status"] == "running"]:
    try:
        print(node.evacuate(name, others))
    except RuntimeError as error:
        stay += 1
        print(f"{name} stays: {error}")
sys.exit(1 if stay else 0)
