//! `vmove setup tls`.

mod authority;
mod folder;
mod text;

use std::path::{Path, PathBuf};

use serde_json::json;
use vmove_types::problem::{Code, Exit};

use self::authority::{Authority, AuthorityError, Issued};
use self::folder::{CLIENTS, FolderError, Known, Made, NODES};
use self::text::Outcome;
use crate::args::setup::{NodeWanted, SetupTls};
use crate::failure::Failure;
use crate::output::{End, say, say_json};

impl From<AuthorityError> for Failure {
    fn from(error: AuthorityError) -> Self {
        let code = match &error {
            AuthorityError::Read { .. } => Code::LocalFile,
            AuthorityError::Make(_) => Code::Internal,
            _ => Code::BadRequest,
        };
        Self::new(code, error.to_string())
    }
}

impl From<FolderError> for Failure {
    fn from(error: FolderError) -> Self {
        Self::new(Code::LocalFile, error.to_string())
    }
}

/// Makes all that was asked for, or nothing.
pub fn tls(args: &SetupTls, json: bool) -> Result<Exit, End> {
    let out = out_folder(args);
    let known = known(args, out)?;
    check_names(args, &known).map_err(Failure::bad_request)?;
    check_absent(args, out)?;
    let authority = match &args.ca {
        Some(folder) => Authority::open(folder, args.days)?,
        None => Authority::make(args.days)?,
    };
    write(args, out, &authority, &known)?;
    let outcome = Outcome {
        out,
        authority: args.ca.as_deref().unwrap_or(out),
        new_authority: args.ca.is_none(),
        nodes: &args.nodes,
        clients: &args.clients,
        known: &known.nodes,
        days: args.days,
    };
    if json {
        let folder = |kind: &str, name: &str| out.join(kind).join(name);
        let nodes = args.nodes.iter().map(|node| {
            json!({ "name": node.name, "folder": folder(NODES, &node.name), "address": node.address(), "certificate_for": node.subject_names() })
        });
        let clients = args.clients.iter().map(|client| {
            json!({ "name": client.name, "folder": folder(CLIENTS, &client.name), "role": client.role.to_string() })
        });
        let (nodes, clients): (Vec<_>, Vec<_>) = (nodes.collect(), clients.collect());
        say_json(&json!({
            "folder": out, "new_authority": outcome.new_authority, "days": args.days,
            "nodes": nodes, "clients": clients, "next": outcome.next_steps(),
        }))?;
    } else {
        say(&outcome.next_steps().join("\n"))?;
    }
    Ok(Exit::Done)
}

/// Where all is put.
fn out_folder(args: &SetupTls) -> &Path {
    // One of them is required.
    args.out.as_ref().or(args.ca.as_ref()).map_or(Path::new("."), PathBuf::as_path)
}

/// Nodes and clients of earlier runs, but for those that get new certificates now.
fn known(args: &SetupTls, out: &Path) -> Result<Known, FolderError> {
    let mut known = Known::default();
    if let Some(folder) = &args.ca {
        known = Known::read(folder)?;
        if folder != out {
            known.add(Known::read(out)?);
        }
    }
    known.nodes.retain(|node| args.nodes.iter().all(|new| new.name != node.name));
    known.clients.retain(|(name, _)| args.clients.iter().all(|new| new.name != *name));
    Ok(known)
}

/// Each name and address is one node's or client's only.
fn check_names(args: &SetupTls, known: &Known) -> Result<(), String> {
    let nodes: Vec<&NodeWanted> = known.nodes.iter().chain(&args.nodes).collect();
    let clients = known.clients.iter().map(|(name, _)| name).chain(args.clients.iter().map(|c| &c.name));
    let clients: Vec<&String> = clients.collect();
    let names = nodes.iter().map(|node| &node.name).chain(clients.iter().copied());
    let mut seen: Vec<&String> = Vec::new();
    for name in names {
        if seen.iter().any(|other| other.eq_ignore_ascii_case(name)) {
            return Err(format!("expected one node or client named {name:?}, found two; rename one of them"));
        }
        seen.push(name);
    }
    for (place, node) in nodes.iter().enumerate() {
        if let Some(other) = nodes[..place].iter().find(|other| other.address() == node.address()) {
            let (a, b, address) = (&other.name, &node.name, node.address());
            return Err(format!("expected an address for each node, found {address} of {a} and of {b}"));
        }
        // A certificate with the name of a client opens no session between nodes.
        let of_client = |host: &&String| clients.iter().any(|client| client.eq_ignore_ascii_case(host));
        if let Some(host) = node.hosts.iter().find(of_client) {
            return Err(format!(
                "expected other names for clients than for nodes, found {host:?} of node {}",
                node.name
            ));
        }
    }
    Ok(())
}

/// Nothing of what will be made is there.
fn check_absent(args: &SetupTls, out: &Path) -> Result<(), FolderError> {
    let authority =
        ["ca.pem", "ca.key"].map(|name| (out.join(name), "add to it by --ca, or choose another --out"));
    let authority = authority.into_iter().filter(|_| args.ca.is_none());
    let nodes = args.nodes.iter().map(|node| out.join(NODES).join(&node.name));
    let clients = args.clients.iter().map(|client| out.join(CLIENTS).join(&client.name));
    let folders = nodes.chain(clients).map(|path| (path, "choose another --out for new certificates"));
    for (path, remedy) in authority.chain(folders) {
        // A symbolic link that leads nowhere is there, too.
        if path.symlink_metadata().is_ok() {
            return Err(FolderError::There { path, remedy });
        }
    }
    Ok(())
}

fn write(args: &SetupTls, out: &Path, authority: &Authority, known: &Known) -> Result<(), Failure> {
    let mut made = Made::default();
    made.folder(out)?;
    if let Some(key) = &authority.new_key {
        made.file(&out.join("ca.pem"), &authority.cert)?;
        made.secret(&out.join("ca.key"), key)?;
    }
    let earlier = known.clients.iter().map(|(_, entry)| entry.clone());
    let entries: Vec<String> = earlier.chain(args.clients.iter().map(text::client_entry)).collect();
    for node in &args.nodes {
        let all = known.nodes.iter().chain(&args.nodes);
        let others: Vec<_> = all.filter(|other| other.name != node.name).collect();
        let folder = out.join(NODES).join(&node.name);
        let issued = authority.node(node, args.days)?;
        put(&mut made, &folder, "node", &issued, &authority.cert)?;
        made.file(&folder.join("vmoved.toml"), &text::vmoved_toml(node, &others, &entries))?;
    }
    for client in &args.clients {
        let folder = out.join(CLIENTS).join(&client.name);
        let issued = authority.client(client, args.days)?;
        put(&mut made, &folder, "client", &issued, &authority.cert)?;
        made.file(&folder.join("client.toml"), &text::client_entry(client))?;
    }
    made.keep();
    Ok(())
}

/// Certificate, key and authority of somebody.
fn put(
    made: &mut Made,
    folder: &Path,
    who: &str,
    issued: &Issued,
    authority: &str,
) -> Result<(), FolderError> {
    made.folder(folder)?;
    made.file(&folder.join(format!("{who}.pem")), &issued.cert)?;
    made.secret(&folder.join(format!("{who}.key")), &issued.key)?;
    made.file(&folder.join("ca.pem"), authority)
}
