#!/usr/bin/python3
"""The part of `qm` of Proxmox VE that vmove-pve calls: starts QEMU of Debian with the options that Proxmox VE gives it, and ends it.

The options are those of the pairs of configurations and command lines in qemu-server (src/test/cfg2cmd, looked up on 2026-11-29 at commit
e6352be67f70). Left out, since QEMU of Debian or this machine has no such thing: `-id`, machine types `+pve`, `-cpu kvm64,enforce`, the boot splash,
`-iscsi`, disks and taps. A file /run/qm-refuses names a command that fails.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

RUN = "/var/run/qemu-server"


def fail(why):
    print(why, file=sys.stderr)
    sys.exit(255)


def options(words):
    found = {}
    values = ("--migratedfrom", "--migration_type", "--stateuri", "--machine")
    while words:
        word = words.pop(0)
        if word in values:
            found[word[2:]] = words.pop(0)
        elif word in ("--skiplock", "--nocheck"):
            found[word[2:]] = True
        else:
            fail(f"Unknown option: {word[2:]}")
    return found


def sections(text):
    """Name and lines of each section; the first has no name."""
    found = [("", [])]
    for line in text.splitlines():
        head = re.fullmatch(r"\[(.+)\]", line)
        if head:
            found.append((head[1], []))
        elif line:
            found[-1][1].append(line)
    return found


def keys(lines):
    return dict(line.split(": ", 1) for line in lines if not line.startswith("#"))


def written(path, found):
    with open(path + ".tmp", "w") as file:
        file.write("\n".join("".join(f"{line}\n" for line in ([f"[{name}]"] if name else []) + lines) for name, lines in found))
    os.rename(path + ".tmp", path)


def apply_pending(path, found):
    """What an ordinary start does with [PENDING]."""
    pending = next((keys(lines) for name, lines in found if name == "PENDING"), None)
    if pending is None:
        return found
    comments = [line for line in found[0][1] if line.startswith("#")]
    main = keys(found[0][1])
    for name in re.split("[,; ]+", pending.pop("delete", "")):
        main.pop(name.lstrip("!"), None)
    main.update(pending)
    found = [("", comments + [f"{key}: {main[key]}" for key in sorted(main)])]
    found += [one for one in sections(open(path).read())[1:] if one[0] != "PENDING"]
    written(path, found)
    return found


def unlock(path):
    found = sections(open(path).read())
    found[0] = ("", [line for line in found[0][1] if not line.startswith("lock: ")])
    written(path, found)


def command_line(vmid, conf, machine):
    qemu = os.environ["VMOVE_PVE_QEMU"]
    version = [int(part) for part in re.search(r"version (\d+)\.(\d+)", subprocess.check_output([qemu, "--version"], text=True)).groups()]
    again = "reconnect-ms=5000" if version >= [9, 2] else "reconnect=5"
    cores = conf.get("cores", "1")
    line = [
        qemu, "-name", f"{conf.get('name', f'vm{vmid}')},debug-threads=on", "-no-shutdown",
        "-chardev", f"socket,id=qmp,path={RUN}/{vmid}.qmp,server=on,wait=off", "-mon", "chardev=qmp,mode=control",
        "-chardev", f"socket,id=qmp-event,path=/var/run/qmeventd.sock,{again}", "-mon", "chardev=qmp-event,mode=control",
        "-pidfile", f"{RUN}/{vmid}.pid", "-daemonize",
        "-smbios", f"type=1,{conf['smbios1']}", "-smp", f"{cores},sockets=1,cores={cores},maxcpus={cores}", "-nodefaults",
        "-boot", "menu=on,strict=on,reboot-timeout=1000", "-vnc", f"unix:{RUN}/{vmid}.vnc,password=on",
        "-cpu", "qemu64", "-m", conf.get("memory", "512"),
    ]
    if conf.get("numa") == "1":
        memory = f"memory-backend-ram,id=ram-node0,size={conf['memory']}M"
        if "hugepages" in conf:
            memory = f"memory-backend-file,id=ram-node0,size={conf['memory']}M,mem-path=/var/lib/vmove/pve,share=on,prealloc=yes"
        line += ["-object", memory, "-numa", "node,nodeid=0,cpus=0,memdev=ram-node0"]
    line += [
        "-global", "PIIX4_PM.disable_s3=1", "-global", "PIIX4_PM.disable_s4=1",
        "-device", "pci-bridge,id=pci.1,chassis_nr=1,bus=pci.0,addr=0x1e", "-device", "pci-bridge,id=pci.2,chassis_nr=2,bus=pci.0,addr=0x1f",
        "-device", f"vmgenid,guid={conf['vmgenid']}", "-device", "piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2",
        "-device", "usb-tablet,id=tablet,bus=uhci.0,port=1", "-device", "VGA,id=vga,bus=pci.0,addr=0x2",
        "-chardev", f"socket,path={RUN}/{vmid}.qga,server=on,wait=off,id=qga0", "-device", "virtio-serial,id=qga0,bus=pci.0,addr=0x8",
        "-device", "virtserialport,chardev=qga0,name=org.qemu.guest_agent.0",
        "-device", "virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on",
        "-machine", f"hpet=off,type={machine or 'pc'}",
    ]
    return line + shlex.split(conf.get("args", ""))


def monitor(vmid, command):
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(10)
        stream.connect(f"{RUN}/{vmid}.qmp")
        lines = stream.makefile("rw")
        lines.readline()
        for one in ("qmp_capabilities", command):
            lines.write(json.dumps({"execute": one}))
            lines.flush()
            while True:
                said = json.loads(lines.readline())
                if "error" in said:
                    fail(said["error"]["desc"])
                if "return" in said:
                    break


def process(vmid):
    try:
        pid = int(open(f"{RUN}/{vmid}.pid").read())
        line = open(f"/proc/{pid}/cmdline").read().split("\0")
    except (OSError, ValueError):
        return None
    return pid if f"{RUN}/{vmid}.pid" in line else None


def start(vmid, conf, found, given):
    if process(vmid):
        fail(f"VM {vmid} already running")
    if "migratedfrom" not in given:
        found = apply_pending(conf, found)
    line = command_line(vmid, keys(found[0][1]), given.get("machine"))
    if "stateuri" in given:
        line += ["-incoming", f"unix:/run/qemu-server/{vmid}.migrate", "-S"]
    if subprocess.call(line, stdin=subprocess.DEVNULL, stdout=sys.stderr):
        fail("start failed: QEMU exited with code 1")
    if "stateuri" in given:
        print(f"migration listens on unix:/run/qemu-server/{vmid}.migrate")


def stop(vmid):
    pid = process(vmid)
    if pid:
        os.kill(pid, signal.SIGTERM)
    for _ in range(200):
        if not process(vmid):
            break
        time.sleep(0.05)
    for kind in ("qmp", "qga", "vnc", "pid"):
        if os.path.exists(f"{RUN}/{vmid}.{kind}"):
            os.remove(f"{RUN}/{vmid}.{kind}")


def main():
    command, vmid = sys.argv[1:3]
    given = options(sys.argv[3:])
    if os.path.exists("/run/qm-refuses") and command in open("/run/qm-refuses").read().split():
        fail(f"qm {command} is refused by the test")
    node = given.get("migratedfrom", socket.gethostname())
    conf = f"/etc/pve/nodes/{node}/qemu-server/{vmid}.conf"
    if "nocheck" not in given and not os.path.exists(conf):
        fail(f"Configuration file 'nodes/{node}/qemu-server/{vmid}.conf' does not exist")
    found = sections(open(conf).read()) if os.path.exists(conf) else []
    lock = keys(found[0][1]).get("lock") if found else None
    if lock and "skiplock" not in given and command != "unlock":
        fail(f"VM is locked ({lock})")
    if command == "start":
        start(vmid, conf, found, given)
    elif command == "stop":
        stop(vmid)
    elif command == "resume":
        monitor(vmid, "cont")
    elif command == "unlock":
        unlock(conf)
    else:
        fail(f"ERROR: unknown command 'qm {command}'")


main()
