//! The `vfork` command.

mod devices;
mod join;
mod place;
mod progress;

use std::process::ExitCode;
use std::time::Duration;

use vmove_client::Client;
use vmove_spread::simulate::{SimulateArguments, SimulateError};
use vmove_types::fork::{ForkNode, ForkRequest, RestoreRequest, TemplateRequest, WarmRequest};
use vmove_types::fork_report::{ForkProgress, ForkReport, FreezeReport, HostReport, LoadWrite, OwnMemory};
use vmove_types::problem::{Code, Exit, Problem};
use vmove_types::units::{format_bytes, format_ms};

use crate::args::vfork::{Cli, Command, Create, Restore, Save, Template, Warm};
use crate::failure::{Failure, where_it_went};
use crate::manual;
use crate::output::{End, note, parse, report, say, say_json, table};
use crate::waiting::{LEFT_RUNNING, Wait};

/// How often progress is asked for.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Runs `vfork` with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli: Cli = match parse("vfork") {
        Ok(cli) => cli,
        Err(exit) => return exit,
    };
    let json = cli.global.json;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report("vfork", &Failure::new(Code::Internal, error.to_string()), json),
    };
    let client = match cli.global.client() {
        Ok(client) => client,
        Err(failure) => return report("vfork", &failure, json),
    };
    let ended = runtime.block_on(async {
        match dispatch(&client, cli).await {
            Err(End::Failed(failure)) => Err(End::Failed(where_it_went(&client, failure).await)),
            other => other,
        }
    });
    match ended {
        Ok(exit) => ExitCode::from(exit.code()),
        Err(End::BrokenPipe) => ExitCode::SUCCESS,
        Err(End::Left) => ExitCode::from(LEFT_RUNNING),
        Err(End::Failed(failure)) => report("vfork", &failure, json),
    }
}

async fn dispatch(client: &Client, cli: Cli) -> Result<Exit, End> {
    let json = cli.global.json;
    match cli.command {
        Command::Create(args) => create(client, *args, json).await,
        Command::Warm(args) => warm(client, &args, json).await,
        Command::List => list(client, json).await,
        Command::Recover(args) => recover(client, &args.id, json).await,
        Command::Tree(args) => tree(client, &args.vm, json).await,
        Command::Kill(args) => kill(client, &args.child, json).await,
        Command::Join(args) => join::join(client, &args, json).await,
        Command::Promote(args) => promote(client, &args.vm, json).await,
        Command::Template(Template::Save(args)) => save(client, args, json).await,
        Command::Template(Template::Load(args)) => load(client, &args.name, json).await,
        Command::Template(Template::Restore(args)) => restore(client, args, json).await,
        Command::Template(Template::List) => list_templates(client, json).await,
        Command::Template(Template::Rm(args)) => remove(client, &args.name, json).await,
        Command::Simulate(args) => simulate(&args, json),
        Command::Completions(args) => manual::completions_of::<Cli>("vfork", args.shell),
        Command::Man(args) => manual::man(&args.dir, json),
    }
}

fn simulate(args: &SimulateArguments, json: bool) -> Result<Exit, End> {
    let text = args.run(json).map_err(|error| {
        let code = match error {
            SimulateError::File { .. } => Code::LocalFile,
            _ => Code::BadOption,
        };
        Problem::from_error(code, &error)
    })?;
    say(&text)?;
    Ok(Exit::Done)
}

