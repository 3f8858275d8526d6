//! Asking other hosts whether they take part, before anything is done to the guest.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use vmove_clone::child::Base;
use vmove_clone::disk::{self, Disk};
use vmove_clone::report::{HostProgress, HostReport};
use vmove_migrate::clock::Mono;
use vmove_migrate::link::{Dialer, PeerTarget};
use vmove_migrate::proto::channel::Channel;
use vmove_migrate::proto::hello::{LinkKind, SessionId, Token};
use vmove_qmp::Client;

use super::Remote;
use super::deal::deal;
use super::disks::{OrderDisk, Proofs, find_server, prove};
use super::message::{Order, Taken, ToHost, ToParent};
use super::warm::kind_of;
use crate::api::forks::{ForkRequest, ForkWay};
use crate::api::problem::{Code, Problem, chain};
use crate::server::forks::Forks;
use crate::server::forks::problem::clone_problem;
use crate::server::registry::off_worker;

/// For a host to look at its memory and to ask its QEMU for its version.
const ANSWER: Duration = Duration::from_secs(30);
/// How often hosts that wait for a freeze are told that this daemon lives. After some minutes without a word they give up.
const ALIVE: Duration = Duration::from_secs(10);

/// What is to be forked, as far as another host must know it beforehand.
#[derive(Debug)]
pub struct Outline {
    pub base: Base,
    /// QEMU that writes the device state.
    pub qemu: String,
    pub guest_bytes: u64,
    /// Bytes of it that have memory now.
    pub live_bytes: u64,
    /// Bytes of it that would be registered.
    pub registered_bytes: u64,
    /// The guest's monitor; none for a template.
    pub client: Option<Client>,
}

/// The hosts of a fork beside this one.
#[derive(Debug)]
pub struct Away {
    /// Children that are to be on this node.
    pub here: usize,
    /// Numbers of the others, also where a host refused.
    pub numbers: Vec<u32>,
    pub(super) session: SessionId,
    pub(super) token: Token,
    pub(super) hosts: Vec<Called>,
    pub(super) refused: Vec<HostReport>,
    /// Nodes in the order of the request.
    pub(super) nodes: Vec<String>,
    pub(super) way: Option<ForkWay>,
    pub(super) verify: bool,
    /// Disks that the guest writes to.
    pub(super) disks: Vec<Disk>,
    /// What would serve their images.
    pub(super) server: Result<PathBuf, String>,
}

