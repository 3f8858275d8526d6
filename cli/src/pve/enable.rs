//! `vmove-pve enable` and `disable`.

use serde::Serialize;
use vmove_pve::{Config, Section, Vm};
use vmove_types::problem::Exit;

use super::qemu::Qemu;
use super::{cluster, host, obstacles};
use crate::args::pve::EnableArgs;
use crate::changed_lines::changed_lines;
use crate::failure::Failure;
use crate::output::{End, say, say_json};

/// What was, or would be, changed.
#[derive(Debug, Serialize)]
struct Changes {
    vmid: u32,
    /// Lines of the configuration, with `+` or `-` before.
    lines: Vec<String>,
    /// What is in the way: nothing is changed then.
    lacks: Vec<String>,
    /// The VM runs: what is changed counts from its next start.
    runs: bool,
    /// False if nothing was changed.
    done: bool,
}

/// Gives a VM what vmove needs.
pub fn enable(args: &EnableArgs, json: bool) -> Result<Exit, End> {
    let vm = cluster::own_vm(args.vmid)?;
    vm.not_locked().map_err(Failure::from)?;
    let mut lacks = obstacles::of_host(&host::lacks());
    let found = cluster::read_cluster()?.obstacles(args.vmid, vm.config(), None);
    lacks.extend(found.iter().map(ToString::to_string));
    let exit = changed(args, &vm, lacks, json, |vm, section| Ok(vm.enabled(section)?))?;
    if exit == Exit::Done && !args.check && !json {
        // Proxmox VE copies the arguments, and with them the name of the memory's file.
        say(&format!(
            "Before a clone or a restored copy of VM {0} starts for the first time, run `vmove-pve enable` or `disable` for that copy: it would use the memory of VM {0}",
            args.vmid
        ))?;
    }
    Ok(exit)
}

/// Takes that away.
pub fn disable(args: &EnableArgs, json: bool) -> Result<Exit, End> {
    let vm = cluster::own_vm(args.vmid)?;
    vm.not_locked().map_err(Failure::from)?;
    changed(args, &vm, Vec::new(), json, |vm, section| Ok(vm.disabled(section)?))
}

fn changed(
    args: &EnableArgs,
    vm: &Vm,
    lacks: Vec<String>,
    json: bool,
    make: impl Fn(&Vm, Section) -> Result<Config, Failure>,
) -> Result<Exit, End> {
    let runs = Qemu::of(args.vmid).is_some();
    let section = if runs { Section::Pending } else { Section::Main };
    let new = make(vm, section)?;
    let lines = changed_lines(&vm.config().text(), &new.text());
    let done = !args.check && lacks.is_empty();
    if done {
        cluster::change(args.vmid, |vm| make(vm, section))?;
    }
    show(&Changes { vmid: args.vmid.number(), lines, lacks, runs, done }, args.check, json)
}

fn show(changes: &Changes, check: bool, json: bool) -> Result<Exit, End> {
    let ended = if changes.lacks.is_empty() { Exit::Done } else { Exit::Refused };
    if json {
        say_json(changes)?;
        return Ok(ended);
    }
    let vmid = changes.vmid;
    let mut out = changes.lines.clone();
    out.extend(changes.lacks.iter().map(|what| format!("lacks: {what}")));
    out.push(match changes {
        _ if check => "nothing was changed (--check)".to_owned(),
        Changes { done: false, .. } => "nothing was changed".to_owned(),
        Changes { lines, .. } if lines.is_empty() => format!("VM {vmid} was as it should be"),
        Changes { runs: true, .. } => format!(
            "VM {vmid} is changed; that counts from the next start of its QEMU (`qm shutdown {vmid}; qm start {vmid}`; a restart in the guest is not enough)"
        ),
        Changes { .. } => format!("VM {vmid} is changed"),
    });
    say(&out.join("\n"))?;
    Ok(ended)
}
