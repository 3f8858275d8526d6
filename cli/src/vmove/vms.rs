//! `run`, `adopt`, `list`, `show`, `stop`, `check`, `node`.

use std::path::Path;

use super::bar::line;
use super::progress_text::blocker_line;
use super::secrets;
use crate::args::vmove::{Adopt, Check, Pause, Run, Stop};
use crate::output::{End, fields, note, say, say_json, table};
use crate::waiting::Wait;
use vmove_client::Client;
use vmove_types::problem::Exit;
use vmove_types::spec::{Bandwidth, MigrationSpec};
use vmove_types::tuning::PinRequest;
use vmove_types::units::{format_bytes, format_ms, to_f64};
use vmove_types::vm::{AdoptRequest, LABEL, RunRequest, Running, VmDetail};

/// A label is an environment variable, which goes where the VM goes.
fn label((key, value): (String, String)) -> (String, String) {
    (format!("{LABEL}{key}"), value)
}

pub async fn run(client: &Client, args: Run, json: bool) -> Result<Exit, End> {
    let mut command_line = args.command_line;
    if let Some(program) = command_line.first_mut() {
        *program = absolute_program(program);
    }
    for argument in relative_files(&command_line, Path::new(".")) {
        note(&format!(
            "vmove: \"{argument}\" is a file in this folder, but QEMU starts in the VM's own: write its absolute path"
        ));
    }
    for secret in secrets::in_the_open(&command_line) {
        note(&format!(
            "vmove: \"{secret}\" is a secret that every user of the host can read in QEMU's command line: write it to a file with \
             mode 0600, give that by -object secret,id=ID,file=PATH, and name ID (password-secret=ID)"
        ));
    }
    let request = RunRequest {
        name: args.name,
        memory: args.memory,
        command_line,
        environment: args.labels.into_iter().map(label).chain(args.environment).collect(),
        devices: args.devices,
        grant: args.grant,
        pin: args.pin.or(args.prefer_pin.map(|pin| PinRequest { required: false, ..pin })),
    };
    let name = &request.name;
    let left = format!("{name} is still being started: `vmove list` shows it, `vmove stop {name}` ends it");
    let wait = Wait::of_vmove(json, format!("{name} is started"), left);
    let vm = wait.answer(client.run(&request)).await?;
    for text in &vm.notes {
        note(&format!("vmove: {text}"));
    }
    show_new(&vm, "Started", json)
}

pub async fn adopt(client: &Client, args: Adopt, json: bool) -> Result<Exit, End> {
    let qmp = std::path::absolute(&args.qmp).unwrap_or(args.qmp);
    let vm = client.adopt(&AdoptRequest { name: args.name, qmp }).await?;
    show_new(&vm, "Adopted", json)
}

pub async fn list(client: &Client, json: bool) -> Result<Exit, End> {
    let list = client.vms().await?;
    if json {
        say_json(&list)?;
        return Ok(Exit::Done);
    }
    if list.vms.is_empty() {
        say("No VM on this node; start one by `vmove run`, or take one in by `vmove adopt`")?;
        return Ok(Exit::Done);
    }
    let rows: Vec<Vec<String>> = list
        .vms
        .into_iter()
        .map(|vm| {
            let migration = vm.migration.unwrap_or_else(|| "-".to_owned());
            let origin = if vm.libvirt {
                "libvirt"
            } else if vm.proxmox {
                "proxmox"
            } else if vm.adopted {
                "adopted"
            } else {
                "vmove"
            };
            vec![
                vm.name,
                vm.pid.to_string(),
                match (vm.why, vm.waiting) {
                    (Some(why), _) => format!("ended: {why}"),
                    (None, Some(waiting)) => format!("{}, {waiting}", vm.status),
                    (None, None) => vm.status,
                },
                format_bytes(vm.memory_bytes),
                vm.memory.to_string(),
                origin.to_owned(),
                migration,
            ]
        })
        .collect();
    say(&table(&["NAME", "PID", "STATUS", "MEMORY", "BACKING", "ORIGIN", "MIGRATION"], &rows))?;
    Ok(Exit::Done)
}

pub async fn show(client: &Client, vm: &str, json: bool) -> Result<Exit, End> {
    let vm = client.vm(vm).await?;
    if json {
        say_json(&vm)?;
    } else {
        say(&describe(&vm))?;
    }
    Ok(Exit::Done)
}

pub async fn stop(client: &Client, args: &Stop, json: bool) -> Result<Exit, End> {
    let stopped = client.stop(&args.vm, args.force).await?;
    if json {
        say_json(&stopped)?;
    } else {
        say(&format!("{:?} has ended ({})", stopped.name, stopped.how))?;
    }
    if let Some(owed) = &stopped.owed {
        note(&format!("vmove: {owed}; the VM does not come back"));
    }
    Ok(Exit::Done)
}