impl Away {
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

async fn tell_alive(mut hosts: Vec<Called>, mut ended: oneshot::Receiver<()>) -> Vec<Called> {
    while tokio::time::timeout(ALIVE, &mut ended).await.is_err() {
        for host in &mut hosts {
            // A lost connection shows when something is received.
            let _ = host.channel.send(&ToHost::Alive).await;
        }
    }
    hosts
}

/// A host that takes part.
#[derive(Debug)]
pub struct Called {
    pub(super) target: PeerTarget,
    pub(super) children: usize,
    pub(super) channel: Channel<ToParent>,
    /// How it would get the template.
    pub(super) taken: Taken,
    /// When the order was sent.
    pub(super) sent: Mono,
}

impl Forks {
    /// Asks the hosts that a request names. Those that cannot take part are told of in the report, unless nobody is left.
    pub async fn call_hosts(
        self: &Arc<Self>,
        id: &str,
        name: &str,
        outline: impl FnOnce() -> Outline + Send,
        request: &ForkRequest,
    ) -> Result<Away, Problem> {
        let remote = &self.remote;
        let deal = deal(request.count, request.here, &request.nodes, &remote.node)?;
        let mut away = Away {
            here: deal.here,
            numbers: Vec::new(),
            session: SessionId::random(),
            token: Token::random(),
            hosts: Vec::new(),
            refused: Vec::new(),
            nodes: deal.away.iter().map(|(node, _)| node.clone()).collect(),
            way: request.way,
            verify: request.verify,
            disks: Vec::new(),
            server: Err(String::new()),
        };
        if deal.away.is_empty() {
            return Ok(away);
        }
        let targets: Vec<PeerTarget> =
            deal.away.iter().map(|(node, _)| remote.target(node)).collect::<Result<_, _>>()?;
        let outline = outline();
        self.possible(&outline, request)?;
        if !outline.base.disks.is_empty() {
            away.disks.clone_from(&outline.base.disks);
            away.server = self.server_of(&outline);
        }
        let (disks, proofs) = self.order_disks(&outline).await?;
        let mut orders = self.orders(id, name, &outline, request, &deal.away, deal.here);
        away.numbers = orders.iter().flat_map(|order| order.indexes.clone()).collect();
        for order in orders.iter_mut().filter(|_| !disks.is_empty()) {
            order.disks.clone_from(&disks);
            order.no_export = away.server.as_ref().err().cloned();
        }
        let hosts = deal.away.iter().map(|(node, children)| HostProgress {
            node: node.clone(),
            phase: "asked".to_owned(),
            children: *children,
            ..HostProgress::default()
        });
        self.update(id, |p| p.hosts = hosts.collect());
        let asked = orders.clone();
        let mut calls = JoinSet::new();
        for (place, (target, order)) in targets.into_iter().zip(orders).enumerate() {
            let (remote, session, token) = (remote.clone(), away.session, away.token);
            calls.spawn(async move { (place, call(&remote, target, order, session, token).await) });
        }
        let mut ends: Vec<_> = calls.join_all().await;
        let _ = off_worker(move || drop(proofs)).await;
        ends.sort_by_key(|(place, _)| *place);
        let mut problems = Vec::new();
        for (place, end) in ends {
            let (node, children) = &deal.away[place];
            match end {
                Ok(called) => {
                    self.used_away(&asked[place]);
                    away.hosts.push(called);
                }
                Err(problem) => {
                    tracing::warn!(fork = %id, %node, why = %problem, "a host does not take part in a fork");
                    self.host_is(id, node, "failed");
                    let error = Some(problem.message.clone());
                    away.refused.push(HostReport {
                        node: node.clone(),
                        children: *children,
                        error,
                        ..HostReport::default()
                    });
                    problems.push(format!("{node}: {}", problem.message));
                    if away.hosts.is_empty() && away.here == 0 && problems.len() == deal.away.len() {
                        return Err(Problem { message: problems.join("; "), ..problem });
                    }
                }
            }
        }
        Ok(away)
    }

    /// Refuses what no host could do.
    pub(super) fn possible(&self, outline: &Outline, request: &ForkRequest) -> Result<(), Problem> {
        self.remote.able().map_err(|why| Problem::new(Code::Forbidden, why))?;
        if request.way == Some(ForkWay::Multicast) {
            let refused = |why| Problem::new(Code::Forbidden, format!("Multicast is not possible: {why}"));
            self.remote.can_send().map_err(refused)?;
        }
        if !outline.base.disks.is_empty() && outline.client.is_none() {
            let text = "This template has disks that can be written, and its children stay on this node";
            return Err(Problem::new(Code::NotMovable, text));
        }
        Ok(())
    }

    /// What would serve the images of a guest, or why it cannot be done.
    fn server_of(&self, outline: &Outline) -> Result<PathBuf, String> {
        self.remote.disks.able()?;
        find_server(outline.base.command_line.first().map_or("", String::as_str), &self.node)
    }

    /// What hosts are told of the disks.
    async fn order_disks(&self, outline: &Outline) -> Result<(Vec<OrderDisk>, Proofs), Problem> {
        let disks = &outline.base.disks;
        let Some(client) = outline.client.as_ref().filter(|_| !disks.is_empty()) else {
            return Ok((Vec::new(), Proofs::default()));
        };
        let layers = disk::as_named(client, disks).await.map_err(|e| clone_problem(&e))?;
        let images = disks.iter().cloned().zip(layers).collect();
        let remote = self.remote.clone();
        off_worker(move || prove(&remote.disks, images)).await
    }

