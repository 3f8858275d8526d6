//! `virsh migrate` carried by vmove: what libvirt's hook asks at the destination, and what other nodes ask at the source.
//!
//! libvirt tells nobody at the source that a migration begins. So the destination asks the nodes that it knows which of them has the guest, and that one
//! begins to send it.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use vmove_libvirt::Domain as Xml;
use vmove_migrate::engine::{Engine, EngineError};
use vmove_node::domains::{Domain, Domains};
use vmove_node::peer::{
    BoxedStream, Caller, Channel, Dialer, Hello, KnownPeers, LinkKind, PROTOCOL_VERSION, PeerPolicy,
    PeerTarget, SessionId, Token,
};
use vmove_types::libvirt::{DomainHook, DomainHookDone, DomainOperation};
use vmove_types::problem::{Code, Problem, chain};
use vmove_types::progress::{Outcome, Progress};
use vmove_types::spec::{MigrationSpec, ModeRequest};

/// For the answer of a node that is asked for a guest.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the end of a migration is looked for, where nothing tells.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// What is asked of a node.
#[derive(Debug, Serialize, Deserialize)]
enum Question {
    /// Whether it has the guest of this domain.
    Has(String),
    /// To send it to the peer port of the asking node.
    Send { uuid: String, port: u16 },
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// It has the guest, which can be moved.
    Here,
    /// It does not.
    NotHere,
    /// It has the guest, which cannot be moved, or it is not willing.
    Refused(String),
    /// It sends the guest.
    Begun(SessionId),
    /// It no longer does.
    Ended(String),
}

/// What a node needs for migrations of libvirt's.
pub struct Libvirt {
    pub domains: Arc<Domains>,
    pub engine: Arc<Engine>,
    pub dialer: Arc<dyn Dialer>,
    pub known: KnownPeers,
    pub policy: Arc<PeerPolicy>,
    pub node: String,
    /// Of the peer port.
    pub port: u16,
    /// Domains whose guests are to come, and whose QEMUs were not started yet.
    pub announced: Mutex<HashSet<String>>,
}

impl Libvirt {
    /// Answers the hook. Not before libvirt may go on.
    pub async fn hook(&self, hook: &DomainHook) -> Result<DomainHookDone, Problem> {
        let xml = Xml::read(&hook.xml).map_err(|error| refused(chain(&error)))?;
        let Some(monitor) = xml.monitor() else { return Ok(DomainHookDone { migration: None }) };
        match hook.operation {
            DomainOperation::Migrate => {
                self.who_has(xml.uuid(), xml.name()).await?;
                self.announced().insert(xml.uuid().to_owned());
                Ok(DomainHookDone { migration: None })
            }
            DomainOperation::Started => {
                let announced = self.announced().remove(xml.uuid());
                match self.domains.status(monitor).await {
                    Ok(status) if status == "inmigrate" => {}
                    // An ordinary start, or a guest that was restored: that needs nothing of us.
                    Err(_) if !announced => return Ok(DomainHookDone { migration: None }),
                    Ok(_) => return Ok(DomainHookDone { migration: None }),
                    Err(error) => return Err(refused(chain(&error))),
                }
                let domain = self.domains.look(monitor).await.map_err(|error| refused(chain(&error)))?;
                let id = self.receive(domain).await?;
                Ok(DomainHookDone { migration: Some(id.to_string()) })
            }
        }
    }

    fn announced(&self) -> MutexGuard<'_, HashSet<String>> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node that has the guest.
    async fn who_has(&self, uuid: &str, name: &str) -> Result<PeerTarget, Problem> {
        let mut asking = JoinSet::new();
        for peer in self.known.all().filter(|peer| peer.name != self.node) {
            let (dialer, hello, uuid) = (Arc::clone(&self.dialer), self.hello(), uuid.to_owned());
            asking.spawn(async move {
                let answer = ask(&*dialer, &peer, &hello, &Question::Has(uuid)).await;
                (peer, answer.map(|(_, answer)| answer))
            });
        }
        let mut said = Vec::new();
        while let Some(asked) = asking.join_next().await {
            match asked {
                Ok((peer, Ok(Answer::Here))) => return Ok(peer),
                Ok((peer, Ok(Answer::Refused(why)))) => return Err(refused(format!("{peer}: {why}"))),
                Ok((peer, Ok(_))) => said.push(format!("{peer} does not have it")),
                Ok((_, Err(why))) => said.push(why),
                Err(error) => said.push(error.to_string()),
            }
        }
        let said = if said.is_empty() { "[nodes] names none".to_owned() } else { said.join("; ") };
        Err(refused(format!(
            "Domain {name} is enabled for vmove, and no node that {} knows has it running ({said}): \
             start vmoved at its source and name that in [nodes] here, or `vmove libvirt disable {name}`",
            self.node
        )))
    }