pub async fn pause(client: &Client, args: &Pause, json: bool) -> Result<Exit, End> {
    let vm = match args.for_ms {
        Some(for_ms) => client.pause_for(&args.vm, for_ms).await?,
        None => client.set_state(&args.vm, Running::Paused).await?,
    };
    say_state(&vm, json)
}

pub async fn resume(client: &Client, vm: &str, json: bool) -> Result<Exit, End> {
    say_state(&client.set_state(vm, Running::Running).await?, json)
}

fn say_state(vm: &VmDetail, json: bool) -> Result<Exit, End> {
    if json {
        say_json(&vm)?;
    } else {
        say(&format!("{:?} is {}", vm.summary.name, vm.summary.status))?;
    }
    Ok(Exit::Done)
}

pub async fn forget(client: &Client, vm: &str, json: bool) -> Result<Exit, End> {
    let released = client.forget(vm).await?;
    if json {
        say_json(&released)?;
    } else {
        say(&format!("{:?} is released and runs on", released.name))?;
    }
    Ok(Exit::Done)
}

pub async fn check(client: &Client, args: &Check, json: bool) -> Result<Exit, End> {
    let options = MigrationSpec {
        devices: args.devices.clone(),
        disks: args.disks.disks.clone(),
        disk_map: args.disks.disk_map.clone(),
        disks_after: args.disks.disks_after,
        mode: args.mode,
        bandwidth: args.bandwidth.map(Bandwidth),
        goals: args.goals.goals(),
        ..MigrationSpec::default()
    };
    let options = args.reads.in_options(options);
    let report = client.check(&args.vm, &args.to, &options).await?;
    let exit = if report.modes.is_empty() { Exit::Refused } else { Exit::Done };
    if json {
        say_json(&report)?;
        return Ok(exit);
    }
    let mut out = if report.modes.is_empty() {
        format!("{:?} cannot move to {}:\n", report.vm, report.destination)
    } else {
        format!("{:?} can move to {}: {}\n", report.vm, report.destination, report.modes.join(", "))
    };
    for blocker in &report.blockers {
        out.push_str(&format!("  blocker  {}\n", blocker_line(blocker)));
    }
    for warning in &report.warnings {
        out.push_str(&format!("  note     {warning}\n"));
    }
    for way in &report.devices {
        out.push_str(&format!("  device   {} ({}, {}): {}\n", way.role, way.source, way.way, way.message));
    }
    if !report.fabric.is_empty() {
        out.push_str(&format!("  fabric   {}\n", report.fabric));
    }
    if let Some(promise) = &report.promise {
        out.push_str(&format!("  promise  {promise} ({})\n", promise.basis));
    }
    if let Some(choice) = &report.choice {
        out.push_str(&format!("  choice   {choice} ({})\n", choice.basis));
    }
    say(&out)?;
    Ok(exit)
}

pub async fn node(client: &Client, json: bool) -> Result<Exit, End> {
    let node = client.node().await?;
    if json {
        say_json(&node)?;
        return Ok(Exit::Done);
    }
    let m = &node.memory;
    let mut rows = vec![
        ("node", node.node.clone()),
        (
            "vmoved",
            format!(
                "{} (protocol {}), pid {}, up {}",
                node.version,
                node.protocol,
                node.pid,
                uptime(node.uptime_s)
            ),
        ),
        ("kernel", node.kernel.clone()),
        ("peers", format!("{} ({})", node.listen, node.security)),
        ("fabrics", node.fabrics.join(", ")),
        (
            "memory",
            format!("{} available of {}", format_bytes(m.available_bytes), format_bytes(m.total_bytes)),
        ),
        (
            "huge pages",
            format!(
                "{} free in 2 MiB, {} free in 1 GiB",
                format_bytes(m.free_huge_2m_bytes),
                format_bytes(m.free_huge_1g_bytes)
            ),
        ),
        (
            "qemus",
            format!("run as {}{}", node.qemu_user, if node.qemu_sandbox { ", with -sandbox on" } else { "" }),
        ),
        ("vms", node.vms.to_string()),
        ("migrations", format!("{} at work", node.migrations_running)),
    ];
    let rdma =
        node.rdma_network.clone().or_else(|| node.no_rdma.as_ref().map(|why| format!("not usable: {why}")));
    rows.extend(rdma.map(|rdma| ("rdma", rdma)));
    if let Some(why) = &node.no_dirty_tracking {
        rows.push(("limits", format!("post-copy only: {why}")));
    }
    rows.extend(node.qemu_user_note.iter().map(|note| ("note", note.clone())));
    if let Some(why) = &node.shared_disk {
        rows.push(("warning", why.clone()));
    }
    for (name, address) in &node.nodes {
        rows.push(("known node", format!("{name} at {address}")));
    }
    say(&fields(&rows))?;
    Ok(Exit::Done)
}

fn uptime(seconds: u64) -> String {
    if seconds < 60 { format!("{seconds} s") } else { format_ms(to_f64(seconds) * 1e3) }
}

