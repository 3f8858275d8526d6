//! Asking other hosts whether they take part, before anything is done to the guest.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use vmove_node::blocking::run_blocking;
use vmove_node::peer::{Channel, PeerTarget, SessionId, Token};
use vmove_qmp::confine::Confinement;
use vmove_types::fork::{ForkRequest, ForkWay};
use vmove_types::fork_report::{HostProgress, HostReport};
use vmove_types::problem::chain;
use vmove_types::time::Mono;

use super::Fork;
use super::divide::Division;
use crate::disk::{self, Disk};
use crate::engine::ForkEngine;
use crate::engine::devices::Dealt;
use crate::engine::error::{ForkError, ImageError, TalkError};
use crate::engine::images::{Proofs, find_server, prove};
use crate::engine::message::{Numbers, OfGuest, Order, OrderDisk, Taken, ToHost, ToParent};
use crate::engine::origin::Outline;
use crate::engine::peers::{Peers, answer};
use crate::record::Lineage;

/// For a host to look at its memory and to ask its QEMU for its version.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How often hosts that wait for a freeze are told that this daemon lives. After some minutes without a word they give up.
const ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// The hosts of a fork beside this one.
#[derive(Debug)]
pub struct CalledHosts {
    /// Children that are to be on this node.
    pub here: usize,
    /// Numbers of the others, also where a host refused.
    pub numbers: Vec<u32>,
    pub(super) session: SessionId,
    pub(super) token: Token,
    pub(super) hosts: Vec<CalledHost>,
    pub(super) refused: Vec<HostReport>,
    /// Nodes in the order of the request.
    pub(super) nodes: Vec<String>,
    pub(super) way: Option<ForkWay>,
    pub(super) verify: bool,
    /// Disks that the guest writes to.
    pub(super) disks: Vec<Disk>,
    /// The rights of its QEMU, and of what serves their images.
    pub(super) confinement: Confinement,
    /// What would serve their images, or why they cannot be served; `None` if there are none.
    pub(super) server: Option<Result<PathBuf, ImageError>>,
}

impl CalledHosts {
    /// Before any of them was asked.
    fn none(division: &Division, request: &ForkRequest) -> Self {
        Self {
            here: division.here,
            numbers: Vec::new(),
            session: SessionId::random(),
            token: Token::random(),
            hosts: Vec::new(),
            refused: Vec::new(),
            nodes: division.away.iter().map(|(node, _)| node.clone()).collect(),
            way: request.way,
            verify: request.verify,
            disks: Vec::new(),
            confinement: Confinement::default(),
            server: None,
        }
    }

    /// Does what takes long before there is a template, with the hosts told that this daemon lives.
    pub async fn alive_during<T>(&mut self, work: impl Future<Output = T>) -> T {
        if self.hosts.is_empty() {
            return work.await;
        }
        let (end, ended) = oneshot::channel();
        // A task of its own: no host holds up a freeze.
        let telling = tokio::spawn(tell_alive(std::mem::take(&mut self.hosts), ended));
        let done = work.await;
        let _ = end.send(());
        match telling.await {
            Ok(hosts) => self.hosts = hosts,
            Err(error) => tracing::error!(%error, "the hosts of a fork are lost: a task failed"),
        }
        done
    }
}

async fn tell_alive(mut hosts: Vec<CalledHost>, mut ended: oneshot::Receiver<()>) -> Vec<CalledHost> {
    while tokio::time::timeout(ALIVE_INTERVAL, &mut ended).await.is_err() {
        for host in &mut hosts {
            // A lost connection shows when something is received.
            let _ = host.channel.send(&ToHost::Alive).await;
        }
    }
    hosts
}

/// A host that takes part.
#[derive(Debug)]
pub struct CalledHost {
    pub(super) target: PeerTarget,
    pub(super) children: usize,
    /// Names of the children.
    pub(super) names: Vec<String>,
    /// What they are told, if a guest has asked for them.
    pub(super) numbers: Option<Numbers>,
    pub(super) channel: Channel<ToParent>,
    /// How it would get the template.
    pub(super) taken: Taken,
    /// When the order was sent.
    pub(super) sent: Mono,
}