    /// Has the guest's memory come, until libvirt may begin its migration.
    async fn receive(&self, domain: Domain) -> Result<SessionId, Problem> {
        let name = domain.record.name.clone();
        let mut expected = self.domains.expect(&domain).map_err(|error| refused(chain(&error)))?;
        let source = self.who_has(&domain.uuid, &name).await?;
        let question = Question::Send { uuid: domain.uuid.clone(), port: self.port };
        let asked = ask(&*self.dialer, &source, &self.hello(), &question).await;
        let (mut channel, answer) = asked.map_err(refused)?;
        let id = match answer {
            Answer::Begun(id) => id,
            Answer::Refused(why) => return Err(refused(format!("{source}: {why}"))),
            _ => return Err(refused(format!("{source} does not have domain {name} any more"))),
        };
        tracing::info!(vm = name, migration = %id, from = %source, "libvirt waits until most of the guest's memory is here");
        tokio::select! {
            biased;
            () = expected.may_go_on() => Ok(id),
            why = ended(&mut channel) => Err(refused(format!("{source}: {why}"))),
            why = self.ended_here(id) => Err(refused(why)),
        }
    }

    /// Ends when a migration to here has ended before libvirt was let go on.
    async fn ended_here(&self, id: SessionId) -> String {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            if let Ok(progress) = self.engine.progress(&id.to_string())
                && let Some(why) = why_ended(&progress.borrow())
            {
                return why;
            }
        }
    }

    /// Answers a node that asks for a guest.
    pub async fn serve(&self, hello: Hello, stream: BoxedStream, (from, caller): (IpAddr, Caller)) {
        let mut channel: Channel<Question> = Channel::new(stream);
        let Ok(Ok(question)) = tokio::time::timeout(ANSWER_TIMEOUT, channel.receive()).await else {
            return tracing::warn!(%from, "expected a question for a domain, found none");
        };
        let (uuid, port) = match question {
            Question::Has(uuid) => (uuid, None),
            Question::Send { uuid, port } => (uuid, Some(port)),
        };
        let answer = match (self.policy.accepts(&caller), port) {
            (Err(why), _) => Answer::Refused(why.to_string()),
            (Ok(()), port) => self.answer(&uuid, port.map(|port| (&hello.node, from, port))).await,
        };
        let begun = if let Answer::Begun(id) = &answer { Some(*id) } else { None };
        if channel.send(&answer).await.is_err() {
            return;
        }
        if let Some(id) = begun {
            let why = self.ended_here(id).await;
            let _ = channel.send(&Answer::Ended(why)).await;
        }
    }

    /// `to`: name, address and port of the node that it is to be sent to, if it is.
    async fn answer(&self, uuid: &str, to: Option<(&String, IpAddr, u16)>) -> Answer {
        let domain = match self.domains.find(uuid).await {
            Ok(Some(domain)) => domain,
            Ok(None) => return Answer::NotHere,
            Err(error) => return Answer::Refused(chain(&error)),
        };
        if domain.status == "inmigrate" {
            // It waits here itself: the node has asked itself by an address.
            return Answer::NotHere;
        }
        let Some((node, from, port)) = to else { return Answer::Here };
        let to = self.known.named_by_peer(node, &SocketAddr::new(from, port).to_string());
        let spec = MigrationSpec { mode: ModeRequest::Hybrid, ..MigrationSpec::default() };
        match self.engine.send_domain(domain.record, to, spec) {
            Ok(id) => Answer::Begun(id),
            Err(EngineError::Busy { session, .. }) => {
                Answer::Refused(format!("it is in migration {session} already: see `vmove status` there"))
            }
            Err(error) => Answer::Refused(chain(&error)),
        }
    }

    fn hello(&self) -> Hello {
        Hello {
            version: PROTOCOL_VERSION,
            kind: LinkKind::Domain,
            rdma: false,
            index: 0,
            session: SessionId::random(),
            token: Token::default(),
            node: self.node.clone(),
        }
    }
}

fn refused(why: impl Into<String>) -> Problem {
    Problem::new(Code::DomainRefused, why)
}

async fn ask(
    dialer: &dyn Dialer,
    peer: &PeerTarget,
    hello: &Hello,
    question: &Question,
) -> Result<(Channel<Answer>, Answer), String> {
    let asked = async {
        let stream = dialer.stream(peer, hello).await.map_err(|error| chain(&error))?;
        let mut channel: Channel<Answer> = Channel::new(stream);
        channel.send(question).await.map_err(|error| chain(&error))?;
        let answer = channel.receive().await.map_err(|error| format!("{peer}: {}", chain(&error)))?;
        Ok((channel, answer))
    };
    let none = |_| format!("{peer} did not answer within {} s", ANSWER_TIMEOUT.as_secs());
    tokio::time::timeout(ANSWER_TIMEOUT, asked).await.map_err(none)?
}

/// Why the source no longer sends the guest.
async fn ended(channel: &mut Channel<Answer>) -> String {
    loop {
        match channel.receive().await {
            Ok(Answer::Ended(why)) => return why,
            Ok(_) => {}
            Err(error) => return chain(&error),
        }
    }
}

fn why_ended(progress: &Progress) -> Option<String> {
    match &progress.outcome {
        Outcome::Failed { error, .. } => Some(error.clone()),
        Outcome::Refused { blockers } => {
            let all: Vec<&str> = blockers.iter().map(|blocker| blocker.message.as_str()).collect();
            Some(all.join("; "))
        }
        Outcome::Done { .. } => Some("it has ended".to_owned()),
        Outcome::Running | Outcome::Reconnecting { .. } => None,
    }
}
