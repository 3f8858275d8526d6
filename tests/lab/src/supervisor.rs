//! Owns the hosts and the switch of one lab.
//!
//! When the supervisor ends, so does everything: on request, on Ctrl-C, when its time is over, and, because the kernel
//! kills the QEMUs with it, when it is killed.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Child;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::host::{self, Places, Shape};
use crate::switch::Switch;
use crate::wire::{Command, Event, Numbered, Request, line};

/// Longest time until a host answers. Emulated hosts on a busy machine take their time.
const BOOT_TIME: Duration = Duration::from_secs(120);

/// A running lab.
#[derive(Debug)]
pub struct Lab {
    places: Places,
    switch: Arc<Switch>,
    /// Between the cards with virtual functions, where the hosts have them.
    cards: Option<Arc<Switch>>,
    hosts: Vec<Arc<Agent>>,
    machines: Mutex<Vec<Child>>,
}

/// The supervisor's end of a host's serial port.
#[derive(Debug)]
struct Agent {
    port: Mutex<UnixStream>,
    next: AtomicU64,
    asked: Mutex<HashMap<u64, Sender<Event>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lab {
    /// Starts switch and hosts, and waits until every host answers. To be called on the main thread: the hosts live as
    /// long as the thread that starts them.
    ///
    /// # Errors
    /// Something could not be started, or a host did not come up; the message names its logs.
    pub fn start(places: &Places, shape: &Shape) -> Result<Self> {
        if !(1..=9).contains(&shape.hosts) {
            bail!("{} hosts; expected 1 to 9", shape.hosts);
        }
        std::fs::create_dir_all(&places.state)?;
        let wires: Vec<PathBuf> = (1..=shape.hosts).map(|number| places.wire(number)).collect();
        let switch = Switch::start(&wires)?;
        let cards = (1..=shape.hosts).map(|number| places.card(number));
        let cards: Vec<PathBuf> =
            cards.chain((1..=shape.hosts).map(|number| places.beside_card(number))).collect();
        let cards = shape.devices.then(|| Switch::start(&cards)).transpose()?;
        let program = std::env::current_exe()?;
        let mut lab =
            Self { places: places.clone(), switch, cards, hosts: Vec::new(), machines: Mutex::default() };
        for number in 1..=shape.hosts {
            lock(&lab.machines).push(host::start(places, shape, number, &program)?);
        }
        for number in 1..=shape.hosts {
            lab.hosts.push(lab.meet(number)?);
        }
        for (index, agent) in lab.hosts.iter().enumerate() {
            lab.wait_for(index + 1, agent, shape.rdma)?;
        }
        Ok(lab)
    }

    /// Connects to the port of a host's agent.
    fn meet(&self, number: usize) -> Result<Arc<Agent>> {
        let begin = Instant::now();
        loop {
            match UnixStream::connect(self.places.port(number)) {
                Ok(port) => return Agent::start(port),
                Err(_) if begin.elapsed() < Duration::from_secs(10) => {
                    self.check_alive(number)?;
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => return Err(error).context(format!("host h{number} has no serial port")),
            }
        }
    }

    /// Waits for the first answer, which also says whether there is an RDMA device if there should be one.
    fn wait_for(&self, number: usize, agent: &Arc<Agent>, rdma: bool) -> Result<()> {
        let probe = if rdma { "test -e /sys/class/infiniband/rxe0" } else { "true" };
        let command = Command {
            argv: ["sh", "-c", probe].map(str::to_owned).to_vec(),
            env: Vec::new(),
            folder: None,
            timeout_ms: 10_000,
        };
        let events = agent.ask(command)?;
        let begin = Instant::now();
        loop {
            match events.recv_timeout(Duration::from_millis(200)) {
                Ok(Event::Exit { status: 0 }) => return Ok(()),
                Ok(Event::Exit { status }) => {
                    let log = self.places.console(number);
                    bail!("host h{number} has no RDMA device (status {status}); see {}", log.display());
                }
                Ok(_) => {}
                Err(_) if begin.elapsed() > BOOT_TIME => {
                    let log = self.places.console(number);
                    bail!("host h{number} did not come up in {BOOT_TIME:?}; see {}", log.display());
                }
                Err(_) => self.check_alive(number)?,
            }
        }
    }

    fn check_alive(&self, number: usize) -> Result<()> {
        if let Some(status) = lock(&self.machines)[number - 1].try_wait()? {
            let log = self.places.qemu_log(number);
            let words = std::fs::read_to_string(&log).unwrap_or_default();
            bail!("the QEMU of host h{number} ended with {status}: {}; see {}", words.trim(), log.display());
        }
        Ok(())
    }

    /// Runs a command in a host; its events end with [`Event::Exit`].
    ///
    /// # Errors
    /// There is no such host, or its port is gone.
    pub fn exec(&self, host: usize, command: Command) -> Result<Receiver<Event>> {
        let count = self.hosts.len();
        let agent = host.checked_sub(1).and_then(|index| self.hosts.get(index));
        agent.with_context(|| format!("no host h{host}; there are h1 to h{count}"))?.ask(command)
    }

    /// Where its parts are.
    #[must_use]
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// The switch between the hosts.
    #[must_use]
    pub fn switch(&self) -> &Switch {
        &self.switch
    }

    /// The switch between the cards with virtual functions, where the hosts have them.
    #[must_use]
    pub fn cards(&self) -> Option<&Switch> {
        self.cards.as_deref()
    }

    /// Takes requests on the control socket until one says `down`, the time is over, or `stop` receives something.
    ///
    /// # Errors
    /// The control socket cannot be made.
    pub fn serve(self: &Arc<Self>, stop: &Receiver<()>, stopper: &Sender<()>, time: Duration) -> Result<()> {
        let control = self.places.control();
        let listener = UnixListener::bind(&control)
            .with_context(|| format!("could not bind {}; is this lab up already?", control.display()))?;
        let (lab, stopper) = (Arc::clone(self), stopper.clone());
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let (lab, stopper) = (Arc::clone(&lab), stopper.clone());
                std::thread::spawn(move || {
                    if let Err(error) = lab.answer(&stream, &stopper) {
                        let _ =
                            line(&Event::Failed(format!("{error:#}"))).map(|line| (&stream).write_all(&line));
                    }
                });
            }
        });
        let _ = stop.recv_timeout(time);
        Ok(())
    }

    fn answer(&self, mut stream: &UnixStream, stopper: &Sender<()>) -> Result<()> {
        let mut text = String::new();
        BufReader::new(stream).read_line(&mut text)?;
        let mut say = |event: &Event| -> Result<()> { Ok(stream.write_all(&line(event)?)?) };
        match serde_json::from_str(&text).context("not a request")? {
            Request::Exec { host, command } => {
                for event in self.exec(host, command)? {
                    let last = matches!(event, Event::Exit { .. });
                    say(&event)?;
                    if last {
                        return Ok(());
                    }
                }
                bail!("host h{host} went away")
            }
            Request::Rule { from, to, rule } => {
                let count = self.hosts.len();
                for number in [from, to].into_iter().flatten() {
                    anyhow::ensure!(
                        (1..=count).contains(&number),
                        "no host h{number}; there are h1 to h{count}"
                    );
                }
                self.switch.set(from.map(|n| n - 1), to.map(|n| n - 1), rule);
                say(&Event::Done)
            }
            Request::Stats => say(&Event::Text(self.switch.stats())),
            Request::Down => {
                self.stop();
                say(&Event::Done)?;
                Ok(stopper.send(())?)
            }
        }
    }

    /// Ends the hosts.
    pub fn stop(&self) {
        for machine in lock(&self.machines).iter_mut() {
            let _ = machine.kill();
            let _ = machine.wait();
        }
    }

    /// Ends the hosts and removes the sockets; logs stay. Other threads may still hold the lab, so that its drop would
    /// come too late.
    pub fn clean_up(&self) {
        self.stop();
        let places = &self.places;
        for number in 1..=self.hosts.len().max(1) {
            for path in [
                places.wire(number),
                places.card(number),
                places.beside_card(number),
                places.port(number),
                places.terminal(number),
            ] {
                let _ = std::fs::remove_file(path);
            }
        }
        let _ = std::fs::remove_file(places.control());
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.clean_up();
    }
}

