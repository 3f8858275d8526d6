#!/usr/bin/env python3
"""Slurm and the guests of its nodes, by the Python client of vmoved (client/python/generate.sh makes it).

vmove_slurm.py prolog CONFIG    PrologSlurmctld: moves the guests off the nodes of a job before it begins. Ends with 1 if one stays:
                                Slurm requeues the job.
vmove_slurm.py health CONFIG    HealthCheckProgram: drains its node while vmoved does not answer there, or a guest needs an operator;
                                resumes it when that is over. What others have drained it leaves alone.

CONFIG names each node's vmoved, and who this is (a [[client]] entry there, role operator); see vmove_slurm.toml.
"""

import os
import ssl
import subprocess
import sys
import tomllib

import httpx
from vmoved_client import Client
from vmoved_client.api.migrations import list_migrations, start_migration
from vmoved_client.api.vms import list_vms
from vmoved_client.follow import follow_migration
from vmoved_client.models import MigrateRequest, MigrationSpec, Problem

OURS = "vmove: "


class Site:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.config = tomllib.load(file)
        tls = self.config["tls"]
        self.tls = ssl.create_default_context(cafile=tls["ca"])
        self.tls.load_cert_chain(tls["cert"], tls["key"])

    def node(self, name):
        return Client(base_url=f"https://{self.config['nodes'][name]}", verify_ssl=self.tls, timeout=httpx.Timeout(10))

    def others(self, names):
        return [address for name, address in self.config["nodes"].items() if name not in names]


def answer(found):
    """What was asked for; a refusal is an error."""
    if found is None or isinstance(found, Problem):
        raise LookupError(found.message if found else "the node gave an answer that is none")
    return found


def evacuate(node, vm, others):
    """Where the guest is now."""
    why = "there is no other node"
    for to in others:
        request = MigrateRequest(vm=vm, to=to, options=MigrationSpec())
        try:
            taken = answer(start_migration.sync(client=node, body=request))
            for now in follow_migration(node, taken.id):
                end = now.outcome.to_dict()
            if end["state"] == "done":
                return to
            why = end.get("error") or end.get("blockers")
        except LookupError as error:
            why = error
    raise LookupError(f"{vm} stays: {why}")


def prolog(site):
    listed = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    for name in names:
        node = site.node(name)
        for vm in answer(list_vms.sync(client=node)).vms:
            if vm.status != "ended":
                print(f"{name}: {vm.name} is at {evacuate(node, vm.name, site.others(names))} now")


def trouble(site, name):
    """Why Slurm had better give this node no job; nothing if it may."""
    try:
        node = site.node(name)
        for vm in answer(list_vms.sync(client=node)).vms:
            for device in vm.devices or []:
                if not device.held:
                    return f"{vm.name} lacks {device.role}: vmove devices attach {vm.name} {device.role}"
        for migration in answer(list_migrations.sync(client=node)).migrations:
            end = migration.outcome.to_dict()
            if end["state"] == "failed" and str(end.get("guest", "")).startswith("paused"):
                return f"{migration.vm} is paused: vmove recover {migration.id}"
    except (httpx.HTTPError, LookupError) as error:
        return f"vmoved: {error}"
    return ""


def health(site):
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    shown = subprocess.run(["scontrol", "show", "node", name], check=True, capture_output=True, text=True).stdout
    drained, ours = "DRAIN" in shown, f"Reason={OURS}" in shown
    why = trouble(site, name)
    update = ["scontrol", "update", f"NodeName={name}"]
    if why and not drained:
        subprocess.run([*update, "State=DRAIN", f"Reason={OURS}{why}"], check=True)
    elif drained and ours and not why:
        subprocess.run([*update, "State=RESUME"], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("prolog", "health"):
        sys.exit(__doc__)
    try:
        {"prolog": prolog, "health": health}[sys.argv[1]](Site(sys.argv[2]))
    except (httpx.HTTPError, LookupError) as error:
        sys.exit(f"vmove_slurm: {error}")
