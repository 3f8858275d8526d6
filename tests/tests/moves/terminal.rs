//! A program on a terminal of its own, and what that shows.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, Termios, tcgetattr};
use nix::unistd::Pid;

/// A program that does not show or do what is expected in this time fails its test.
const PATIENCE: Duration = Duration::from_secs(60);

/// A pseudo terminal, the program on it, and what it shows.
pub struct Terminal {
    program: Child,
    keyboard: File,
    /// The program's end, which keeps its modes when that has ended.
    line: OwnedFd,
    before: Termios,
    screen: Arc<Mutex<vt100::Parser>>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    /// Starts a program as the leader of a session whose terminal this is.
    pub fn start(program: &Command, columns: u16, rows: u16) -> Self {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).expect("a pseudo terminal");
        let before = tcgetattr(&pty.slave).expect("its modes");
        let line = || Stdio::from(pty.slave.try_clone().expect("a descriptor"));
        let mut command = Command::new("setsid");
        command
            .arg("--ctty")
            .arg(program.get_program())
            .args(program.get_args())
            .env("TERM", "xterm-256color");
        let child = command.stdin(line()).stdout(line()).stderr(line()).spawn().expect("it starts");
        let side = |number| NonZeroU16::new(number).expect("a terminal has columns and rows");
        let screen = Arc::new(Mutex::new(vt100::Parser::new(side(rows), side(columns), 0)));
        let mut output = File::from(pty.master);
        let keyboard = output.try_clone().expect("a descriptor");
        let shown = Arc::clone(&screen);
        let reader = std::thread::spawn(move || {
            let mut some = [0; 4096];
            // An error is the end: nobody has the terminal open any more.
            while let Ok(count) = output.read(&mut some) {
                if count == 0 {
                    return;
                }
                lock(&shown).process(&some[..count]);
            }
        });
        Self { program: child, keyboard, line: pty.slave, before, screen, reader: Some(reader) }
    }

    /// What it shows now.
    pub fn text(&self) -> String {
        lock(&self.screen).screen().contents()
    }

    /// Waits until it shows what is wanted, and returns that.
    #[track_caller]
    pub fn until(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = self.text();
            if wanted(&text) {
                return text;
            }
            assert!(Instant::now() < deadline, "expected {what}, found\n{text}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Presses keys.
    pub fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("keys are taken");
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.program.id()).expect("a pid")), signal).expect("it runs");
    }

    /// The program has the terminal for itself: what is typed is not shown, and does not wait for the end of a line.
    #[track_caller]
    pub fn is_taken(&self) {
        let modes = tcgetattr(&self.line).expect("modes");
        assert!(!modes.local_flags.intersects(LocalFlags::ICANON | LocalFlags::ECHO), "{modes:?}");
        assert!(lock(&self.screen).screen().alternate_screen(), "it would overwrite what was shown before");
    }

    /// Waits for the end of the program, and checks that the terminal is as it was.
    #[track_caller]
    pub fn end(mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.program.try_wait().expect("it can be waited for") {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end; it shows\n{}", self.text());
            std::thread::sleep(Duration::from_millis(20));
        };
        let after = tcgetattr(&self.line).expect("modes");
        assert_eq!(after, self.before, "its modes are not as before");
        // What it wrote last is read.
        std::thread::sleep(Duration::from_millis(100));
        let parser = lock(&self.screen);
        assert!(!parser.screen().alternate_screen(), "what was there before is not shown again");
        assert!(!parser.screen().hide_cursor(), "the cursor is hidden");
        drop(parser);
        status
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It has ended, or its test has failed.
        let _ = self.program.kill();
        let _ = self.program.wait();
        // The reader ends with the last descriptor of the line, which is ours.
        drop(self.reader.take());
    }
}

fn lock(screen: &Mutex<vt100::Parser>) -> MutexGuard<'_, vt100::Parser> {
    screen.lock().unwrap_or_else(PoisonError::into_inner)
}
