//! The parent's daemon follows the hosts of a fork until each has its children or has failed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use tracing::Instrument;
use vmove_node::blocking::run_blocking;
use vmove_types::fork_report::{ChildReport, ForkReport, HostProgress, HostReport};
use vmove_types::problem::chain;
use vmove_types::time::Mono;

use super::FrozenOrigin;
use super::called_hosts::{CalledHost, CalledHosts};
use crate::check::GuestRam;
use crate::engine::ForkEngine;
use crate::engine::distribution::{self, Connections, Hosts, Spreading};
use crate::engine::error::{DistributionError, TalkError};
use crate::engine::images::Wanted;
use crate::engine::message::{At, Begin, Done, Pieces, ToHost, ToParent, address_of};
use crate::record::Member;
use crate::template::Template;

/// A host tells how far it is twice a second. One that says nothing for so long has gone.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often hosts are told that this daemon lives.
const ALIVE_INTERVAL: Duration = Duration::from_secs(2);

/// Hosts at work. Dropping it does not stop them.
#[derive(Debug)]
pub struct Following(Option<JoinHandle<Ended>>, Vec<String>);

#[derive(Debug, Default)]
struct Ended {
    report: ForkReport,
    children: Vec<ChildReport>,
}

impl CalledHosts {
    /// Tells the hosts to fetch a template and to make their children of it. `guest`: whose memory it was, if that goes on with memory
    /// of its own.
    pub(super) fn make_children(
        self,
        engine: &Arc<ForkEngine>,
        id: &str,
        source: &FrozenOrigin,
        guest: Option<Arc<GuestRam>>,
        begun: Mono,
    ) -> Following {
        let nodes = self.nodes.clone();
        if nodes.is_empty() {
            return Following(None, nodes);
        }
        let work = Work {
            engine: engine.clone(),
            id: id.to_owned(),
            template: source.template.clone(),
            state: source.state.clone(),
            guest,
            begun,
        };
        Following(Some(tokio::spawn(work.run(self).in_current_span())), nodes)
    }
}

impl Following {
    /// Waits until each host has its children or has failed, and adds it to the report.
    pub async fn finish(self, engine: &ForkEngine, id: &str, report: &mut ForkReport) {
        let Some(task) = self.0 else { return };
        engine.update(id, |p| p.phase = "hosts".to_owned());
        let ended = match task.await {
            Ok(ended) => ended,
            Err(error) => {
                report
                    .warnings
                    .push(format!("The other hosts were lost sight of ({error}): see the log of vmoved"));
                return;
            }
        };
        let place = |node: &str| self.1.iter().position(|known| known == node);
        (report.fabric, report.fabric_reason) = fabrics(&ended.report.hosts);
        report.hosts = ended.report.hosts;
        report.hosts.sort_by_key(|host| place(&host.node));
        report.distribution = ended.report.distribution;
        report.multicast = ended.report.multicast;
        report.warnings.extend(ended.report.warnings);
        let last = ended.children.iter().filter_map(|child| child.running_ms).fold(0.0, f64::max);
        report.all_running_ms = report.all_running_ms.max(last);
        report.children.extend(ended.children);
    }
}

/// By what memory came to the hosts that have it, and why: said once if it is the same for all.
fn fabrics(hosts: &[HostReport]) -> (String, String) {
    let there = || hosts.iter().filter_map(|host| Some((host, host.fabric.as_ref()?)));
    let kinds: BTreeSet<&str> = there().map(|(_, fabric)| fabric.as_str()).collect();
    let why = |host: &HostReport| host.fabric_reason.clone().unwrap_or_default();
    let reasons: BTreeSet<String> = there().map(|(host, _)| why(host)).collect();
    let reason = match reasons.len() {
        0 | 1 => reasons.into_iter().next().unwrap_or_default(),
        _ => there().map(|(host, _)| format!("{}: {}", host.node, why(host))).collect::<Vec<_>>().join("; "),
    };
    (kinds.into_iter().collect::<Vec<_>>().join(", "), reason)
}

/// What a host says of itself, as it is shown. `piece`: bytes of a piece.
fn show(at: &At, piece: u64, shown: &mut HostProgress) {
    at.phase.word().clone_into(&mut shown.phase);
    (shown.chunks, shown.missing) = (at.chunks, at.missing);
    shown.running = at.running as usize;
    count(&at.pieces, piece, shown);
}