async fn create(client: &Client, args: Create, json: bool) -> Result<Exit, End> {
    if let (Some(count), Some(vm)) = (args.place, &args.vm) {
        return place::create(&args.at, vm, count, args.cluster.unwrap_or_default(), json).await;
    }
    let id = uuid::Uuid::new_v4().simple().to_string();
    let of = args.vm.clone().or_else(|| args.template.clone()).unwrap_or_default();
    let request = ForkRequest {
        vm: args.vm,
        template: args.template,
        count: args.count,
        verify: args.verify,
        paused: args.paused,
        id: Some(id.clone()),
        expect_written: args.expect_written,
        warm: args.warm,
        nodes: args.nodes,
        here: args.here,
        shares: args.shares,
        way: args.way.asked(),
        whole: args.whole,
        devices: args.devices,
        names: args.names,
        grants: args.grants.into_iter().collect(),
        as_it_was: false,
        let_run: args.let_run,
        parting: args.parting.request(),
    };
    let wait = Wait::of_vfork(json, format!("fork of {of}"), left_to_itself(&id, &of));
    let shown = progress::show(client, &id, args.count, json);
    let done = wait.answer_shown(client.fork(&request), shown).await?;
    let failed = done.children.iter().filter(|child| child.error.is_some()).count();
    if json {
        say_json(&done)?;
    } else {
        say(&describe(&done))?;
    }
    for warning in &done.warnings {
        note(&format!("vfork: {warning}"));
    }
    devices::warn(&done);
    let lost: usize = done.hosts.iter().map(|host| host.children - host.running).sum();
    if failed + lost > 0 {
        let all = done.children.len() + lost;
        note(&format!("vfork: {} of {all} children did not come to be", failed + lost));
        return Ok(Exit::Failed);
    }
    Ok(if done.lacks_devices() { Exit::NeedsRecovery } else { Exit::Done })
}

/// What is said to whoever does not wait for a fork.
fn left_to_itself(id: &str, of: &str) -> String {
    format!(
        "the fork goes on, and cannot be called off: `vfork list` shows it ({id}), `vfork tree {of}` its children, `vfork kill CHILD` ends one"
    )
}

fn describe(done: &ForkReport) -> String {
    let rows: Vec<Vec<String>> = done
        .children
        .iter()
        .map(|child| {
            let state = match (&child.error, child.running_ms) {
                (Some(error), _) => format!("failed: {error}"),
                (None, Some(at)) => format!("running after {}", format_ms(at)),
                (None, None) => "did not run".to_owned(),
            };
            vec![child.name.clone(), child.node.clone(), child.pid.to_string(), child.network.clone(), state]
        })
        .collect();
    let mut text = table(&["CHILD", "NODE", "PID", "NETWORK", "STATE"], &rows);
    text.push_str(&describe_verified(done));
    text.push_str(&describe_hosts(done));
    if let Some(first) = done.own_memory_before {
        text.push_str(&format!(
            "{} had been forked before: it got memory of its own first, in {}\n",
            done.parent,
            format_ms(first.total_ms)
        ));
    }
    text.push_str(&devices::describe(done));
    text.push_str(&describe_freeze(&done.parent, done.freeze.as_ref()));
    for disk in &done.disks {
        text.push_str(&format!(
            "{} writes to {} since; {} is frozen, and must stay as it is\n",
            done.parent,
            disk.overlay.display(),
            disk.base.display()
        ));
    }
    text.push_str(&describe_own_memory(&done.parent, done.own_memory.as_ref()));
    text.push_str(&format!(
        "{} stood still for {}; all children ran after {}\n",
        done.parent,
        format_ms(done.parent_stood_still_ms),
        format_ms(done.all_running_ms)
    ));
    text
}

/// What it took to make the guest as it was.
fn describe_own_memory(vm: &str, own: Option<&OwnMemory>) -> String {
    let Some(own) = own else { return String::new() };
    let copied = format_bytes(own.template_bytes + own.own_bytes);
    let mut text = format!(
        "{vm} has memory of its own again and can be forked and moved: {copied} copied in {}",
        format_ms(own.total_ms)
    );
    if own.stood_still_ms() > 0.0 {
        text.push_str(&format!(
            "; it stood still for {} of that, at most, a few milliseconds at a time",
            format_ms(own.stood_still_ms())
        ));
    }
    text.push('\n');
    text
}

/// What `--verify` found.
fn describe_verified(done: &ForkReport) -> String {
    let mut text = String::new();
    for child in done.children.iter().filter(|child| child.verified == Some(true)) {
        let write = |w: &LoadWrite| {
            format!("{} bytes at {:#x} of RAM block {} ({})", w.bytes, w.offset, w.block, w.what)
        };
        let written: Vec<String> = child.written_while_loading.iter().map(write).collect();
        text.push_str(&child.name);
        text.push_str(" was equal to the template before it ran");
        if !written.is_empty() {
            text.push_str(", but for what was written while its device state was loaded: ");
            text.push_str(&written.join(", "));
        }
        text.push('\n');
    }
    text
}

