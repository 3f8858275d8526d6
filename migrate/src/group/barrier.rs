//! Where the sessions of a group wait for each other, and how the group is decided.
//!
//! A member may be undone as long as the verdict is open. Once all have reached the last gate, one task ([`decide`]) writes the decision down, and from
//! then on every member is committed. Between the two nobody does anything: a line that failed may be whole on the disk.

use std::sync::Arc;

use tokio::time::sleep;
use vmove_node::journal::Journal;
use vmove_types::group::{Gate, GateWait, GroupReport};
use vmove_types::time::{Mono, ms};

use super::board::Board;
use super::record::{CalledOff, GroupRecord, GroupState};
use super::resuming::{ResumePlace, places};
use crate::owed::TRY_AGAIN;

/// What becomes of all members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing yet.
    Open,
    /// It is being written down: nobody may go either way.
    Deciding,
    /// All go forward.
    Decided,
    /// All stay.
    CalledOff(CalledOff),
}

/// How a member ends that cannot or shall not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It stays, and so do all others.
    Stays,
    /// It was committed with the others before that: it goes forward.
    Committed,
}

/// What is known of a member.
#[derive(Debug, Clone, Default)]
struct Member {
    vm: String,
    gate: Option<Gate>,
    reached_at: Option<Mono>,
    stopped_at: Option<Mono>,
    runs_at: Option<Mono>,
}

#[derive(Debug)]
struct Standing {
    members: Vec<Member>,
    verdict: Verdict,
    waits: Vec<GateWait>,
}

impl Standing {
    /// Calls the group off, unless it was decided.
    fn call_off(&mut self, why: CalledOff) {
        if self.verdict == Verdict::Open {
            self.verdict = Verdict::CalledOff(why);
        }
    }

    fn off(&self) -> Option<CalledOff> {
        if let Verdict::CalledOff(why) = &self.verdict { Some(why.clone()) } else { None }
    }
}

/// The barrier of a group.
#[derive(Debug)]
pub(crate) struct Barrier {
    standing: Board<Standing>,
}

/// A session's place at the barrier.
#[derive(Debug)]
pub(crate) struct Membership {
    barrier: Arc<Barrier>,
    index: usize,
    resume: Arc<ResumePlace>,
}

impl Barrier {
    /// Of these VMs; the memberships are in their order.
    pub(crate) fn new(vms: Vec<String>) -> (Arc<Self>, Vec<Membership>) {
        let members: Vec<_> = vms.into_iter().map(|vm| Member { vm, ..Member::default() }).collect();
        let count = members.len();
        let standing = Standing { members, verdict: Verdict::Open, waits: Vec::new() };
        let barrier = Arc::new(Self { standing: Board::new(standing) });
        let member = |(index, resume)| Membership { barrier: Arc::clone(&barrier), index, resume };
        let all = places(count).into_iter().enumerate().map(member).collect();
        (barrier, all)
    }

    /// What becomes of all members.
    pub(crate) fn verdict(&self) -> Verdict {
        self.standing.look().verdict.clone()
    }

    /// The gate at which members wait, and for whom.
    pub(crate) fn waits(&self) -> (Option<Gate>, Vec<String>) {
        let standing = self.standing.look();
        let furthest = standing.members.iter().filter_map(|member| member.gate).max();
        let behind = standing.members.iter().filter(|member| member.gate < furthest);
        let behind: Vec<String> = behind.map(|member| member.vm.clone()).collect();
        (furthest.filter(|_| !behind.is_empty()), behind)
    }

    /// Calls the group off, unless it was decided.
    pub(crate) async fn call_off(&self, why: CalledOff) -> Fate {
        self.standing.change(|standing| standing.call_off(why));
        let settled = |s: &Standing| match s.verdict {
            Verdict::Open | Verdict::Deciding => None,
            Verdict::Decided => Some(Fate::Committed),
            Verdict::CalledOff(_) => Some(Fate::Stays),
        };
        self.standing.find(settled).await
    }