impl ForkEngine {
    /// Asks the hosts that a request names. Those that cannot take part are told of in the report, unless nobody is left.
    pub(super) async fn call_hosts(
        self: &Arc<Self>,
        fork: &Fork,
        dealt: &Dealt,
        outline: impl FnOnce() -> Outline + Send,
    ) -> Result<CalledHosts, ForkError> {
        let request = &fork.request;
        let division = Division::of(request, &self.node)?;
        let mut called = CalledHosts::none(&division, request);
        if division.away.is_empty() {
            return Ok(called);
        }
        let nodes = division.away.iter().map(|(node, _)| self.peers.target(node));
        let targets: Vec<PeerTarget> = nodes.collect::<Result<_, _>>()?;
        let outline = outline();
        self.possible(&outline, request)?;
        if !outline.base.disks.is_empty() {
            called.disks.clone_from(&outline.base.disks);
            called.confinement = outline.base.confinement.clone();
            called.server = Some(self.server_of(&outline));
        }
        let (disks, proofs) = self.order_disks(&outline).await?;
        let mut orders = self.orders(fork, &outline, &division);
        let mut place = division.here;
        for order in &mut orders {
            let next = place + order.indexes.len();
            order.names = request.names.get(place..next).map(<[String]>::to_vec).unwrap_or_default();
            order.devices = dealt.order(place..next);
            let of_order = |name: &String| Some((name.clone(), request.grants.get(name)?.clone()));
            order.grants = order.children().filter_map(|(_, name)| of_order(&name)).collect();
            place = next;
        }
        called.numbers = orders.iter().flat_map(|order| order.indexes.clone()).collect();
        for order in orders.iter_mut().filter(|_| !disks.is_empty()) {
            order.disks.clone_from(&disks);
            order.no_export =
                called.server.as_ref().and_then(|server| server.as_ref().err()).map(|e| chain(e));
        }
        let hosts = division.away.iter().map(|(node, children)| HostProgress {
            node: node.clone(),
            phase: "asked".to_owned(),
            children: *children,
            ..HostProgress::default()
        });
        self.update(&fork.id, |p| p.hosts = hosts.collect());
        let asked = orders.clone();
        let mut calls = JoinSet::new();
        for (place, (target, order)) in targets.into_iter().zip(orders).enumerate() {
            let (peers, session, token) = (self.peers.clone(), called.session, called.token);
            calls.spawn(async move { (place, call(&peers, target, order, session, token).await) });
        }
        let mut ends: Vec<_> = calls.join_all().await;
        let _ = run_blocking(move || drop(proofs)).await;
        ends.sort_by_key(|(place, _)| *place);
        let mut errors = Vec::new();
        for (place, end) in ends {
            let (node, children) = &division.away[place];
            match end {
                Ok(host) => {
                    self.used_away(&asked[place]);
                    called.hosts.push(host);
                }
                Err(error) => {
                    let message = error.message();
                    tracing::warn!(fork = %fork.id, %node, why = %message, "a host does not take part in a fork");
                    self.host_is(&fork.id, node, "failed");
                    called.refused.push(HostReport {
                        node: node.clone(),
                        children: *children,
                        error: Some(message),
                        ..HostReport::default()
                    });
                    errors.push((node.clone(), error));
                }
            }
        }
        if called.hosts.is_empty() && called.here == 0 && !errors.is_empty() {
            return Err(ForkError::NoHost(errors));
        }
        Ok(called)
    }

    /// Refuses what no host could do.
    pub(in crate::engine) fn possible(
        &self,
        outline: &Outline,
        request: &ForkRequest,
    ) -> Result<(), ForkError> {
        self.peers.able().map_err(ForkError::Peers)?;
        if request.way == Some(ForkWay::Multicast) {
            self.peers.can_send().map_err(ForkError::NoMulticast)?;
        }
        if !outline.base.disks.is_empty() && outline.client.is_none() {
            return Err(ForkError::TemplateWithDisks);
        }
        Ok(())
    }

    /// What would serve the images of a guest, or why it cannot be done.
    fn server_of(&self, outline: &Outline) -> Result<PathBuf, ImageError> {
        self.images.able()?;
        find_server(outline.base.command_line.first().map_or("", String::as_str), &self.node)
    }

    /// What hosts are told of the disks.
    async fn order_disks(&self, outline: &Outline) -> Result<(Vec<OrderDisk>, Proofs), ForkError> {
        let disks = &outline.base.disks;
        let Some(client) = outline.client.as_ref().filter(|_| !disks.is_empty()) else {
            return Ok((Vec::new(), Proofs::default()));
        };
        let layers = disk::as_named(client, disks).await?;
        let images = disks.iter().cloned().zip(layers).collect();
        let served = self.images.clone();
        Ok(run_blocking(move || prove(&served, images)).await?)
    }

    fn orders(&self, fork: &Fork, outline: &Outline, division: &Division) -> Vec<Order> {
        let (name, request) = (fork.parent.as_str(), &fork.request);
        let (mut next, offers) = (self.first_index(name, division.here), self.peers.offers_for(request.way));
        let guest = self.guests.lineage(&fork.id).map(|Lineage { root, depth }| OfGuest { root, depth });
        let order = |(host, count): &(String, usize)| {
            let use_prepared = request.names.is_empty();
            let numbers = self.numbers(name, host, *count, &mut next, use_prepared);
            Order {
                fork: fork.id.clone(),
                parent: name.to_owned(),
                node: self.node.clone(),
                port: self.peers.listen.port(),
                indexes: numbers.indexes,
                names: Vec::new(),
                warm: numbers.sets,
                verify: request.verify,
                whole: request.whole,
                expect_written: request.expect_written,
                kind: outline.kind(),
                guest_bytes: outline.guest_bytes,
                live_bytes: outline.live_bytes,
                registered_bytes: outline.registered_bytes,
                offers: offers.clone(),
                group: self.peers.group().ok(),
                disks: Vec::new(),
                no_export: None,
                devices: None,
                grants: BTreeMap::new(),
                guest: guest.clone(),
            }
        };
        division.away.iter().map(order).collect()
    }