/// How memory was frozen, where that is not the usual way.
fn describe_freeze(vm: &str, freeze: Option<&FreezeReport>) -> String {
    let Some((freeze, why)) = freeze.and_then(|freeze| Some((freeze, freeze.why.as_ref()?))) else {
        return String::new();
    };
    let pages = freeze.pages_by_faults + freeze.pages_by_copy;
    format!(
        "The memory of {vm} was write-protected and copied while it ran, since {why}. It waited for {} of {pages} pages; {} were kept, \
         the copy was whole after {}\n",
        freeze.pages_by_faults,
        format_bytes(freeze.kept_bytes),
        format_ms(freeze.whole_ms)
    )
}

/// What went to other hosts, which way and why.
fn describe_hosts(done: &ForkReport) -> String {
    if done.hosts.is_empty() {
        return String::new();
    }
    let row = |host: &HostReport| {
        let state = match (&host.error, host.template_ms) {
            (Some(error), _) => format!("failed: {error}"),
            (None, at) => {
                let there = format!("template there after {}", format_ms(at.unwrap_or(0.0)));
                let waited = host.faults.map(|f| format!(", children waited for {} chunks", f.fetched));
                there + &waited.unwrap_or_default()
            }
        };
        vec![
            host.node.clone(),
            format!("{}/{}", host.running, host.children),
            format_bytes(host.multicast_bytes),
            format_bytes(host.from_root_bytes),
            format_bytes(host.from_hosts_bytes),
            host.repaired.to_string(),
            state,
        ]
    };
    let rows: Vec<Vec<String>> = done.hosts.iter().map(row).collect();
    let mut text = String::new();
    if !done.fabric.is_empty() {
        text.push_str(&format!("fabric {} ({})\n", done.fabric, done.fabric_reason));
    }
    text +=
        &table(&["NODE", "CHILDREN", "MULTICAST", "FROM HERE", "FROM OTHERS", "REPAIRED", "STATE"], &rows);
    for host in &done.hosts {
        if let Some(disks) = &host.disks {
            let why = host.disks_reason.as_deref().unwrap_or_default();
            text.push_str(&format!("{}: disks: {disks} ({why})\n", host.node));
        }
    }
    if let Some(way) = &done.distribution {
        text.push_str(&format!(
            "{} of memory went by {}{}; {} left this node\n",
            format_bytes(way.memory_bytes),
            way.way,
            if way.asked { ", as asked" } else { "" },
            format_bytes(way.root_bytes)
        ));
        if way.first_bytes > 0 {
            let first = format_bytes(way.first_bytes);
            text.push_str(&format!("  {first} of it first, since {} writes there\n", done.parent));
        }
        for other in &way.estimates {
            text.push_str(&format!("  {}: {:.3} s ({})\n", other.way, other.seconds, other.arithmetic));
        }
    }
    text
}

async fn warm(client: &Client, args: &Warm, json: bool) -> Result<Exit, End> {
    let request = WarmRequest { count: args.count, nodes: args.nodes.clone() };
    let vm = &args.vm;
    let left = format!(
        "children are still being prepared: `vfork tree {vm}` shows them, `vfork warm {vm} --count 0` ends them"
    );
    let wait = Wait::of_vfork(json, format!("children of {vm} are prepared"), left);
    let warm = wait.answer(client.prepare_children(vm, &request)).await?;
    if json {
        say_json(&warm)?;
    } else {
        let away: String = warm.nodes.iter().map(|at| format!(", {} on {}", at.prepared, at.node)).collect();
        let of = if warm.prepared == 1 { "child of" } else { "children of" };
        let are = if warm.prepared == 1 { "is" } else { "are" };
        say(&format!("{} {of} {:?} {are} prepared here{away}", warm.prepared, warm.vm))?;
    }
    Ok(Exit::Done)
}