    /// What is known of the way through the gates.
    pub(crate) fn fill(&self, report: &mut GroupReport) {
        let standing = self.standing.look();
        report.waits.clone_from(&standing.waits);
        let spread = |times: Option<Vec<Mono>>| {
            let times = times?;
            let (first, last) = (*times.iter().min()?, *times.iter().max()?);
            Some((first, last))
        };
        let stops = spread(standing.members.iter().map(|member| member.stopped_at).collect());
        let runs = spread(standing.members.iter().map(|member| member.runs_at).collect());
        report.stop_spread_ms = stops.map(|(first, last)| ms(last.since(first)));
        report.resume_spread_ms = runs.map(|(first, last)| ms(last.since(first)));
        report.downtime_ms = stops.zip(runs).map(|((stop, _), (_, run))| run.ms_since(stop));
    }
}

impl Membership {
    /// It is at a gate.
    pub(crate) fn reach(&self, gate: Gate) {
        self.barrier.standing.change(|standing| {
            let member = &mut standing.members[self.index];
            if member.gate < Some(gate) {
                (member.gate, member.reached_at) = (Some(gate), Some(Mono::now()));
            }
            if standing.members.iter().all(|member| member.gate >= Some(gate))
                && !standing.waits.iter().any(|wait| wait.gate == gate)
            {
                let now = Mono::now();
                let waits = standing.members.iter().filter(|member| member.gate == Some(gate));
                let waits = waits.filter_map(|member| {
                    let ms = now.ms_since(member.reached_at?).max(0.0);
                    Some(GateWait { gate, vm: member.vm.clone(), ms })
                });
                standing.waits.extend(waits.collect::<Vec<_>>());
            }
        });
    }

    /// Waits until every member is at a gate that this one has reached; of the last gate, until that is decided. Cancel-safe.
    pub(crate) async fn opened(&self, gate: Gate) -> Result<(), CalledOff> {
        let is_open = |s: &Standing| match gate {
            Gate::Loaded => s.verdict == Verdict::Decided,
            _ => s.members.iter().all(|member| member.gate >= Some(gate)),
        };
        let settled = |s: &Standing| s.off().map(Err).or_else(|| is_open(s).then_some(Ok(())));
        self.barrier.standing.find(settled).await
    }

    /// Waits until the group is called off. Cancel-safe.
    pub(crate) async fn called_off(&self) -> CalledOff {
        self.barrier.standing.find(Standing::off).await
    }

    /// It cannot or shall not go on: calls the group off, unless it was decided.
    pub(crate) async fn give_up(&self, why: String, cancelled: bool, refused: bool) -> Fate {
        let vm = (!cancelled).then(|| self.vm());
        self.barrier.call_off(CalledOff { vm, why, cancelled, refused }).await
    }

    /// Where its script waits for the devices of the others.
    pub(crate) fn resume_place(&self) -> Arc<ResumePlace> {
        Arc::clone(&self.resume)
    }

    /// When its guest stopped.
    pub(crate) fn stopped(&self, at: Mono) {
        self.barrier.standing.change(|s| s.members[self.index].stopped_at = Some(at));
    }

    /// When its guest ran at the destination, by the clock here.
    pub(crate) fn runs(&self, at: Mono) {
        self.barrier.standing.change(|s| s.members[self.index].runs_at = Some(at));
    }

    fn vm(&self) -> String {
        self.barrier.standing.look().members[self.index].vm.clone()
    }
}

impl Drop for Membership {
    /// A session that ends without a word has panicked: the others must not wait for it.
    fn drop(&mut self) {
        let vm = self.vm();
        let why = "its migration ended unexpectedly; see the log".to_owned();
        let off = CalledOff { vm: Some(vm), why, cancelled: false, refused: false };
        self.barrier.standing.change(|standing| standing.call_off(off));
    }
}

