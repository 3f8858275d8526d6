//! Guests of libvirt's domains: which node has one, and that it sends it to where a QEMU waits.
//!
//! libvirt tells nobody at the source that a migration begins. So the destination asks the nodes that it knows which of them has the guest, and that one
//! begins to send it.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use vmove_node::domains::{Domain, DomainError, Domains};
use vmove_node::peer::codec::CodecError;
use vmove_node::peer::{
    BoxedStream, Caller, Channel, Dialer, Hello, KnownPeers, LinkError, LinkKind, PROTOCOL_VERSION,
    PeerPolicy, PeerTarget, SessionId, Token,
};
use vmove_node::record::VmRecord;
use vmove_types::problem::chain;
use vmove_types::progress::{Outcome, Progress};
use vmove_types::spec::{MigrationSpec, ModeRequest};

use crate::engine::{Engine, EngineError, New};
use crate::kept_memory;

/// For the answer of a node that is asked for a guest.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the end of a migration is looked for, where nothing tells.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

impl Engine {
    /// Begins to send the guest of a libvirt domain, for whom its QEMU waits at the destination. libvirt decides when it leaves, and whether.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was changed then.
    pub fn send_domain(
        self: &Arc<Self>,
        vm: VmRecord,
        to: PeerTarget,
        spec: MigrationSpec,
    ) -> Result<SessionId, EngineError> {
        spec.validate().map_err(EngineError::BadSpec)?;
        let id = SessionId::random();
        let path = vm.ram.first().map(|ram| ram.path.clone()).unwrap_or_default();
        let vm = kept_memory::keep_memory(id, vm).map_err(|source| EngineError::Io { path, source })?;
        self.begin_keeping(New { id, vm, to, spec, group: None, member: None, home: None, choice: None })?;
        Ok(id)
    }
}

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

/// Why the guest of a domain does not come.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CarryError {
    /// Its QEMU here cannot take it.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// No node that is known has it.
    #[error(
        "Domain {name} is enabled for vmove, and no node that {node} knows has it running ({said}): \
         start vmoved at its source and name that in [nodes] here, or disable it for vmove (`vmove libvirt disable`)"
    )]
    NobodyHasIt {
        /// Name of the domain.
        name: String,
        /// This node.
        node: String,
        /// What the others have said.
        said: String,
    },
    /// The node that has it did not answer.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The node that has it does not send it, or no longer does.
    #[error("{peer}: {why}")]
    AtSource {
        /// That node.
        peer: PeerTarget,
        /// Its reason.
        why: String,
    },
    /// It went away between two questions.
    #[error("{peer} does not have domain {name} any more")]
    Left {
        /// The node that had it.
        peer: PeerTarget,
        /// Name of the domain.
        name: String,
    },
    /// The migration has ended here before libvirt was let go on.
    #[error("{0}")]
    EndedHere(String),
}

/// Why a node has not answered a question.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// It cannot be reached, or refuses.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The connection broke while it was asked.
    #[error(transparent)]
    Send(CodecError),
    /// The connection broke before it had answered.
    #[error("{peer}")]
    Answer {
        /// That node.
        peer: PeerTarget,
        /// What came instead.
        #[source]
        source: CodecError,
    },
    /// Nothing came.
    #[error("{0} did not answer within {seconds} s", seconds = ANSWER_TIMEOUT.as_secs())]
    Silence(PeerTarget),
}

/// What it takes to have guests of domains come, and to send them.
pub struct Carrier {
    /// The domains of this node.
    pub domains: Arc<Domains>,
    /// Sends and receives.
    pub engine: Arc<Engine>,
    /// Reaches other nodes.
    pub dialer: Arc<dyn Dialer>,
    /// The nodes that are asked.
    pub known: KnownPeers,
    /// Whose questions are answered.
    pub policy: Arc<PeerPolicy>,
    /// This node's name of itself.
    pub node: String,
    /// Of this node's peer port.
    pub port: u16,
    /// UUIDs of domains whose guests are to come, and whose QEMUs were not started yet.
    pub announced: Mutex<HashSet<String>>,
}