    fn orders(
        &self,
        id: &str,
        name: &str,
        outline: &Outline,
        request: &ForkRequest,
        away: &[(String, usize)],
        here: usize,
    ) -> Vec<Order> {
        let (mut next, offers) = (self.first_index(name, here), self.remote.offers());
        let order = |(host, count): &(String, usize)| {
            let numbers = self.numbers(name, host, *count, &mut next);
            Order {
                fork: id.to_owned(),
                parent: name.to_owned(),
                node: self.node.clone(),
                port: self.remote.listen.port(),
                indexes: numbers.indexes,
                warm: numbers.sets,
                verify: request.verify,
                whole: request.whole,
                expect_written: request.expect_written,
                kind: kind_of(outline),
                guest_bytes: outline.guest_bytes,
                live_bytes: outline.live_bytes,
                registered_bytes: outline.registered_bytes,
                offers: offers.clone(),
                group: self.remote.group().ok(),
                disks: Vec::new(),
                no_export: None,
            }
        };
        away.iter().map(order).collect()
    }

    /// A number above all that children of a VM have had or are prepared for, here or elsewhere, and above those that the `here`
    /// get that are about to come: the lowest that are free.
    pub(super) fn first_index(&self, name: &str, here: usize) -> u32 {
        let members = self.members.list();
        let children = || members.iter().filter(|m| m.parent.as_deref() == Some(name));
        let prefix = format!("{name}.");
        let names = self.registry.records().iter().filter(|record| record.name.starts_with(&prefix)).count();
        let warm = self.lock().warm.get(name).map_or(0, Vec::len);
        let elsewhere = children().filter(|member| member.node.is_some()).count();
        let away = self.numbers_away(name);
        let local = u32::try_from(names + warm + elsewhere + away.len() + here).unwrap_or(u32::MAX);
        let taken = children().map(|member| member.index).chain(away);
        taken.max().unwrap_or(0).max(local).saturating_add(1)
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
    remote: &Arc<Remote>,
    target: PeerTarget,
    order: Order,
    session: SessionId,
    token: Token,
) -> Result<Called, Problem> {
    let failed = |why: String| Problem::new(Code::ForkFailed, why);
    let hello = remote.hello(LinkKind::Fork, session, token);
    let stream = remote.dialer.stream(&target, &hello).await.map_err(|e| failed(chain(&e)))?;
    let mut channel: Channel<ToParent> = Channel::new(stream);
    let (sent, children) = (Mono::now(), order.indexes.len());
    let order = ToHost::Order(Box::new(order));
    channel.send(&order).await.map_err(|e| failed(format!("{target} cannot be told: {}", chain(&e))))?;
    match tokio::time::timeout(ANSWER, channel.receive()).await {
        Ok(Ok(answer)) => match answer.unless_refused(&target)? {
            ToParent::Accepted(taken) => Ok(Called { target, children, channel, taken, sent }),
            other => Err(failed(format!("Expected an answer of {target}, found {other:?}"))),
        },
        Ok(Err(error)) => Err(failed(format!("{target} did not answer: {}", chain(&error)))),
        Err(_) => Err(failed(format!("{target} did not answer within {} s", ANSWER.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn hosts_hear_that_the_parents_daemon_lives_however_long_a_freeze_takes() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let called = Called {
            target: PeerTarget { name: "n2".to_owned(), address: "n2:1".to_owned() },
            children: 1,
            channel: Channel::new(Box::new(near)),
            taken: Taken { verbs: false, why: String::new(), hears: false, disks: None },
            sent: Mono::now(),
        };
        let mut away = Away {
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
            server: Err(String::new()),
        };
        let mut host: Channel<ToHost> = Channel::new(Box::new(far));
        let freeze = async {
            tokio::time::sleep(ALIVE * 40 + ALIVE / 2).await;
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