impl Agent {
    fn start(port: UnixStream) -> Result<Arc<Self>> {
        let lines = BufReader::new(port.try_clone()?);
        let agent =
            Arc::new(Self { port: Mutex::new(port), next: AtomicU64::new(1), asked: Mutex::default() });
        let reader = Arc::clone(&agent);
        std::thread::spawn(move || {
            for text in lines.lines().map_while(Result::ok) {
                match serde_json::from_str::<Numbered<Event>>(&text) {
                    Ok(event) => reader.deliver(event),
                    Err(error) => eprintln!("lab: a host said what is no event: {error}: {text}"),
                }
            }
            lock(&reader.asked).clear(); // whoever waits sees the end
        });
        Ok(agent)
    }

    fn deliver(&self, event: Numbered<Event>) {
        let mut asked = lock(&self.asked);
        let last = matches!(event.what, Event::Exit { .. });
        if let Some(asker) = asked.get(&event.id) {
            let _ = asker.send(event.what);
        }
        if last {
            asked.remove(&event.id);
        }
    }

    fn ask(&self, what: Command) -> Result<Receiver<Event>> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (asker, events) = channel();
        lock(&self.asked).insert(id, asker);
        lock(&self.port).write_all(&line(&Numbered { id, what })?).context("a host's serial port is gone")?;
        Ok(events)
    }
}