impl std::fmt::Debug for Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Carrier").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Carrier {
    /// libvirt is about to start a QEMU for the guest of this domain.
    ///
    /// # Errors
    /// [`CarryError`], if no node has the guest.
    pub async fn announce(&self, uuid: &str, name: &str) -> Result<(), CarryError> {
        self.who_has(uuid, name).await?;
        self.announced().insert(uuid.to_owned());
        Ok(())
    }

    /// libvirt has started a QEMU with this monitor. If it waits for a guest, that is had come, until libvirt may begin its migration; the migration.
    /// `None`: an ordinary start, or a guest that was restored, which needs nothing of us.
    ///
    /// # Errors
    /// [`CarryError`]: the guest stays where it is.
    pub async fn started(&self, uuid: &str, monitor: &Path) -> Result<Option<SessionId>, CarryError> {
        let announced = self.announced().remove(uuid);
        match self.domains.status(monitor).await {
            Ok(status) if status == "inmigrate" => {}
            Err(error) if announced => return Err(error.into()),
            Ok(_) | Err(_) => return Ok(None),
        }
        self.receive(self.domains.look(monitor).await?).await.map(Some)
    }

    fn announced(&self) -> MutexGuard<'_, HashSet<String>> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node that has the guest.
    async fn who_has(&self, uuid: &str, name: &str) -> Result<PeerTarget, CarryError> {
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
                Ok((peer, Ok(Answer::Refused(why)))) => return Err(CarryError::AtSource { peer, why }),
                Ok((peer, Ok(_))) => said.push(format!("{peer} does not have it")),
                Ok((_, Err(error))) => said.push(chain(&error)),
                Err(error) => said.push(error.to_string()),
            }
        }
        let said = if said.is_empty() { "[nodes] names none".to_owned() } else { said.join("; ") };
        Err(CarryError::NobodyHasIt { name: name.to_owned(), node: self.node.clone(), said })
    }

    /// Has the guest's memory come, until libvirt may begin its migration.
    async fn receive(&self, domain: Domain) -> Result<SessionId, CarryError> {
        let name = domain.record.name.clone();
        let mut expected = self.domains.expect(&domain)?;
        let peer = self.who_has(&domain.uuid, &name).await?;
        let question = Question::Send { uuid: domain.uuid.clone(), port: self.port };
        let (mut channel, answer) = ask(&*self.dialer, &peer, &self.hello(), &question).await?;
        let id = match answer {
            Answer::Begun(id) => id,
            Answer::Refused(why) => return Err(CarryError::AtSource { peer, why }),
            _ => return Err(CarryError::Left { peer, name }),
        };
        tracing::info!(vm = name, migration = %id, from = %peer, "libvirt waits until most of the guest's memory is here");
        tokio::select! {
            biased;
            () = expected.may_go_on() => Ok(id),
            why = ended(&mut channel) => Err(CarryError::AtSource { peer, why }),
            why = self.ended_here(id) => Err(CarryError::EndedHere(why)),
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

async fn ask(
    dialer: &dyn Dialer,
    peer: &PeerTarget,
    hello: &Hello,
    question: &Question,
) -> Result<(Channel<Answer>, Answer), AskError> {
    let asked = async {
        let mut channel: Channel<Answer> = Channel::new(dialer.stream(peer, hello).await?);
        channel.send(question).await.map_err(AskError::Send)?;
        let none = |source| AskError::Answer { peer: peer.clone(), source };
        let answer = channel.receive().await.map_err(none)?;
        Ok((channel, answer))
    };
    tokio::time::timeout(ANSWER_TIMEOUT, asked).await.map_err(|_| AskError::Silence(peer.clone()))?
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