fn count(pieces: &Pieces, piece: u64, shown: &mut HostProgress) {
    [shown.from_root_bytes, shown.from_hosts_bytes, shown.multicast_bytes] = bytes(pieces, piece);
    shown.repaired = pieces.repaired;
}

/// From the root, from other hosts and by multicast.
fn bytes(pieces: &Pieces, piece: u64) -> [u64; 3] {
    [pieces.from_root, pieces.from_peers, pieces.by_multicast].map(|count| count.saturating_mul(piece))
}

struct Work {
    engine: Arc<ForkEngine>,
    id: String,
    template: Template,
    state: Arc<[u8]>,
    guest: Option<Arc<GuestRam>>,
    begun: Mono,
}

impl Work {
    async fn run(self, away: CalledHosts) -> Ended {
        let (engine, session) = (self.engine.clone(), away.session);
        let ended = self.bring(away).await;
        engine.images.settle(session);
        ended
    }

    async fn bring(self, mut away: CalledHosts) -> Ended {
        let mut ended = Ended::default();
        ended.report.hosts.clone_from(&away.refused);
        self.export(&mut away, &mut ended).await;
        if away.hosts.is_empty() {
            return ended;
        }
        let spreading = match self.spread(&away).await {
            Ok(spreading) => spreading,
            Err(error) => {
                self.give_up(away, &error, &mut ended).await;
                return ended;
            }
        };
        let verbs = spreading.no_verbs.is_none();
        let silent = away.hosts.iter().filter(|host| !host.taken.hears || (verbs && !host.taken.verbs));
        let silent = silent.map(|host| (host.target.name.clone(), verbs && !host.taken.verbs));
        if spreading.distribution.way == "multicast" {
            let warn = |(node, other)| {
                let why = if other { "which go by RDMA" } else { "multicast-group in its [fork]" };
                format!("{node} takes no datagrams ({why}): it read everything")
            };
            ended.report.warnings.extend(silent.map(warn));
        }
        let orders: Vec<Begin> =
            (1..).zip(&away.hosts).map(|(me, _)| self.begin(me, &away, &spreading)).collect();
        let mut following = JoinSet::new();
        let (work, piece) = (Arc::new(self), spreading.piece);
        for (host, begin) in away.hosts.into_iter().zip(orders) {
            let work = work.clone();
            following.spawn(async move { work.follow(host, begin, piece).await }.in_current_span());
        }
        let mut open = Vec::new();
        while let Some(host) = following.join_next().await {
            let Ok((called, done)) = host else { continue };
            work.note(&called, done, piece, &mut ended);
            open.push(called);
        }
        // Hosts read from each other until the last one has everything.
        for called in &mut open {
            let _ = called.channel.send(&ToHost::Release).await;
        }
        if let Ok((mut distribution, multicast)) = run_blocking(move || spreading.end()).await {
            // What devices read, this node's processors do not see.
            let read = ended.report.hosts.iter().map(|host| host.from_root_bytes);
            let given = read.fold(multicast.sent_bytes, u64::saturating_add);
            distribution.root_bytes = distribution.root_bytes.max(given);
            ended.report.distribution = Some(distribution);
            ended.report.multicast = multicast;
        }
        ended
    }

    /// Serves the frozen images to the hosts that do not see them. Without that these have no children.
    async fn export(&self, away: &mut CalledHosts, ended: &mut Ended) {
        let reads = |host: &CalledHost| host.taken.disks.as_ref().is_some_and(|disks| !disks.shared);
        let hosts: Vec<_> = away.hosts.iter().filter(|h| reads(h)).map(|h| h.target.clone()).collect();
        if hosts.is_empty() {
            return;
        }
        let manifest = self.template.manifest();
        let done = match away.server.take() {
            Some(Ok(program)) => {
                let wanted = Wanted {
                    session: away.session,
                    token: away.token,
                    fork: &self.id,
                    parent: &manifest.vm,
                    program,
                    disks: &away.disks,
                    confinement: away.confinement.clone(),
                    hosts,
                };
                self.engine.images.export(wanted).await
            }
            Some(Err(error)) => Err(error),
            // Hosts that would read images were told of disks.
            None => return,
        };
        let Err(error) = done else { return };
        let why = chain(&error);
        tracing::error!(fork = %self.id, %why, "images cannot be served to other hosts");
        let (readers, others) = std::mem::take(&mut away.hosts).into_iter().partition(reads);
        away.hosts = others;
        self.release(readers, &format!("images cannot be served: {why}"), ended).await;
    }