    /// A number above all that children of a VM have had or are prepared for, here or elsewhere, and above those that the `here`
    /// get that are about to come: the lowest that are free.
    pub(in crate::engine) fn first_index(&self, name: &str, here: usize) -> u32 {
        let members = self.members.list();
        let children = || members.iter().filter(|m| m.parent.as_deref() == Some(name));
        let prefix = format!("{name}.");
        let names = self.registry.records().iter().filter(|record| record.name.starts_with(&prefix)).count();
        let prepared = self.lock().prepared.get(name).map_or(0, Vec::len);
        let elsewhere = children().filter(|member| member.node.is_some()).count();
        let away = self.numbers_kept(name);
        let local = u32::try_from(names + prepared + elsewhere + away.len() + here).unwrap_or(u32::MAX);
        let taken = children().map(|member| member.index).chain(away);
        taken.max().unwrap_or(0).max(local).saturating_add(1)
    }

    /// For a fork that a guest asked for: numbers all children, if some are on other hosts. Before any of them runs.
    pub(super) async fn number_for_guest(&self, fork: &str, here: &[String], called: &mut CalledHosts) {
        if called.hosts.is_empty() {
            return;
        }
        let hosts: Vec<_> =
            called.hosts.iter().map(|host| (host.target.name.clone(), host.names.clone())).collect();
        let numbers = self.number_children(fork, here, &hosts).await.unwrap_or_default();
        for (host, numbers) in called.hosts.iter_mut().zip(numbers) {
            host.numbers = Some(numbers);
        }
    }

    pub(super) fn host_is(&self, id: &str, node: &str, phase: &str) {
        self.update(id, |p| {
            if let Some(host) = p.hosts.iter_mut().find(|host| host.node == node) {
                host.phase = phase.to_owned();
            }
        });
    }
}

/// Sends an order and waits for the answer.
async fn call(
    peers: &Peers,
    target: PeerTarget,
    order: Order,
    session: SessionId,
    token: Token,
) -> Result<CalledHost, ForkError> {
    let (sent, children) = (Mono::now(), order.indexes.len());
    let names = order.children().map(|(_, name)| name).collect();
    let order = ToHost::Order(Box::new(order));
    let answered = async {
        let mut channel = peers.call(&target, session, token, &order).await?;
        let answer = answer(&mut channel, ANSWER_TIMEOUT).await?;
        Ok((channel, answer))
    };
    let failed = |source| ForkError::Host { host: target.clone(), act: "did not take the order", source };
    let (channel, answer) = answered.await.map_err(failed)?;
    match answer.unless_refused(&target)? {
        ToParent::Accepted(taken) => {
            Ok(CalledHost { target, children, names, numbers: None, channel, taken, sent })
        }
        other => Err(failed(TalkError::Unexpected { expected: "an acceptance", found: other.word() })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn hosts_hear_that_the_parents_daemon_lives_however_long_a_freeze_takes() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let called = CalledHost {
            target: PeerTarget { name: "n2".to_owned(), address: "n2:1".to_owned() },
            children: 1,
            names: vec!["web.1".to_owned()],
            numbers: None,
            channel: Channel::new(Box::new(near)),
            taken: Taken { verbs: false, why: String::new(), hears: false, disks: None },
            sent: Mono::now(),
        };
        let mut away = CalledHosts {
            here: 0,
            numbers: vec![1],
            session: SessionId::random(),
            token: Token::random(),
            hosts: vec![called],
            refused: Vec::new(),
            nodes: vec!["n2".to_owned()],
            way: None,
            verify: false,
            disks: Vec::new(),
            confinement: Confinement::default(),
            server: None,
        };
        let mut host: Channel<ToHost> = Channel::new(Box::new(far));
        let freeze = async {
            tokio::time::sleep(ALIVE_INTERVAL * 40 + ALIVE_INTERVAL / 2).await;
            "frozen"
        };
        assert_eq!(away.alive_during(freeze).await, "frozen");
        away.hosts[0].channel.send(&ToHost::Release).await.unwrap();
        let mut alive = 0;
        while let ToHost::Alive = host.receive().await.unwrap() {
            alive += 1;
        }
        assert_eq!(alive, 40);
    }
}