async fn list(client: &Client, json: bool) -> Result<Exit, End> {
    let list = client.forks().await?;
    if json {
        say_json(&list)?;
        return Ok(Exit::Done);
    }
    if list.forks.is_empty() {
        say("No fork on this node since vmoved was started; make one by `vfork create`")?;
        return Ok(Exit::Done);
    }
    let row = |fork: &ForkProgress| {
        let state = match &fork.error {
            Some(error) => format!("{}: {}", fork.phase, error.message),
            None => fork.phase.clone(),
        };
        vec![fork.id.clone(), fork.parent.clone(), format!("{}/{}", fork.running, fork.children), state]
    };
    let rows: Vec<Vec<String>> = list.forks.iter().map(row).collect();
    say(&table(&["ID", "PARENT", "CHILDREN", "STATE"], &rows))?;
    Ok(Exit::Done)
}

async fn recover(client: &Client, id: &str, json: bool) -> Result<Exit, End> {
    let left = format!("fork {id} is still being taken up: `vfork list` shows it");
    let wait = Wait::of_vfork(json, format!("fork {id} is taken up"), left);
    let recovered = wait.answer(client.recover_fork(id)).await?;
    if json {
        say_json(&recovered)?;
    } else {
        say(&format!("Fork {}: {}", recovered.id, recovered.note))?;
    }
    Ok(Exit::Done)
}

async fn tree(client: &Client, vm: &str, json: bool) -> Result<Exit, End> {
    let node = client.fork_tree(vm, false).await?;
    if json {
        say_json(&node)?;
    } else {
        let mut text = String::new();
        draw(&node, 0, &mut text);
        say(&text)?;
    }
    Ok(Exit::Done)
}

fn draw(node: &ForkNode, depth: usize, text: &mut String) {
    let memory = if node.private { ", private memory" } else { "" };
    let at = node.node.as_ref().or(node.why.as_ref()).map(|at| format!(": {at}")).unwrap_or_default();
    text.push_str(&format!("{}{} ({}{at}{memory})\n", "  ".repeat(depth), node.name, node.status));
    for at in &node.prepared {
        text.push_str(&format!("{}{} prepared on {}\n", "  ".repeat(depth + 1), at.prepared, at.node));
    }
    for child in &node.children {
        draw(child, depth + 1, text);
    }
}

async fn kill(client: &Client, child: &str, json: bool) -> Result<Exit, End> {
    let node = client.fork_tree(child, false).await?;
    if node.parent.is_none() {
        let text = format!("{child:?} is not a child of a fork: `vmove stop` ends other VMs");
        return Err(Problem::new(Code::BadRequest, text).into());
    }
    let stopped = client.kill_child(child).await?;
    if json {
        say_json(&stopped)?;
    } else {
        say(&format!("{:?} has ended ({})", stopped.name, stopped.how))?;
    }
    Ok(Exit::Done)
}

async fn promote(client: &Client, vm: &str, json: bool) -> Result<Exit, End> {
    let what = format!("{vm} is given memory of its own");
    let left = format!(
        "{vm} is still being given memory of its own: `vfork tree {vm}` says `private memory` until that is done"
    );
    let done = Wait::of_vfork(json, what, left).answer(client.promote(vm)).await?;
    if json {
        say_json(&done)?;
    } else if let Some(own) = done.own_memory {
        say(&format!(
            "{:?} has memory of its own: {} copied in {}; it stood still for {}",
            done.vm,
            format_bytes(own.template_bytes + own.own_bytes),
            format_ms(own.total_ms),
            format_ms(own.stood_still_ms())
        ))?;
    } else {
        say(&format!("{:?} had memory of its own already", done.vm))?;
    }
    if !json {
        let away = devices::describe_away(&done.vm, &done.devices);
        if !away.is_empty() {
            say(away.trim_end())?;
        }
        for disk in &done.disks {
            let files: Vec<_> = disk.files.iter().map(|file| file.display().to_string()).collect();
            say(&format!("Disk {} is {}", disk.device, files.join(" over ")))?;
        }
    }
    Ok(devices::exit(&done.devices))
}