    async fn spread(&self, away: &CalledHosts) -> Result<Spreading, DistributionError> {
        let peers = self.engine.peers.clone();
        let connections = Connections::open(&peers, away.session, away.token, BTreeMap::new());
        let hosts = Hosts {
            leaves: away.hosts.iter().map(|h| peers.leaf(&h.target.name).map(str::to_owned)).collect(),
            taken: away.hosts.iter().map(|host| host.taken.clone()).collect(),
            way: away.way,
            verify: away.verify,
        };
        let (template, guest, begun) = (self.template.clone(), self.guest.clone(), self.begun);
        let work =
            move || distribution::begin(&peers, &connections, &template, guest.as_deref(), &hosts, begun);
        run_blocking(work).await?
    }

    async fn give_up(&self, away: CalledHosts, error: &DistributionError, ended: &mut Ended) {
        let why = chain(error);
        tracing::error!(fork = %self.id, %why, "the template cannot be spread to other hosts");
        self.release(away.hosts, &format!("the template could not be sent: {why}"), ended).await;
    }

    /// These hosts get no children.
    async fn release(&self, hosts: Vec<CalledHost>, why: &str, ended: &mut Ended) {
        for mut host in hosts {
            let _ = host.channel.send(&ToHost::GiveUp(why.to_owned())).await;
            self.note(&host, Err(TalkError::Said(why.to_owned())), 0, ended);
        }
    }

    fn begin(&self, me: u32, away: &CalledHosts, spreading: &Spreading) -> Begin {
        let hosts = (1..).zip(&away.hosts).filter(|(other, _)| *other != me);
        Begin {
            me,
            listens: spreading.listens.get(me as usize - 1).copied().unwrap_or(false),
            peers: hosts.map(|(host, called)| (address_of(host), called.target.clone())).collect(),
            manifest: serde_json::to_string(self.template.manifest()).unwrap_or_default(),
            state: self.state.to_vec(),
            checksum: spreading.checksum,
            parts: spreading.parts.clone(),
            no_verbs: spreading.no_verbs.clone(),
            numbers: away.hosts.get(me as usize - 1).and_then(|host| host.numbers),
        }
    }

    async fn follow(
        &self,
        mut host: CalledHost,
        begin: Begin,
        piece: u64,
    ) -> (CalledHost, Result<Done, TalkError>) {
        let done = match host.channel.send(&ToHost::Begin(Box::new(begin))).await {
            Ok(()) => self.listen(&mut host, piece).await,
            Err(error) => Err(error.into()),
        };
        (host, done)
    }