/// Which processors and memory a VM has for itself, or why it has none.
fn pinned(vm: &VmDetail) -> Option<(&'static str, String)> {
    if let Some(pin) = &vm.pinned {
        let each = if pin.one_each { ", one for each virtual one" } else { "" };
        let nodes: Vec<String> = pin.memory_nodes.iter().map(u32::to_string).collect();
        let (cpus, nodes) = (&pin.cpus, nodes.join(", "));
        let text = format!(
            "processors {cpus}{each}; memory of NUMA node {nodes}; QEMU's other threads on {}",
            pin.others
        );
        return Some(("pinned", text));
    }
    vm.not_pinned.as_ref().map(|why| ("pinned", format!("no: {why}")))
}

fn show_new(vm: &VmDetail, verb: &str, json: bool) -> Result<Exit, End> {
    if json {
        say_json(vm)?;
        return Ok(Exit::Done);
    }
    let mut out = format!("{verb} {:?}, pid {}\n", vm.summary.name, vm.summary.pid);
    out.push_str(&fields(&reach(vm)));
    say(&out)?;
    Ok(Exit::Done)
}

/// How to get at a VM.
fn reach(vm: &VmDetail) -> Vec<(&'static str, String)> {
    let mut rows: Vec<_> =
        vm.consoles.iter().map(|(label, where_)| ("console", format!("{label} at {where_}"))).collect();
    rows.push(("qmp", format!("{} (one client at a time)", vm.qmp.display())));
    if let Some(log) = &vm.log {
        rows.push(("log", log.display().to_string()));
    }
    rows
}

fn describe(vm: &VmDetail) -> String {
    let s = &vm.summary;
    let mut rows = vec![
        ("name", s.name.clone()),
        ("pid", s.pid.to_string()),
        ("status", s.why.as_ref().map_or(s.status.clone(), |why| format!("ended: {why}"))),
        ("memory", format!("{} ({})", format_bytes(s.memory_bytes), s.memory)),
        ("origin", if s.adopted { "adopted" } else { "started here or moved here" }.to_owned()),
    ];
    if let Some(share) = vm.huge_share {
        rows.push(("huge pages", format!("{:.0} % of guest memory", share * 100.0)));
    }
    rows.extend(pinned(vm));
    if let Some(qemu) = &vm.qemu {
        rows.push(("qemu", qemu.clone()));
    }
    for file in &vm.ram {
        let held = file.allocated.map(|a| format!(", holds {}", format_bytes(a))).unwrap_or_default();
        rows.push((
            "ram",
            format!("{} {} ({}{held})", file.id, file.path.display(), format_bytes(file.size)),
        ));
    }
    rows.extend(s.devices.iter().map(|info| {
        let lacks = if info.held { "" } else { ": the VM lacks it now" };
        (
            "device",
            format!("{} (QEMU's {} on {}){lacks}", info.device.request, info.device.id, info.device.bus),
        )
    }));
    rows.push(("folder", vm.dir.display().to_string()));
    rows.extend(reach(vm));
    if let Some(progress) = &vm.progress {
        rows.push(("migration", format!("{} {}", progress.id, line(progress))));
    }
    for (key, value) in &vm.environment {
        rows.push(("environment", format!("{key}={value}")));
    }
    rows.push(("command", vm.command_line.join(" ")));
    fields(&rows)
}

/// `./qemu` means this folder here, not the daemon's. A bare word is looked up in the daemon's PATH.
fn absolute_program(program: &str) -> String {
    if program.contains('/') && !program.starts_with('/') {
        return std::path::absolute(program).map_or_else(|_| program.to_owned(), |p| p.display().to_string());
    }
    program.to_owned()
}

/// Arguments, or parts of them after a `=`, that name a file below `here` by a relative path.
fn relative_files<'a>(command_line: &'a [String], here: &Path) -> Vec<&'a str> {
    let arguments = command_line.iter().skip(1);
    let parts = arguments
        .flat_map(|a| a.split(','))
        .map(|part| part.rsplit_once('=').map_or(part, |(_, value)| value));
    parts
        .filter(|p| p.contains(['.', '/']) && !p.starts_with(['/', '-', '{']) && here.join(p).is_file())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_named_by_a_relative_path_are_found() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("disk.img"), "").unwrap();
        let line: Vec<String> = [
            "./q",
            "-drive",
            "file=disk.img,if=virtio",
            "-m",
            "1G",
            "-kernel",
            "/boot/k",
            "-x",
            "{vmdir}/disk.img",
        ]
        .map(str::to_owned)
        .into();
        assert_eq!(relative_files(&line, dir.path()), ["disk.img"]);
    }

    #[test]
    fn a_bare_program_name_is_left_to_the_daemon() {
        assert_eq!(absolute_program("qemu-system-x86_64"), "qemu-system-x86_64");
        assert!(absolute_program("./qemu").starts_with('/'));
    }
}