async fn save(client: &Client, args: Save, json: bool) -> Result<Exit, End> {
    let Save { vm, name, let_run, parting } = args;
    let request = TemplateRequest { vm, name, let_run, parting: parting.request() };
    let (vm, name) = (&request.vm, &request.name);
    let left = format!(
        "template {name} is still being saved: `vfork template list` shows it, `vfork template rm {name}` removes it then"
    );
    let wait = Wait::of_vfork(json, format!("template {name} of {vm} is saved"), left);
    let saved = wait.answer(client.save_template(&request)).await?;
    if json {
        say_json(&saved)?;
    } else {
        say(&format!(
            "Template {:?} is saved: {} on disk; {:?} stood still for {}",
            saved.name,
            format_bytes(saved.disk_bytes),
            saved.vm,
            format_ms(saved.parent_pause_ms.unwrap_or(0.0))
        ))?;
        let own = describe_own_memory(&saved.vm, saved.own_memory.as_ref());
        if !own.is_empty() {
            say(own.trim_end())?;
        }
        let said = devices::describe_away(&saved.vm, &saved.devices)
            + &describe_freeze(&saved.vm, saved.freeze.as_ref());
        if !said.is_empty() {
            say(said.trim_end())?;
        }
    }
    for warning in &saved.warnings {
        note(&format!("vfork: {warning}"));
    }
    Ok(devices::exit(&saved.devices))
}

async fn load(client: &Client, name: &str, json: bool) -> Result<Exit, End> {
    let left = format!("template {name} is still being loaded: `vfork template list` shows it");
    let wait = Wait::of_vfork(json, format!("template {name} is loaded"), left);
    let loaded = wait.answer(client.load_template(name)).await?;
    if json {
        say_json(&loaded)?;
    } else {
        say(&format!(
            "Template {:?} is loaded; fork it by: vfork create --template {0:?} --count N",
            loaded.name
        ))?;
    }
    Ok(Exit::Done)
}

async fn restore(client: &Client, args: Restore, json: bool) -> Result<Exit, End> {
    let Restore { template, vm, devices, grant } = args;
    let left = format!(
        "the guest of template {template} is still being restored: `vmove list` shows it, `vmove stop VM` ends it"
    );
    let wait = Wait::of_vfork(json, format!("the guest of template {template} is restored"), left);
    let request = RestoreRequest { vm, devices, grant };
    let restored = wait.answer(client.restore_template(&template, &request)).await?;
    let vm = &restored.child.name;
    if json {
        say_json(&restored)?;
    } else {
        say(&format!(
            "{vm:?} runs as it was when template {template:?} was made, after {}; network: {}",
            format_ms(restored.total_ms),
            restored.child.network
        ))?;
        let own = describe_own_memory(vm, restored.own_memory.as_ref());
        if !own.is_empty() {
            say(own.trim_end())?;
        }
    }
    for warning in &restored.warnings {
        note(&format!("vfork: {warning}"));
    }
    let lacks = restored.child.devices.iter().any(|device| device.problem.is_some());
    Ok(if lacks { Exit::NeedsRecovery } else { Exit::Done })
}

async fn list_templates(client: &Client, json: bool) -> Result<Exit, End> {
    let list = client.templates().await?;
    if json {
        say_json(&list)?;
        return Ok(Exit::Done);
    }
    if list.templates.is_empty() {
        say("No template on this node; make one by `vfork template save`")?;
        return Ok(Exit::Done);
    }
    let word = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    let rows: Vec<Vec<String>> = list
        .templates
        .into_iter()
        .map(|t| {
            let disk = if t.saved { format_bytes(t.disk_bytes) } else { "-".to_owned() };
            vec![t.name, t.vm, format_bytes(t.memory_bytes), word(t.loaded), disk, t.qemu]
        })
        .collect();
    say(&table(&["NAME", "VM", "MEMORY", "LOADED", "ON DISK", "QEMU"], &rows))?;
    Ok(Exit::Done)
}

async fn remove(client: &Client, name: &str, json: bool) -> Result<Exit, End> {
    let removed = client.remove_template(name).await?;
    if json {
        say_json(&removed)?;
    } else {
        say(&format!("Template {:?} is removed", removed.name))?;
    }
    Ok(Exit::Done)
}