    async fn listen(&self, host: &mut CalledHost, piece: u64) -> Result<Done, TalkError> {
        let mut alive = tokio::time::interval(ALIVE_INTERVAL);
        let mut heard = tokio::time::Instant::now();
        loop {
            tokio::select! {
                message = host.channel.receive() => {
                    heard = tokio::time::Instant::now();
                    match message {
                        Ok(ToParent::Progress(at)) => {
                            self.shown(&host.target.name, |shown| show(&at, piece, shown));
                        }
                        Ok(ToParent::Done(done)) => return Ok(*done),
                        Ok(ToParent::Failed(why)) => return Err(TalkError::Said(why)),
                        Ok(other) => {
                            let found = other.word();
                            return Err(TalkError::Unexpected { expected: "how far it is", found });
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                _ = alive.tick() => {
                    if heard.elapsed() > SILENCE_TIMEOUT {
                        return Err(TalkError::NotHeard(SILENCE_TIMEOUT));
                    }
                    // A lost connection shows when something is received.
                    let _ = host.channel.send(&ToHost::Alive).await;
                }
            }
        }
    }

    /// Changes what is shown of a host, and with it how many children run in all.
    fn shown(&self, node: &str, change: impl FnOnce(&mut HostProgress)) {
        self.engine.update(&self.id, |p| {
            let Some(host) = p.hosts.iter_mut().find(|host| host.node == node) else { return };
            let before = host.running;
            change(host);
            p.running = (p.running + host.running).saturating_sub(before);
        });
    }

    /// Writes down what became of a host.
    fn note(&self, host: &CalledHost, done: Result<Done, TalkError>, piece: u64, ended: &mut Ended) {
        let node = &host.target.name;
        let mut report = HostReport { node: node.clone(), children: host.children, ..HostReport::default() };
        if let Some(disks) = &host.taken.disks {
            report.disks = Some(disks.word().to_owned());
            report.disks_reason = Some(disks.why.clone());
        }
        match done {
            Ok(done) => {
                let sent = host.sent.ms_since(self.begun);
                let children: Vec<ChildReport> = serde_json::from_str(&done.children).unwrap_or_default();
                let running = children.iter().filter(|child| child.error.is_none()).count();
                report.running = running.min(host.children);
                [report.from_root_bytes, report.from_hosts_bytes, report.multicast_bytes] =
                    bytes(&done.pieces, piece);
                report.repaired = done.pieces.repaired;
                (report.wrong, report.wanted) = (done.wrong, done.wanted);
                report.fabric = Some(done.fabric);
                report.fabric_reason = Some(done.fabric_reason);
                report.faults = done.faults.and_then(|faults| serde_json::from_str(&faults).ok());
                report.template_ms = Some(done.template_ms + sent);
                for mut child in children {
                    child.node.clone_from(node);
                    child.running_ms = child.running_ms.map(|at| at + sent);
                    self.remember(&child);
                    ended.children.push(child);
                }
                self.shown(node, |shown| {
                    shown.phase = "done".to_owned();
                    (shown.missing, shown.running) = (0, report.running);
                    count(&done.pieces, piece, shown);
                });
            }
            Err(error) => {
                let why = chain(&error);
                tracing::warn!(fork = %self.id, %node, %why, "a host has no children of a fork");
                self.shown(node, |shown| (shown.phase, shown.running) = ("failed".to_owned(), 0));
                report.error = Some(why);
            }
        }
        ended.report.hosts.push(report);
    }

    /// A child elsewhere is remembered, so that its number is not given again.
    fn remember(&self, child: &ChildReport) {
        let here = self.engine.registry.vms().get(&child.name).ok();
        if here.is_some_and(|vm| self.engine.members.get(&vm).is_some()) {
            // What is known of that one is needed: where its memory is private.
            tracing::error!(child = %child.name, node = %child.node,
                "a child on another node has the name of one that lives here: it is not remembered");
            return;
        }
        let parent = self.template.manifest().name.clone();
        let member = Member {
            vm: child.name.clone(),
            pid: 0,
            pid_start: 0,
            parent: Some(parent.unwrap_or_else(|| self.template.manifest().vm.clone())),
            index: child.index,
            fork: self.id.clone(),
            private: Vec::new(),
            stopped_to_move: false,
            by_guest: self.engine.guests.asked_for(&self.id),
            lineage: self.engine.guests.lineage(&self.id),
            node: Some(child.node.clone()),
        };
        if let Err(error) = self.engine.members.put(&member) {
            tracing::warn!(child = %child.name, %error, "a child on another node is not remembered");
        }
    }
}

#[cfg(test)]
mod tests {
    use vmove_node::peer::Channel;

    use super::*;
    use crate::engine::message::Phase;

    #[tokio::test]
    async fn what_a_host_says_of_itself_is_shown_in_bytes() {
        let (ours, theirs) = tokio::io::duplex(4096);
        let mut host: Channel<ToHost> = Channel::new(Box::new(theirs));
        let mut parent: Channel<ToParent> = Channel::new(Box::new(ours));
        let pieces = Pieces { by_multicast: 500, from_root: 30, from_peers: 7, repaired: 30 };
        let said = At { phase: Phase::Run, chunks: 400, missing: 221, running: 2, pieces };
        host.send(&ToParent::Progress(said)).await.expect("a channel");
        let Ok(ToParent::Progress(at)) = parent.receive().await else { panic!("expected how far it is") };
        let asked = HostProgress {
            node: "n2".to_owned(),
            phase: "asked".to_owned(),
            children: 3,
            ..HostProgress::default()
        };
        let mut shown = asked.clone();
        show(&at, 1368, &mut shown);
        let expected = HostProgress {
            phase: "run".to_owned(),
            chunks: 400,
            missing: 221,
            running: 2,
            multicast_bytes: 684_000,
            from_root_bytes: 41_040,
            from_hosts_bytes: 9576,
            repaired: 30,
            ..asked
        };
        assert_eq!(shown, expected);
    }
}