/// Waits for the last gate and writes the decision down, or that the group was called off. `owes`: a line could not be written, and is tried again.
pub(crate) async fn decide(
    barrier: &Barrier,
    journal: &mut Journal<GroupRecord>,
    owes: impl Fn(&Journal<GroupRecord>, &std::io::Error),
) -> Verdict {
    let at_the_end = |s: &Standing| s.members.iter().all(|member| member.gate == Some(Gate::Loaded));
    barrier.standing.find(|s| (s.off().is_some() || at_the_end(s)).then_some(())).await;
    let deciding = barrier.standing.change(|s| {
        let open = s.verdict == Verdict::Open;
        if open {
            s.verdict = Verdict::Deciding;
        }
        open
    });
    if deciding {
        let verdict = match journal.update(|r| r.state = GroupState::Decided) {
            Ok(()) => Verdict::Decided,
            Err(error) => {
                let why = format!("could not write the decision to {}: {error}", journal.path().display());
                // Not before nobody can find it all the same: members would run here and be committed after a restart.
                while journal.is_unsure() {
                    let Err(error) = journal.cut_back() else { break };
                    owes(journal, &error);
                    sleep(TRY_AGAIN).await;
                }
                Verdict::CalledOff(CalledOff { vm: None, why, cancelled: false, refused: false })
            }
        };
        barrier.standing.change(|s| s.verdict = verdict);
    }
    let verdict = barrier.verdict();
    if let Verdict::CalledOff(why) = &verdict {
        // Safe without its line: a daemon started anew finds no decision, and brings all back.
        let written = journal.update_owing(|r| (r.state, r.off) = (GroupState::CalledOff, Some(why.clone())));
        if let Err(error) = written {
            owes(journal, &error);
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vmove_node::disk::{DirEntry, Disk, DiskFile, KernelDisk};
    use vmove_node::peer::SessionId;

    use super::*;
    use crate::group::record::MemberRecord;

    fn journal(dir: &Path) -> Journal<GroupRecord> {
        journal_on(&KernelDisk, dir)
    }

    fn journal_on(disk: &dyn Disk, dir: &Path) -> Journal<GroupRecord> {
        let record = GroupRecord {
            id: SessionId::random(),
            members: Vec::<MemberRecord>::new(),
            state: GroupState::Gathering,
            off: None,
            incomplete: None,
            over: false,
            report: GroupReport::default(),
        };
        Journal::create_on(disk, &dir.join("group.jsonl"), record).unwrap()
    }

    /// A file on a disk that says that it could not write the decision when it has, and does not take it back at first.
    #[derive(Debug)]
    struct Stubborn {
        file: Box<dyn DiskFile>,
        refused_cuts: usize,
    }

    /// Whose files are such.
    #[derive(Debug)]
    struct StubbornDisk;

    impl Disk for StubbornDisk {
        fn create(&self, path: &Path) -> std::io::Result<Box<dyn DiskFile>> {
            Ok(Box::new(Stubborn { file: KernelDisk.create(path)?, refused_cuts: 5 }))
        }

        fn append(&self, path: &Path) -> std::io::Result<Box<dyn DiskFile>> {
            KernelDisk.append(path)
        }

        fn read(&self, path: &Path) -> std::io::Result<Vec<u8>> {
            KernelDisk.read(path)
        }

        fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
            KernelDisk.rename(from, to)
        }

        fn remove_file(&self, path: &Path) -> std::io::Result<()> {
            KernelDisk.remove_file(path)
        }

        fn create_dir_all(&self, path: &Path) -> std::io::Result<()> {
            KernelDisk.create_dir_all(path)
        }

        fn remove_dir_all(&self, path: &Path) -> std::io::Result<()> {
            KernelDisk.remove_dir_all(path)
        }

        fn list(&self, path: &Path) -> std::io::Result<Vec<DirEntry>> {
            KernelDisk.list(path)
        }

        fn exists(&self, path: &Path) -> bool {
            KernelDisk.exists(path)
        }

        fn sync_dir(&self, path: &Path) -> std::io::Result<()> {
            KernelDisk.sync_dir(path)
        }
    }

    impl std::io::Write for Stubborn {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.file.write_all(bytes)?;
            let decides = String::from_utf8_lossy(bytes).contains("\"decided\"");
            if decides { Err(std::io::Error::other("no answer")) } else { Ok(bytes.len()) }
        }

        fn flush(&mut self) -> std::io::Result<()> {
            self.file.flush()
        }
    }

    impl DiskFile for Stubborn {
        fn cut(&mut self, bytes: u64) -> std::io::Result<()> {
            if self.refused_cuts > 0 {
                self.refused_cuts -= 1;
                return Err(std::io::Error::other("no answer"));
            }
            self.file.cut(bytes)
        }

        fn bytes(&self) -> std::io::Result<u64> {
            self.file.bytes()
        }

        fn sync(&self) -> std::io::Result<()> {
            self.file.sync()
        }
    }

    fn two() -> (Arc<Barrier>, Membership, Membership) {
        let (barrier, places) = Barrier::new(vec!["a".to_owned(), "b".to_owned()]);
        let [a, b] = <[Membership; 2]>::try_from(places).unwrap();
        (barrier, a, b)
    }

    #[tokio::test]
    async fn a_gate_opens_when_the_last_is_there_and_says_who_waited() {
        let (barrier, a, b) = two();
        a.reach(Gate::Ready);
        assert_eq!(barrier.waits(), (Some(Gate::Ready), vec!["b".to_owned()]));
        let early = tokio::time::timeout(std::time::Duration::from_millis(20), a.opened(Gate::Ready)).await;
        assert!(early.is_err(), "it opened before b was there");
        b.reach(Gate::Ready);
        a.opened(Gate::Ready).await.unwrap();
        let mut report = GroupReport::default();
        barrier.fill(&mut report);
        assert_eq!((report.waits.len(), report.waits[0].vm.as_str()), (2, "a"));
        assert!(report.waits[0].ms >= 20.0 && report.waits[1].ms < report.waits[0].ms, "{:?}", report.waits);
    }

    #[tokio::test]
    async fn who_gives_up_before_the_decision_calls_all_off_and_after_it_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let (barrier, a, b) = two();
        assert_eq!(a.give_up("no room".to_owned(), false, true).await, Fate::Stays);
        let why = b.opened(Gate::Loaded).await.unwrap_err();
        assert_eq!((why.told().as_str(), why.refused), ("a: no room", true));
        let mut written = journal(dir.path());
        assert!(matches!(decide(&barrier, &mut written, |_, _| ()).await, Verdict::CalledOff(_)));
        assert_eq!(written.record().state, GroupState::CalledOff);

        let dir = tempfile::tempdir().unwrap();
        let (barrier, a, b) = two();
        let mut written = journal(dir.path());
        a.reach(Gate::Loaded);
        b.reach(Gate::Loaded);
        assert_eq!(decide(&barrier, &mut written, |_, _| ()).await, Verdict::Decided);
        assert_eq!(a.give_up("too late".to_owned(), true, false).await, Fate::Committed);
        b.opened(Gate::Loaded).await.unwrap();
        drop((a, b));
        assert_eq!(barrier.verdict(), Verdict::Decided);
        assert_eq!(Journal::<GroupRecord>::read(written.path()).unwrap().state, GroupState::Decided);
    }

    /// Nobody goes either way while the line is being written: it may be found whole.
    #[tokio::test]
    async fn who_gives_up_while_it_is_being_decided_waits_for_that() {
        let (barrier, a, _b) = two();
        barrier.standing.change(|s| s.verdict = Verdict::Deciding);
        let giving_up = tokio::spawn(async move { a.give_up("cut".to_owned(), false, false).await });
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        assert!(!giving_up.is_finished());
        barrier.standing.change(|s| s.verdict = Verdict::Decided);
        assert_eq!(giving_up.await.unwrap(), Fate::Committed);
    }

    /// Whoever is told that the group is called off lets its guest run, and a daemon that is killed then believes what it finds.
    #[tokio::test(start_paused = true)]
    async fn nobody_goes_back_before_the_line_of_a_decision_that_failed_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let (barrier, a, b) = two();
        let mut written = journal_on(&StubbornDisk, dir.path());
        let path = written.path().to_owned();
        a.reach(Gate::Loaded);
        b.reach(Gate::Loaded);
        let going_back = async {
            b.called_off().await;
            Journal::<GroupRecord>::read(&path).unwrap().state
        };
        let (verdict, found) = tokio::join!(decide(&barrier, &mut written, |_, _| ()), going_back);
        assert!(matches!(verdict, Verdict::CalledOff(_)));
        assert_ne!(found, GroupState::Decided, "a guest runs here, and its group is decided");
    }

    #[tokio::test]
    async fn a_member_that_ends_without_a_word_is_not_waited_for() {
        let (_barrier, a, b) = two();
        drop(a);
        let why = b.opened(Gate::Prepared).await.unwrap_err();
        assert!(why.told().contains("a: its migration ended unexpectedly"), "{}", why.told());
    }
}
